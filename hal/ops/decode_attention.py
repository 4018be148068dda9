"""decode_attention: one new token of each request attends to that request's tokens in the paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hal._errors import ArgumentError
from hal.ops import _attention
from hal.ops.spec import OpSpec, describe


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    scale: float,
    sliding_window: int = -1,
    logit_cap: float = 0.0,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> Tensor:
    """Attention of one query a request over the slots that ``kv_indices[kv_indptr[i]:kv_indptr[i + 1]]`` lists.

    ``out[i] = sum_j p_j v_j`` with ``p = softmax(scale * q[i] . k_j)``; the query is that of the last listed token,
    whose k and v are in the cache already. Each key/value head serves ``q_heads / kv_heads`` consecutive query heads
    (GQA, MQA). A request with nothing to see gives zeros, and a log-sum-exp of -inf.

    Args:
        q: ``[bs, q_heads, head_dim]`` fp16, bf16 or fp32; the last dim contiguous.
        k_cache: ``[slots, kv_heads, head_dim]`` or ``[pages, page_size, kv_heads, head_dim]``, of q's dtype or fp8, any
            strides but the last dim's.
        v_cache: like k_cache, with v_head_dim. MLA: ``k_cache[..., :512]``, which backends then read once.
        kv_indptr: ``[bs + 1]`` int32 or int64. Any value is safe: clamped to [0, nnz], and a request that ends before
            it begins is empty.
        kv_indices: ``[nnz]`` int32 or int64, slots in the order of positions. -1 or out of range: no key is there,
            but the position counts.
        out: ``[bs, q_heads, v_head_dim]`` of q's dtype, written; None: a new one.
        lse: ``[bs, q_heads]`` fp32, written: the natural logarithm of ``sum_j exp(logit_j)``. None: not asked for.
        scale: what logits are multiplied by, e.g. ``head_dim ** -0.5``.
        sliding_window: how many tokens before its own a query sees (FlashInfer's ``window_left``; one less than the
            ``sliding_window`` of a Hugging Face config); -1: all.
        logit_cap: c > 0 makes a logit x ``c tanh(x / c)``, after `scale`; 0: none.
        k_scale: for an fp8 cache: what k is multiplied by; a float or a one-element float32 tensor; None is 1.
        v_scale: likewise for v.

    Returns:
        `out`. A NaN or infinity in a listed slot may reach every query head of its request; one in a slot that
        is not listed reaches none.

    Raises:
        ArgumentError: an argument breaks this contract; nothing is written.

    Example:
        >>> import torch, hal
        >>> k_cache, v_cache = torch.zeros(8, 1, 64), torch.arange(8.0).view(8, 1, 1).expand(8, 1, 64).contiguous()
        >>> indptr, slots = torch.tensor([0, 2, 3]), torch.tensor([5, 6, 1])
        >>> hal.decode_attention(torch.ones(2, 4, 64), k_cache, v_cache, indptr, slots, scale=0.125)[:, 0, 0]
        tensor([5.5000, 1.0000])

    Source: Vaswani et al. (arXiv:1706.03762); one pass with a running maximum, split over the keys and merged by
    log-sum-exp: Milakov and Gimelshein (arXiv:1805.02867), Dao et al. (arXiv:2205.14135, Flash-Decoding).
    """
    start, end = _attention.bounds(kv_indptr, kv_indices.shape[0])
    if sliding_window >= 0:
        # No wider than the list, or the difference might wrap.
        start = torch.maximum(start, end - 1 - min(sliding_window, kv_indices.shape[0]))
    found, sums = _attention.reference(q, k_cache, v_cache, kv_indices, start, end, scale, logit_cap, k_scale, v_scale)
    if lse is not None:
        lse.copy_(sums)
    return found.to(q.dtype) if out is None else out.copy_(found)


def _check_sizes(
    q: Tensor,
    k_cache: Any,
    v_cache: Any,
    kv_indptr: Tensor,
    kv_indices: Any,
    out: Any,
    lse: Any,
    scale: Any,
    sliding_window: Any,
    logit_cap: Any,
    *_: Any,
) -> None:
    if kv_indptr.shape[0] != q.shape[0] + 1:
        raise ArgumentError("decode_attention", "kv_indptr", f"[bs + 1] = [{q.shape[0] + 1}]", describe(kv_indptr))
    _attention.check_numbers("decode_attention", scale, sliding_window, logit_cap)


def _check_values(a: Mapping[str, Any]) -> None:
    _attention.check_values("decode_attention", a, {"kv_indptr": a["kv_indices"].shape[0]})


SPEC = OpSpec(
    decode_attention,
    static=_attention.STATIC,
    args={
        "q": _attention.q_arg("bs"),
        "k_cache": _attention.cache_arg("head_dim"),
        "v_cache": _attention.cache_arg("v_head_dim"),
        "kv_indptr": _attention.indptr_arg(),
        "kv_indices": _attention.indices_arg(),
        **_attention.out_args("bs"),
        **_attention.value_args(),
    },
    returns="out",
    check=partial(_attention.check, "decode_attention"),
    check_sizes=_check_sizes,
    check_values=_check_values,
    proof="hal.ops.proofs.decode_attention",
)
