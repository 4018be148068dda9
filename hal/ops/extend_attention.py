"""extend_attention: the new tokens of each request attend to that request's tokens in the paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hal._errors import ArgumentError
from hal.ops import _attention
from hal.ops.spec import OpSpec, ValueArg, describe


def extend_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int = -1,
    logit_cap: float = 0.0,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> Tensor:
    """Attention of the queries ``q[qo_indptr[i]:qo_indptr[i + 1]]`` of each request over its listed slots.

    Request i has the slots ``kv_indices[kv_indptr[i]:kv_indptr[i + 1]]``, in the order of positions. Its queries are
    those of the last of these tokens, whose k and v are in the cache already: query t of m, of a request of l tokens,
    has position ``l - m + t`` and sees positions up to its own. Otherwise it is `decode_attention`.

    Args:
        q: ``[n, q_heads, head_dim]`` fp16, bf16 or fp32, the requests one after the other; the last dim contiguous.
        k_cache: ``[slots, kv_heads, head_dim]`` or ``[pages, page_size, kv_heads, head_dim]``, of q's dtype or fp8, any
            strides but the last dim's.
        v_cache: like k_cache, with v_head_dim. MLA: ``k_cache[..., :512]``.
        qo_indptr: ``[bs + 1]`` int32 or int64. Any value is safe: clamped to [0, n], and a request that ends before it
            begins has no queries. A row of no request stays as it was (in a new `out`: undefined); one of
            several gets the result of one of them, element by element.
        kv_indptr: ``[bs + 1]`` int32 or int64, clamped likewise to [0, nnz].
        kv_indices: ``[nnz]`` int32 or int64. -1 or out of range: no key is there, but the position counts.
        out: ``[n, q_heads, v_head_dim]`` of q's dtype, written; None: a new one.
        lse: ``[n, q_heads]`` fp32, written: the natural logarithm of ``sum_j exp(logit_j)``, -inf where none is seen.
        scale: what logits are multiplied by, e.g. ``head_dim ** -0.5``.
        causal: False: every query sees all of its request (but for the window, which is of earlier tokens).
        sliding_window: how many tokens before its own a query sees (FlashInfer's ``window_left``); -1: all.
        logit_cap: c > 0 makes a logit x ``c tanh(x / c)``, after `scale`; 0: none.
        k_scale: for an fp8 cache: what k is multiplied by; a float or a one-element float32 tensor; None is 1.
        v_scale: likewise for v.

    Returns:
        `out`. A NaN or infinity in a listed slot may reach every query of its request; one in a slot that is
        not listed reaches none.

    Raises:
        ArgumentError: an argument breaks this contract; nothing is written.

    Example:
        >>> import torch, hal
        >>> k_cache, v_cache = torch.zeros(8, 1, 64), torch.arange(8.0).view(8, 1, 1).expand(8, 1, 64).contiguous()
        >>> qo, kv, slots = torch.tensor([0, 2]), torch.tensor([0, 3]), torch.tensor([5, 6, 1])
        >>> hal.extend_attention(torch.ones(2, 4, 64), k_cache, v_cache, qo, kv, slots, scale=0.125)[:, 0, 0]
        tensor([5.5000, 4.0000])

    Source: Dao et al. (arXiv:2205.14135, arXiv:2307.08691), over slots.
    """
    n, nnz = q.shape[0], kv_indices.shape[0]
    begin, stop = _attention.bounds(qo_indptr, n)
    start, end = _attention.bounds(kv_indptr, nnz)
    t = torch.arange(n, device=q.device, dtype=torch.int64)
    mine = (t.view(-1, 1) >= begin) & (t.view(-1, 1) < stop)
    if not mine.shape[1]:
        return torch.empty(*q.shape[:2], v_cache.shape[-1], dtype=q.dtype, device=q.device) if out is None else out
    owned, owner = mine.any(dim=1), mine.to(torch.int8).argmax(dim=1)
    first, last = start[owner], end[owner]
    after = last - (stop[owner] - t) + 1
    if sliding_window >= 0:
        # No wider than the list, or the difference might wrap.
        first = torch.maximum(first, after - 1 - min(sliding_window, nnz))
    if causal:
        last = after
    found, sums = _attention.reference(q, k_cache, v_cache, kv_indices, first, last, scale, logit_cap, k_scale, v_scale)
    found = found.to(q.dtype)
    if lse is not None:
        lse.copy_(torch.where(owned.view(-1, 1), sums, lse))
    return found if out is None else out.copy_(torch.where(owned.view(-1, 1, 1), found, out))


def _check_sizes(
    q: Tensor,
    k_cache: Any,
    v_cache: Any,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Any,
    out: Any,
    lse: Any,
    scale: Any,
    causal: Any,
    sliding_window: Any,
    logit_cap: Any,
    *_: Any,
) -> None:
    if qo_indptr.shape[0] < 1:
        raise ArgumentError("extend_attention", "qo_indptr", "[bs + 1], at least one element", describe(qo_indptr))
    _attention.check_numbers("extend_attention", scale, sliding_window, logit_cap)


def _check_values(a: Mapping[str, Any]) -> None:
    _attention.check_values(
        "extend_attention", a, {"qo_indptr": a["q"].shape[0], "kv_indptr": a["kv_indices"].shape[0]}
    )


SPEC = OpSpec(
    extend_attention,
    static=_attention.STATIC,
    args={
        "q": _attention.q_arg("n"),
        "k_cache": _attention.cache_arg("head_dim"),
        "v_cache": _attention.cache_arg("v_head_dim"),
        "qo_indptr": _attention.indptr_arg(),
        "kv_indptr": _attention.indptr_arg(),
        "kv_indices": _attention.indices_arg(),
        **_attention.out_args("n"),
        **{
            k: v
            for name, arg in _attention.value_args().items()
            for k, v in ([(name, arg), ("causal", ValueArg((True, False)))] if name == "scale" else [(name, arg)])
        },
    },
    returns="out",
    check=partial(_attention.check, "extend_attention"),
    check_sizes=_check_sizes,
    check_values=_check_values,
    proof="hal.ops.proofs.extend_attention",
)
