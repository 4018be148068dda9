"""assign_extend_cache_locs on the CPU: packs ``req_to_token[r_i, start_i:end_i]`` one after the other into `out`.

`req_to_token` [rows, width] int32, rows any stride apart; the rest [bs] and `out` [capacity], int32 or int64.
Invariant: a request's length is clamped to the room left in `out` before it is added to anything, and no difference of
two offsets is formed that could wrap (`_index.length`).
"""

from __future__ import annotations

from torch import Tensor

from hal.backends.cpu._bits import load, store
from hal.backends.cpu._call import FORMAT, need_cpu
from hal.backends.cpu._index import length
from hal.backends.cpu._jit import Kernel


def _kernel(bs, table, rows, width, stride, requests, starts, ends, out, capacity):  # type: ignore[no-untyped-def]
    at = 0
    for i in range(bs):
        start = load(starts, i)
        n = length(start, load(ends, i), capacity - at)
        r = load(requests, i)
        # Of the request's tokens, [first, last) lie in the table; a start is compared before it is added to.
        first = last = n
        if 0 <= r < rows and -n < start < width:
            first = max(0, -start)
            last = min(n, width - start)
        for t in range(first):
            store(out, at + t, -1)
        if first < last:
            row = r * stride + start
            for t in range(first, last):
                store(out, at + t, load(table, row + t))
        for t in range(last, n):
            store(out, at + t, -1)
        at += n
    for t in range(at, capacity):
        store(out, t, -1)


kernel = Kernel(_kernel, "int i32 int int int *requests *offsets *ends *out int")


def assign_extend_cache_locs(
    req_to_token: Tensor, req_pool_indices: Tensor, start_offsets: Tensor, end_offsets: Tensor, out: Tensor
) -> Tensor:
    need_cpu("assign_extend_cache_locs", req_to_token, req_pool_indices, start_offsets, end_offsets, out)
    rows, width = req_to_token.shape
    kernel(FORMAT[req_pool_indices.dtype], FORMAT[start_offsets.dtype], FORMAT[end_offsets.dtype], FORMAT[out.dtype])(
        start_offsets.shape[0],
        req_to_token.data_ptr(),
        rows,
        width,
        req_to_token.stride(0),
        req_pool_indices.data_ptr(),
        start_offsets.data_ptr(),
        end_offsets.data_ptr(),
        out.data_ptr(),
        out.shape[0],
    )
    return out
