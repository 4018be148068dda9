"""`decode_attention_fwd`, `extend_attention_fwd_unified`, `extend_attention_fwd`, `merge_state_triton`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hal
from hal.engines._masks import lists_of_tokens
from hal.engines._softmax import join_parts, join_sinks, room_for
from hal.engines.sglang.kernels._common import Unsupported, refuse

_LN2 = math.log(2)


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
        q,
        k_buffer,
        v_buffer,
        kv_indptr[: bs + 1],
        kv_indices,
        o,
        lse,
        scale=sm_scale,
        logit_cap=logit_cap,
        **_scales(name, q, k_buffer, k_scale, v_scale),
    )
    join_sinks(o, lse, sinks)


decode_attention_fwd_normal = decode_attention_fwd_grouped = decode_attention_fwd


def context_attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    b_start_loc: Tensor,
    b_seq_len: Tensor,
    max_input_len: int,
    is_causal: bool = True,
    sm_scale: float | None = None,
) -> None:
    """Attention of whole prompts over themselves, into o; q, k, v ``[n, heads, dim]``, one prompt after another."""
    indptr = torch.cat([b_start_loc, (b_start_loc + b_seq_len)[-1:]]).to(torch.int64)
    rows = torch.arange(q.shape[0], dtype=torch.int64, device=q.device)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    hal.extend_attention(q, k, v, indptr, indptr, rows, o, scale=scale, causal=is_causal)


def _also_without_scales(run: Callable[..., None]) -> Callable[..., None]:
    """By SGLang's earlier signature too, which goes on with `qo_indptr` where `k_scale` and `v_scale` are now."""

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> None:
        if len(args) <= 4:
            kwargs = {"k_scale": None, "v_scale": None, **kwargs}
        elif isinstance(args[4], Tensor) and not args[4].is_floating_point():
            args = (*args[:4], None, None, *args[4:])
        run(*args, **kwargs)

    return call


@_also_without_scales
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
    _check_mask(name, custom_mask, mask_indptr, sliding_window_size)
    lse = room_for(q, sinks)
    _attend(
        (q, k_buffer, v_buffer),
        (qo_indptr, kv_indptr, kv_indices),
        o,
        lse,
        custom_mask,
        mask_indptr,
        False,
        scale=q.shape[-1] ** -0.5 if sm_scale is None else sm_scale,
        causal=is_causal,
        sliding_window=sliding_window_size,
        logit_cap=logit_cap,
        **_scales(name, q, k_buffer, k_scale, v_scale),
    )
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

    Two calls, over the prefix and over the new rows, and both joined. hal's op reads one cache: with a mask or a window
    the rows of both are copied side by side first, with a wait for the device. Where k and v are in the cache already,
    `extend_attention_fwd_unified` copies nothing.
    """
    name = "extend_attention_fwd"
    _plain(name, xai_temperature_len, score_mod, aux_tensors)
    _check_mask(name, custom_mask, mask_indptr, sliding_window_size)
    refuse(name, window_kv_offsets=window_kv_offsets)
    scale = q_extend.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    scales = _scales(name, q_extend, k_buffer, k_scale, v_scale)
    options: dict[str, Any] = {"scale": scale, "logit_cap": logit_cap}
    lse = torch.empty(q_extend.shape[:2], dtype=torch.float32, device=q_extend.device)
    lse = lse if lse_extend is None else lse_extend
    if custom_mask is None and sliding_window_size < 0:
        prefix = k_buffer, v_buffer, qo_indptr, kv_indptr[: qo_indptr.shape[0]], kv_indices
        rows = torch.arange(q_extend.shape[0], dtype=torch.int64, device=q_extend.device)
        new = k_extend, v_extend, qo_indptr, qo_indptr, rows
        if not skip_prefix:
            hal.extend_attention(q_extend, *prefix, o_extend, lse, causal=False, **{**options, **scales})
        if not skip_extend:
            own, sums = (o_extend, lse) if skip_prefix else (torch.empty_like(o_extend), torch.empty_like(lse))
            hal.extend_attention(q_extend, *new, own, sums, causal=is_causal, **options)
            if not skip_prefix:
                join_parts(o_extend, lse, own, sums, lse)
        _sink(o_extend, lse, sinks)
        return
    refuse(name, skip_prefix=skip_prefix, skip_extend=skip_extend)
    if k_buffer.dtype != k_extend.dtype:
        raise Unsupported(f"hal: {name}: a cache of {k_buffer.dtype} beside new rows of {k_extend.dtype}")
    bs, n = qo_indptr.shape[0] - 1, q_extend.shape[0]
    qo, kv = qo_indptr.to(torch.int64), kv_indptr[: bs + 1].to(torch.int64)
    cached = int(kv[-1])
    rows = kv_indices[:cached].to(torch.int64)
    k, v = (torch.cat([cache.flatten(0, -3)[rows], new]) for cache, new in ((k_buffer, k_extend), (v_buffer, v_extend)))

    # Where each row of k and v comes in its request's list: cached ones before new ones.
    def count(end: int) -> Tensor:
        return torch.arange(end, dtype=torch.int64, device=qo.device)

    request = count(bs)
    old = count(cached) + qo[:-1][request.repeat_interleave(kv.diff(), output_size=cached)]
    fresh = count(n) + kv[1:][request.repeat_interleave(qo.diff(), output_size=n)]
    indices = torch.empty(cached + n, dtype=torch.int64, device=qo.device)
    indices[torch.cat([old, fresh])] = count(cached + n)
    _attend(
        (q_extend, k, v),
        (qo, kv + qo, indices),
        o_extend,
        lse,
        custom_mask,
        mask_indptr,
        skip_prefix_custom_mask,
        causal=is_causal,
        sliding_window=sliding_window_size,
        **options,
        **scales,
    )
    _sink(o_extend, lse, sinks)


def merge_state_triton(
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output: Tensor | None = None,
    output_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Two attentions over different keys as one; the logarithms are natural."""
    merged = torch.empty_like(prefix_lse) if output_lse is None else output_lse
    out = prefix_output.clone() if output is None else output.copy_(prefix_output)
    return join_parts(out, prefix_lse, suffix_output, suffix_lse, merged), merged


