"""`decode_attention_fwd`, `extend_attention_fwd_unified`, `extend_attention_fwd`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hal
from hal.engines._sinks import join_sinks, room_for
from hal.engines.sglang.kernels._common import Unsupported, refuse


def decode_attention_fwd(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    o: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    attn_logits: Any,
    attn_lse: Any,
    num_kv_splits: Any,
    max_kv_splits: int,
    sm_scale: float,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    xai_temperature_len: int = -1,
    has_mla: bool = False,
    use_pdl: bool = False,
    page_size: int = 1,
    score_mod: Any = None,
    aux_tensors: Any = None,
    **tuning: Any,
) -> None:
    """Attention of one query a request, into o ``[bs, heads, v_dim]``.

    SGLang's scratch (`attn_logits`, `attn_lse`, the splits) stays as it was.
    """
    name = "decode_attention_fwd"
    _plain(name, xai_temperature_len, score_mod, aux_tensors)
    bs, lse = q.shape[0], room_for(q, sinks)
    hal.decode_attention(
        q, k_buffer, v_buffer, kv_indptr[: bs + 1], kv_indices, o, lse, scale=sm_scale, logit_cap=logit_cap,
        **_scales(name, q, k_buffer, k_scale, v_scale),
    )  # fmt: skip
    join_sinks(o, lse, sinks)


def extend_attention_fwd_unified(
    q: Tensor,
    o: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    prefix_lens: Tensor | None,
    max_len_extend: int,
    custom_mask: Tensor | None = None,
    mask_indptr: Tensor | None = None,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    is_causal: bool = True,
    sliding_window_size: int = -1,
    sinks: Tensor | None = None,
    window_start_pos: Tensor | None = None,
    xai_temperature_len: int = -1,
    page_size: int = 1,
    score_mod: Any = None,
    aux_tensors: Any = None,
) -> None:
    """Attention of several queries a request over the slots of all its tokens, into o ``[n, heads, v_dim]``."""
    name = "extend_attention_fwd_unified"
    _plain(name, xai_temperature_len, score_mod, aux_tensors)
    refuse(name, custom_mask=custom_mask)
    lse = room_for(q, sinks)
    hal.extend_attention(
        q, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, o, lse,
        scale=q.shape[-1] ** -0.5 if sm_scale is None else sm_scale, causal=is_causal,
        sliding_window=sliding_window_size, logit_cap=logit_cap, **_scales(name, q, k_buffer, k_scale, v_scale),
    )  # fmt: skip
    join_sinks(o, lse, sinks)


def extend_attention_fwd(
    q_extend: Tensor,
    k_extend: Tensor,
    v_extend: Tensor,
    o_extend: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    custom_mask: Tensor | None = None,
    is_causal: bool = True,
    mask_indptr: Tensor | None = None,
    max_len_extend: int = 0,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    skip_prefix_custom_mask: bool = True,
    sliding_window_size: int = -1,
    sinks: Tensor | None = None,
    window_kv_offsets: Tensor | None = None,
    xai_temperature_len: int = -1,
    lse_extend: Tensor | None = None,
    skip_prefix: bool = False,
    skip_extend: bool = False,
    page_size: int = 1,
    score_mod: Any = None,
    aux_tensors: Any = None,
    **tuning: Any,
) -> None:
    """The same where `kv_indices` lists the cached prefix alone, and new k and v ``[n, heads, dim]`` lie apart.

    hal's op reads one cache: the prefix's rows and the new ones are copied side by side first, with a wait for the
    device. Where k and v are in the cache already, `extend_attention_fwd_unified` copies nothing.
    """
    name = "extend_attention_fwd"
    _plain(name, xai_temperature_len, score_mod, aux_tensors)
    refuse(
        name, custom_mask=custom_mask, window_kv_offsets=window_kv_offsets, skip_prefix=skip_prefix,
        skip_extend=skip_extend,
    )  # fmt: skip
    if k_buffer.dtype != k_extend.dtype:
        raise Unsupported(f"hal: {name}: a cache of {k_buffer.dtype} beside new rows of {k_extend.dtype}")
    scales = _scales(name, q_extend, k_buffer, k_scale, v_scale)
    bs, n = qo_indptr.shape[0] - 1, q_extend.shape[0]
    qo, kv = qo_indptr.to(torch.int64), kv_indptr[: bs + 1].to(torch.int64)
    cached = int(kv[-1])
    rows = kv_indices[:cached].to(torch.int64)
    k, v = (
        torch.cat([cache.flatten(0, -3)[rows], new])
        for cache, new in ((k_buffer, k_extend), (v_buffer, v_extend))
    )

    # Where each row of k and v comes in its request's list: cached ones before new ones.
    def count(end: int) -> Tensor:
        return torch.arange(end, dtype=torch.int64, device=qo.device)

    request = count(bs)
    old = count(cached) + qo[:-1][request.repeat_interleave(kv.diff(), output_size=cached)]
    fresh = count(n) + kv[1:][request.repeat_interleave(qo.diff(), output_size=n)]
    indices = torch.empty(cached + n, dtype=torch.int64, device=qo.device)
    indices[torch.cat([old, fresh])] = count(cached + n)
    lse = room_for(q_extend, sinks) if lse_extend is None else lse_extend
    hal.extend_attention(
        q_extend, k, v, qo, kv + qo, indices, o_extend, lse,
        scale=q_extend.shape[-1] ** -0.5 if sm_scale is None else sm_scale, causal=is_causal,
        sliding_window=sliding_window_size, logit_cap=logit_cap, **scales,
    )  # fmt: skip
    join_sinks(o_extend, lse, sinks)
    if lse_extend is not None and sinks is not None:
        # As upstream's: the sink counts, but where there is no key.
        lse_extend.copy_(
            torch.where(lse_extend.isneginf(), lse_extend, torch.logaddexp(lse_extend, sinks.float()))
        )


def _plain(function: str, temperature: int, score_mod: Any, aux_tensors: Any) -> None:
    refuse(
        function, xai_temperature_len=temperature if temperature > 0 else None, score_mod=score_mod,
        aux_tensors=aux_tensors,
    )  # fmt: skip


def _scales(function: str, q: Tensor, cache: Tensor, k_scale: Any, v_scale: Any) -> dict[str, Any]:
    """The scales of an fp8 cache; another has none."""
    if cache.dtype != q.dtype:
        return {"k_scale": k_scale, "v_scale": v_scale}
    refuse(function, k_scale=None if k_scale == 1.0 else k_scale, v_scale=None if v_scale == 1.0 else v_scale)
    return {}
