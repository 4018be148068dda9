"""The attention of ``attn_implementation="hal"``: a layer's keys, as they lie, are the KV cache that the ops read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hal
from hal._errors import HalError
from hal.engines import _engine
from hal.engines._engine import EngineError
from hal.engines._softmax import join_sinks, room_for
from hal.engines.transformers import paged
from hal.engines.transformers.step import StepMask

HARMLESS = frozenset({
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids", "cache_position", "use_cache",
    "num_items_in_batch", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep",
    "read_index", "write_index", "block_table", "logits_indices", "logits_processor_args", "past_key_values",
    "position_embeddings", "is_causal", "sliding_window", "deterministic",
})  # fmt: skip
"""What layers hand on that asks nothing of attention, or that continuous batching brings for us."""


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    cache: Any = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as every function that is registered with ``AttentionInterface``.

    Args:
        module: the layer's attention module.
        query: ``[requests, q_heads, queries, head_dim]``.
        key: ``[requests, kv_heads, keys, head_dim]``, with those of earlier tokens; of a paged cache, the new ones.
        value: like key, with v_head_dim.
        attention_mask: what `step_mask` made.
        dropout: 0; anything else is refused.
        scaling: None is ``head_dim ** -0.5``.
        softcap: hal's ``logit_cap``.
        is_causal: False is refused.
        cache: the paged cache of continuous batching, or None.
        s_aux: attention sinks, ``[q_heads]`` (gpt-oss).

    Returns:
        (``[requests, queries, q_heads, v_head_dim]``, None).

    Raises:
        EngineError: the model asks for something that the ops lack; the message says what.
    """
    layer = getattr(module, "layer_idx", None)
    with _engine.layer("transformers", f"{'?' if layer is None else layer} ({type(module).__name__})"):
        try:
            _refuse(module, (query, key, value), dropout, is_causal, kwargs)
            values = {"scale": query.shape[-1] ** -0.5 if scaling is None else scaling, "logit_cap": softcap or 0.0}
            if cache is not None:
                return paged.attention(module, query, key, value, cache, kwargs, s_aux, values), None
            return _attention(query, key, value, attention_mask, s_aux, values), None
        except HalError as e:
            e.add_note(f"in transformers' layer {layer} ({type(module).__name__})")
            raise


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None, values: Any
) -> Tensor:
    if not isinstance(mask, StepMask):
        got = "none" if mask is None else f"a tensor {list(mask.shape)}"
        raise EngineError(
            f"hal: transformers: expected the mask that hal made for this step; got {got}. Masks of your own, and "
            'models that make none, can\'t run on hal — leave out attn_implementation="hal"'
        )
    step = mask.step
    if step.refused:
        raise EngineError(f"hal: transformers: this layer can't run on hal: {step.refused}")
    requests, q_heads, queries, head_dim = query.shape
    if (step.requests, step.queries, step.keys) != (requests, queries, key.shape[2]):
        raise EngineError(
            f"hal: transformers: the mask was made for {step.requests} requests of {step.queries} queries and "
            f"{step.keys} keys; got queries {list(query.shape)} and keys {list(key.shape)}"
        )
    (k_cache, stride), (v_cache, v_stride) = _as_slots(key), _as_slots(value)
    if stride != v_stride:
        (k_cache, stride), (v_cache, _) = _as_slots(key.contiguous()), _as_slots(value.contiguous())
    indptr, indices = step.slots(stride)
    q = query.transpose(1, 2).reshape(requests * queries, q_heads, head_dim)
    lists = (indptr, indices) if queries == 1 else (step.qo_indptr, indptr, indices)
    op = hal.decode_attention if queries == 1 else hal.extend_attention
    lse = room_for(q, sinks)
    out = op(q, k_cache, v_cache, *lists, **{**values, "lse": lse, "sliding_window": step.window})
    return join_sinks(out, lse, sinks).view(requests, queries, q_heads, value.shape[-1])


def _as_slots(x: Tensor) -> tuple[Tensor, int]:
    """``[requests, heads, tokens, dim]`` as ``[slots, heads, dim]``, and how many slots it is to the next request.
    Copied only where strides leave no other way.

    Where tokens of a head lie side by side, rows between a request's last and the next one's first are other heads'
    tokens: they are in no list of slots.
    """
    requests, heads, tokens, dim = x.shape
    row, head, token, one = x.stride()
    if tokens == 0 or one != 1 or token == 0 or row % token or (requests > 1 and row < token * tokens):
        x = x.contiguous()
        row, head, token, one = x.stride()
    apart = row // token if requests > 1 else tokens
    size = ((requests - 1) * apart + tokens, heads, dim)
    return x.as_strided(size, (token, head, 1)), apart


def _refuse(
    module: Any, tensors: tuple[Tensor, ...], dropout: float, is_causal: bool | None, kwargs: dict[str, Any]
) -> None:
    """Raises for what the ops lack: stock attention would do it, so it can't go unsaid."""

    def no(what: str, instead: str = 'attn_implementation="sdpa" or "eager"') -> EngineError:
        return EngineError(f"hal: transformers: {what}; hal's attention has none of that — use {instead}")

    if dropout:
        raise no(f"dropout={dropout} was asked for", "model.eval()")
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise no("gradients were asked for", 'torch.no_grad() to generate, attn_implementation="sdpa" to train')
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise no("attention that is not causal was asked for")
    if torch.compiler.is_compiling():
        raise no("torch.compile was asked for", "disable_compile=True")
    for name, value in kwargs.items():
        if name not in HARMLESS and value is not None and value is not False:
            raise no(f"{name} was asked for ({type(value).__name__})")
