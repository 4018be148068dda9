"""build_page_table on the CPU: ``out[i, p] = req_to_token[r_i, p * page_size] // page_size``, -1 past the last page.

`req_to_token` [rows, width] int32 and `out` [bs, columns], rows any stride apart. Every column is made from a page
number below one that lies in the table.
"""

from __future__ import annotations

from torch import Tensor

from hal.backends.cpu._bits import load
from hal.backends.cpu._call import need_cpu
from hal.backends.cpu._index import get, index, put
from hal.backends.cpu._jit import Kernel


def _kernel(  # type: ignore[no-untyped-def]
    bs, table, rows, width, stride, requests, requests_64, lens, lens_64, page_size, out, out_64, columns, out_stride
):
    for i in range(bs):
        r = get(requests, requests_64, i)
        pages = 0
        if 0 <= r < rows:
            tokens = max(0, min(get(lens, lens_64, i), width))
            pages = min(columns, (tokens + page_size - 1) // page_size)
        for p in range(pages):
            slot = load(table, r * stride + p * page_size)
            put(out, out_64, i * out_stride + p, slot // page_size if slot >= 0 else -1)
        for p in range(pages, columns):
            put(out, out_64, i * out_stride + p, -1)


kernel = Kernel(_kernel, "int i32 int int int u8 bool u8 bool int u8 bool int int")


def build_page_table(
    req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, page_size: int, out: Tensor
) -> Tensor:
    need_cpu("build_page_table", req_to_token, req_pool_indices, kv_lens, out)
    rows, width = req_to_token.shape
    kernel()(
        kv_lens.shape[0],
        req_to_token.data_ptr(),
        rows,
        width,
        req_to_token.stride(0),
        *index(req_pool_indices),
        *index(kv_lens),
        page_size,
        *index(out),
        out.shape[1],
        out.stride(0),
    )
    return out
