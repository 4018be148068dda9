"""`Llama`: the forward pass of a Llama over a paged cache.

Every layer calls `rope_kv_write` on views of its fused qkv: q and k rotated in place, k and v in the
cache, no copy in between. Then torch's SDPA attends over the rows gathered from the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from hal.demo.meter import Meter
from hal.kvpool import KVPool
from hal.ops._torch import settle


@dataclass(frozen=True)
class Batch:
    """One forward pass: prompts, single decoded tokens, or both, one request's tokens after the other's.

    Args:
        tokens: ``[n]`` ids to compute.
        positions: ``[n]`` of each in its request.
        slots: ``[n]`` where its keys and values go.
        context: ``[sum(lengths)]`` the slots of each whole request, those to be written now included.
        new: of each request, how many of the n are its own; its last.
        lengths: of each request, its tokens in all.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    context: Tensor
    new: Sequence[int]
    lengths: Sequence[int]


@dataclass(frozen=True)
class Layer:
    input_norm: Tensor
    qkv: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Llama:
    """A Llama, made of the weights and the config of a transformers `LlamaForCausalLM`.

    Args:
        config: a transformers `LlamaConfig` with default RoPE and no biases.
        weights: the model's `state_dict`. What is not fused shares its memory.
        ops: the ops, counted.

    Raises:
        ValueError: the config asks for what this file does not do.
    """

    def __init__(self, config: Any, weights: Mapping[str, Tensor], ops: Meter) -> None:
        rope = config.rope_parameters
        if rope["rope_type"] != "default" or config.attention_bias or config.mlp_bias:
            raise ValueError(f"a Llama with default RoPE and no biases; got {config}")
        self.ops, self.eps = ops, config.rms_norm_eps
        self.q_heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.q_heads
        self.max_positions: int = config.max_position_embeddings
        eos = config.eos_token_id
        self.eos = frozenset(eos if isinstance(eos, list) else [eos])

        self.embed = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"]
        self.lm_head = weights.get("lm_head.weight", self.embed)
        self.layers = [self._layer(weights, f"model.layers.{i}.") for i in range(config.num_hidden_layers)]
        self.device, self.dtype = self.embed.device, self.embed.dtype

        settle()
        power = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        angle = torch.outer(torch.arange(self.max_positions).float(), 1.0 / rope["rope_theta"] ** power)
        self.cos_sin = torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.device)

    @staticmethod
    def _layer(weights: Mapping[str, Tensor], at: str) -> Layer:
        def get(*names: str) -> Tensor:
            found = [weights[f"{at}{name}.weight"] for name in names]
            return found[0] if len(found) == 1 else torch.cat(found)

        return Layer(
            get("input_layernorm"),
            get("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            get("self_attn.o_proj"),
            get("post_attention_layernorm"),
            get("mlp.gate_proj", "mlp.up_proj"),
            get("mlp.down_proj"),
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: KVPool) -> Tensor:
        """The logits after each request's last token, ``[requests, vocab]`` float32."""
        x = self.embed[batch.tokens]
        for i, layer in enumerate(self.layers):
            qkv = linear(self._rms_norm(x, layer.input_norm), layer.qkv)
            x = x + linear(self._attention(qkv, batch, pool, i), layer.o)
            gate, up = linear(self._rms_norm(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, layer.down)
        last = torch.tensor(batch.new, device=self.device).cumsum(0) - 1
        return linear(self._rms_norm(x[last], self.norm), self.lm_head).float()

    def _attention(self, qkv: Tensor, batch: Batch, pool: KVPool, layer: int) -> Tensor:
        heads = [self.q_heads, self.kv_heads, self.kv_heads]
        q, k, v = torch.split(qkv.view(qkv.shape[0], -1, self.head_dim), heads, dim=1)
        k_cache, v_cache = pool.layer(layer)
        self.ops.rope_kv_write(
            q, k, v, self.cos_sin, batch.positions, k_cache, v_cache, batch.slots, write_k=False
        )
        assert v_cache is not None
        out, at = torch.empty_like(q), 0
        # One request at a time: their lengths differ, and padding would cost more than these few calls.
        contexts = torch.split(batch.context, list(batch.lengths))
        for context, new, length in zip(contexts, batch.new, batch.lengths, strict=True):
            keys, values = (half[context].transpose(0, 1).unsqueeze(0) for half in (k_cache, v_cache))
            query = q[at : at + new].transpose(0, 1).unsqueeze(0)
            # Each new token sees itself and all before it; a single one sees everything.
            seen = None
            if new > 1:
                seen = torch.ones(new, length, dtype=torch.bool, device=self.device).tril(length - new)
            found = scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)
            out[at : at + new] = found[0].transpose(0, 1)
            at += new
        return out.flatten(1)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return weight * wide.to(x.dtype)
