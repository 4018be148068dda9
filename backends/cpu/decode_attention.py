"""decode_attention on the CPU: in one pass over the cache (`_online`), which beats torch's attention at every length.

What `_online` does not do goes a request at a time: its rows gathered, then torch's fused attention over them. The
query heads that share a key/value head are the rows of one small matrix, so a cached row is read once for them.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from hal.backends.cpu import _attention, _online, _pool
from hal.backends.cpu._again import Memo
from hal.backends.cpu._call import need_cpu, number
from hal.kv.view import count_slots

kernel = _online.kernel
calls = Memo()


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
    if out is None:
        out = torch.empty(*q.shape[:2], v_cache.shape[-1], dtype=q.dtype, device=q.device)
    tensors = q, k_cache, v_cache, kv_indptr, kv_indices, out, lse
    call = calls.start(tensors, (scale, sliding_window, logit_cap), grows=4)
    if call is None:
        return out
    need_cpu("decode_attention", *tensors)
    if _online.attend(
        q, k_cache, v_cache, None, kv_indptr, kv_indices, out, lse, scale, sliding_window, logit_cap, True, call
    ):
        return out
    _, heads, dim = q.shape
    v_dim, kv_heads, nnz = v_cache.shape[-1], k_cache.shape[-2], kv_indices.shape[0]
    with _pool.torch_threads():
        size = count_slots(k_cache)
        by, fast = scale * number(k_scale), _attention.fits(q, v_dim, logit_cap, v_scale, lse)
        dtype = q.dtype if fast else torch.float32
        ends = [min(max(p, 0), nnz) for p in kv_indptr.tolist()]
        slots = kv_indices.to(torch.int64)
        valid = (slots >= 0) & (slots < size)
        whole = bool(valid.all())
        for i, (first, last) in enumerate(pairwise(ends)):
            if sliding_window >= 0:
                first = max(first, last - 1 - sliding_window)
            mine = slots[first : max(first, last)]
            if not whole:
                mine = mine[valid[first : max(first, last)]]
            if not mine.numel():
                out[i] = 0
                if lse is not None:
                    lse[i] = -torch.inf
                continue
            k = _attention.rows(k_cache, mine, dtype)
            v = _attention.rows(v_cache, mine, dtype)
            if fast:
                found, sums = _attention.fused(q[i].view(kv_heads, heads // kv_heads, dim), k, v, None, False, by)
            else:
                found, sums = _attention.plain(q[i].unsqueeze(1), k, v, None, by, logit_cap, number(v_scale))
            out[i] = found.reshape(heads, v_dim)
            if lse is not None:
                lse[i] = sums.reshape(heads)
    return out
