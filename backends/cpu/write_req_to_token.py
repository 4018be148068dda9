"""write_req_to_token on the CPU: ``req_to_token[r_i, start_i + t]`` becomes the next of `src`, -1 is skipped.

`req_to_token` [rows, width] int32, rows any stride apart; the rest int32 or int64. Invariant: a length is
clamped to what is left of `src` before it is added to anything, and no difference of two offsets is formed that could
wrap (`_index.length`).
"""

from __future__ import annotations

from torch import Tensor

from hal.backends.cpu._bits import store
from hal.backends.cpu._call import need_cpu
from hal.backends.cpu._index import LONGEST, get, index, length
from hal.backends.cpu._jit import Kernel


def _kernel(  # type: ignore[no-untyped-def]
    bs, table, rows, width, stride, requests, requests_64, starts, starts_64, ends, ends_64, src, src_64, capacity
):
    at = 0
    for i in range(bs):
        start = get(starts, starts_64, i)
        n = length(start, get(ends, ends_64, i), capacity - at)
        r = get(requests, requests_64, i)
        if 0 <= r < rows and -n < start < width:
            for t in range(max(0, -start), min(n, width - start)):
                slot = get(src, src_64, at + t)
                if 0 <= slot <= LONGEST:
                    store(table, r * stride + start + t, slot)
        at += n


kernel = Kernel(_kernel, "int i32 int int int u8 bool u8 bool u8 bool u8 bool int")


def write_req_to_token(
    req_to_token: Tensor, req_pool_indices: Tensor, start_offsets: Tensor, end_offsets: Tensor, src: Tensor
) -> None:
    need_cpu("write_req_to_token", req_to_token, req_pool_indices, start_offsets, end_offsets, src)
    rows, width = req_to_token.shape
    kernel()(
        start_offsets.shape[0],
        req_to_token.data_ptr(),
        rows,
        width,
        req_to_token.stride(0),
        *index(req_pool_indices),
        *index(start_offsets),
        *index(end_offsets),
        *index(src),
        src.shape[0],
    )
