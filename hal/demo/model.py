"""`Llama`: the forward pass of a Llama over a paged cache.

Every layer calls `rope_kv_write` on views of its fused qkv, which rotates q in place and puts k and v in the cache
with no copy in between, and then one attention op for all requests of the batch, over the cache as it lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hal import _host
from hal.kv.pool import KVPool


@dataclass(frozen=True)
class Batch:
    """One forward pass: prompts, single decoded tokens, or both, one request's tokens after the other's.

    Args:
        tokens: ``[n]`` ids to compute.
        positions: ``[n]`` of each in its request; -1: padding.
        slots: ``[n]`` where its keys and values go; -1: nowhere.
        kv_indptr: ``[bs + 1]`` where each request begins in kv_indices.
        kv_indices: the slots of all tokens of each request, those to be written now included.
        qo_indptr: ``[bs + 1]`` where each request begins among the n; None: each has one.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    qo_indptr: Tensor | None = None

    @classmethod
    def empty(cls, n: int, requests: int, listed: int, device: torch.device, *, decode: bool) -> Batch:
        """Buffers for `n` tokens of `requests` requests that have `listed` in all."""

        def ints(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        starts = None if decode else ints(requests + 1)
        return cls(ints(n), ints(n), ints(n), ints(requests + 1), ints(listed), starts)


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
        ops: hal's ops as attributes, as for `PagedCache`.

    Raises:
        ValueError: the config asks for what this file does not do.
    """

    def __init__(self, config: Any, weights: Mapping[str, Tensor], ops: Any) -> None:
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

        power = _host.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        angle = torch.outer(_host.arange(self.max_positions).float(), 1.0 / rope["rope_theta"] ** power)
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
        n = len(x)
        ends = None if batch.qo_indptr is None else batch.qo_indptr[1:] - 1
        qkv_heads = [self.q_heads, self.kv_heads, self.kv_heads]
        for i, layer in enumerate(self.layers):
            qkv = linear(rms_norm(x, layer.input_norm, self.eps), layer.qkv)
            q, k, v = torch.split(qkv.view(n, -1, self.head_dim), qkv_heads, dim=1)
            k_cache, v_cache = pool.layer(i)
            self.ops.rope_kv_write(q, k, v, self.cos_sin, batch.positions, k_cache, v_cache, batch.slots, write_k=False)
            heads = self._attention(q, k_cache, v_cache, batch).view(n, -1)
            if layer is self.layers[-1] and ends is not None:
                heads, x = heads[ends], x[ends]  # nobody reads the others any more
            x = linear(heads, layer.o, x)
            gate_up = linear(rms_norm(x, layer.mlp_norm, self.eps), layer.gate_up)
            gate, up = gate_up.chunk(2, dim=-1)
            x = linear(functional.silu(gate).mul_(up), layer.down, x)
        return linear(rms_norm(x, self.norm, self.eps), self.lm_head).float()

    def _attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor | None, batch: Batch) -> Tensor:
        scale, listed = self.head_dim**-0.5, (batch.kv_indptr, batch.kv_indices)
        if batch.qo_indptr is None:
            out = self.ops.decode_attention(q, k_cache, v_cache, *listed, scale=scale)
        else:
            out = self.ops.extend_attention(q, k_cache, v_cache, batch.qo_indptr, *listed, scale=scale)
        assert isinstance(out, Tensor)
        return out

    def examples(self, pool: KVPool) -> dict[str, dict[str, Any]]:
        """op -> a call of the model's own kind: what `hal.bind` chooses by, and what a graph will hold."""
        n, (k_cache, v_cache) = 2, pool.layer(0)
        b = Batch.empty(n, n, n, self.device, decode=False)
        heads = self.embed.new_empty(n, self.q_heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = torch.split(heads, [self.q_heads, self.kv_heads, self.kv_heads], dim=1)
        cache = {"k_cache": k_cache, "v_cache": v_cache}
        attend = {"q": q, **cache, "kv_indptr": b.kv_indptr, "kv_indices": b.kv_indices, "scale": 1.0}
        rope = {"q": q, "k": k, "v": v, "cos_sin_cache": self.cos_sin, "positions": b.positions, "slots": b.slots}
        return {
            "rope_kv_write": {**rope, **cache, "write_k": False},
            "decode_attention": attend,
            "extend_attention": {**attend, "qo_indptr": b.qo_indptr},
        }


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` of each row, in fp32."""
    if not x.is_cpu:
        return functional.rms_norm(x, weight.shape, weight, eps)
    # torch has no kernel of its own for it on the CPU; this takes a fifth of the time of its many.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale: Tensor = norm.square_().div_(x.shape[1]).add_(eps).rsqrt_()
    return (x * scale).to(x.dtype) * weight


def linear(x: Tensor, weight: Tensor, plus: Tensor | None = None) -> Tensor:
    """``x @ weight.T``, and `plus` added."""
    if _onednn is not None and x.is_cpu and x.dtype == torch.float32 and len(x) >= 4:
        out: Tensor = _onednn(x, weight, None, "none", [], "")
        return out if plus is None else out.add_(plus)
    return torch.mm(x, weight.t()) if plus is None else torch.addmm(plus, x, weight.t())


_onednn = None
if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
    # What torch.compile makes of a linear layer on the CPU. torch.mm leaves it to MKL, which needs a third more time
    # for eight rows whose weights come out of memory, and less for one.
    _onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
