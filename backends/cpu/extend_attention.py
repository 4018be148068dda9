"""extend_attention on the CPU: few new tokens in one pass over the cache (`_online`), more by blocks (`_blocks`).

What they do not do goes a request at a time: its rows are gathered once, then torch's fused attention goes over them. A
request without a prefix needs no mask; any other goes in blocks of tokens, each over the keys up to its last token.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from hal.backends.cpu import _attention, _blocks, _online, _pool
from hal.backends.cpu._again import Memo
from hal.backends.cpu._call import need_cpu, number
from hal.kv.view import count_slots

kernel = _online.kernel
calls = Memo()
PTRS = 0b11000
"""Of the tensors of a call, those whose elements decide what is done: both ``indptr``s."""


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
    if out is None:
        out = torch.empty(*q.shape[:2], v_cache.shape[-1], dtype=q.dtype, device=q.device)
    tensors = q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, out, lse
    call = calls.start(tensors, (scale, sliding_window, logit_cap, causal), PTRS)
    if call is None:
        return out
    need_cpu("extend_attention", *tensors)
    n, heads, _ = q.shape
    v_dim, nnz = v_cache.shape[-1], kv_indices.shape[0]
    size = count_slots(k_cache)
    by, fast = scale * number(k_scale), _attention.fits(q, v_dim, logit_cap, v_scale, lse)
    dtype, v_by = q.dtype if fast else torch.float32, number(v_scale)
    sliding_window = min(sliding_window, nnz)  # no wider than the list, or a difference might wrap
    qo = [min(max(p, 0), n) for p in qo_indptr.tolist()]
    kv = [min(max(p, 0), nnz) for p in kv_indptr.tolist()]
    spans = [
        (begin, stop, first, max(last - first, 0))
        for (begin, stop), (first, last) in zip(pairwise(qo), pairwise(kv), strict=True)
        if stop > begin
    ]
    if _online.fits(q, k_cache, v_cache, logit_cap):
        group, limits = heads // k_cache.shape[-2], _online.MOST[q.dtype]
        many = [s for s in spans if _online.by_blocks.py_func(s[1] - s[0], s[3], group, *limits)]
        if len(many) not in (0, len(spans)):
            call = None  # two kernels make it
        if len(many) < len(spans):
            _online.attend(
                q,
                k_cache,
                v_cache,
                qo_indptr,
                kv_indptr,
                kv_indices,
                out,
                lse,
                scale,
                sliding_window,
                logit_cap,
                causal,
                call,
            )
        if many:
            _blocks.attend(many, q, k_cache, v_cache, kv_indices, out, lse, scale, sliding_window, causal, call)
        return out
    with _pool.torch_threads():
        slots = kv_indices.to(torch.int64)
        valid = (slots >= 0) & (slots < size)
        for begin, stop, first, length in spans:
            before = length - (stop - begin)
            positions = valid[first : first + length].nonzero().view(-1)
            mine = slots[first : first + length][positions]
            if not mine.numel():
                out[begin:stop] = 0
                if lse is not None:
                    lse[begin:stop] = -torch.inf
                continue
            k = _attention.rows(k_cache, mine, dtype)
            v = _attention.rows(v_cache, mine, dtype)
            complete = positions.numel() == length
            all_seen = complete and not causal and sliding_window < 0
            square = complete and causal and sliding_window < 0 and before == 0 and fast
            block = stop - begin if square or all_seen else _attention.TOKENS
            for t in range(begin, stop, block):
                end = min(t + block, stop)
                own = before + torch.arange(t - begin, end - begin, dtype=torch.int64, device="cpu").view(-1, 1)
                high = int(torch.searchsorted(positions, own[-1, 0], right=True)) if causal else positions.numel()
                low = 0
                if sliding_window >= 0:
                    low = int(torch.searchsorted(positions, own[0, 0] - sliding_window))
                low = min(low, high)
                seen = None
                if not (square or all_seen):
                    at = positions[low:high]
                    seen = at <= own if causal else torch.ones(end - t, high - low, dtype=torch.bool, device="cpu")
                    if sliding_window >= 0:
                        seen &= at >= own - sliding_window
                x = q[t:end].transpose(0, 1)
                if high == low:
                    found = torch.zeros(heads, end - t, v_dim, dtype=torch.float32, device="cpu")
                    sums = torch.full((heads, end - t), -torch.inf, dtype=torch.float32, device="cpu")
                elif fast:
                    found, sums = _attention.fused(x, k[low:high], v[low:high], seen, square, by)
                else:
                    found, sums = _attention.plain(x, k[low:high], v[low:high], seen, by, logit_cap, v_by)
                out[t:end] = found.transpose(0, 1)
                if lse is not None:
                    lse[t:end] = sums.transpose(0, 1)
    return out