def merge_state_v2(
    v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, v_merged: Tensor | None = None, s_merged: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`sgl_kernel`'s name for the same."""
    return merge_state_triton(v_a, s_a, v_b, s_b, v_merged, s_merged)


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, *into: Tensor) -> tuple[Tensor, Tensor]:
    """The first of `sgl_kernel`'s names for it, whose logarithms are of base 2."""
    merged, lse = merge_state_triton(v_a, s_a * _LN2, v_b, s_b * _LN2, *into)
    return merged, lse.div_(_LN2)


def _attend(
    tensors: tuple[Tensor, Tensor, Tensor],
    lists: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor | None,
    mask: Tensor | None,
    mask_indptr: Tensor | None,
    skip_prefix: bool,
    **options: Any,
) -> None:
    if mask is None:
        hal.extend_attention(*tensors, *lists, out, lse, **options)
    else:
        assert mask_indptr is not None
        del options["sliding_window"], options["causal"]
        of_tokens = lists_of_tokens(mask, mask_indptr, *lists, skip_prefix)
        hal.decode_attention(*tensors, *of_tokens, out, lse, **options)


def _sink(out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    join_sinks(out, lse, sinks)
    if sinks is not None:
        # As upstream's: the sink counts, but where there is no key.
        lse.copy_(torch.where(lse.isneginf(), lse, torch.logaddexp(lse, sinks.float())))


def _check_mask(function: str, mask: Tensor | None, mask_indptr: Tensor | None, window: int) -> None:
    if mask is None:
        return
    if mask_indptr is None:
        raise Unsupported(f"hal: {function}: custom_mask is set, and mask_indptr is not")
    if window >= 0:
        raise Unsupported(f"hal: {function}: sliding_window_size {window} beside custom_mask: hal has one or the other")


def _plain(function: str, temperature: int, score_mod: Any, aux_tensors: Any) -> None:
    refuse(
        function,
        xai_temperature_len=temperature if temperature > 0 else None,
        score_mod=score_mod,
        aux_tensors=aux_tensors,
    )


def _scales(function: str, q: Tensor, cache: Tensor, k_scale: Any, v_scale: Any) -> dict[str, Any]:
    """The scales of an fp8 cache; another has none."""
    if cache.dtype != q.dtype:
        return {"k_scale": k_scale, "v_scale": v_scale}
    refuse(function, k_scale=None if k_scale == 1.0 else k_scale, v_scale=None if v_scale == 1.0 else v_scale)
    return {}
