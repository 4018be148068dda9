"""get_last_loc on the CPU: ``out[i] = req_to_token[r_i, p_i - 1]``, or -1 where that is not in the table.

`req_to_token` [rows, width] int32, rows any stride apart; indices and lengths [bs] int32 or int64. Every
index is compared in int64 before anything is computed from it, so no value can wrap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.cpu._bits import load, store
from hal.backends.cpu._call import FORMAT, need_cpu
from hal.backends.cpu._jit import Kernel


def _kernel(n, table, rows, width, stride, requests, lens, out):  # type: ignore[no-untyped-def]
    for i in range(n):
        r = load(requests, i)
        p = load(lens, i)
        slot = -1
        if 0 <= r < rows and 0 < p <= width:
            slot = load(table, r * stride + p - 1)
        store(out, i, slot)


kernel = Kernel(_kernel, "int i32 int int int *requests *lens *lens")


def get_last_loc(req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor) -> Tensor:
    need_cpu("get_last_loc", req_to_token, req_pool_indices, prefix_lens)
    out = torch.empty_like(prefix_lens)
    rows, width = req_to_token.shape
    kernel(FORMAT[req_pool_indices.dtype], FORMAT[prefix_lens.dtype])(
        out.shape[0],
        req_to_token.data_ptr(),
        rows,
        width,
        req_to_token.stride(0),
        req_pool_indices.data_ptr(),
        prefix_lens.data_ptr(),
        out.data_ptr(),
    )
    return out
