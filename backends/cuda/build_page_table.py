# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""build_page_table: ``out[i, p] = req_to_token[r_i, p * page_size] // page_size``, -1 past the last page.

A program has a piece of a row. All index math is in 64 bits, on a page number below the row's length.
"""

import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda._device import pdl
from hal.triton import launch

BLOCK = 256


@launch.jit(do_not_specialize="table requests lens out rows width stride columns out_stride pieces".split())
def page_table_kernel(
    table, requests, lens, out, rows: tl.int64, width: tl.int64, stride: tl.int64, columns: tl.int64,
    out_stride: tl.int64, pieces: tl.int32,
    PAGE: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = (tl.program_id(0) // pieces).to(tl.int64)
    p = (tl.program_id(0) % pieces).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    request = tl.load(requests + i).to(tl.int64)
    tokens = tl.minimum(tl.load(lens + i).to(tl.int64), width)
    known = (request >= 0) & (request < rows)
    there = known & (p < columns) & (p * PAGE < tokens)
    slot = tl.load(table + tl.where(known, request, 0) * stride + tl.where(there, p, 0) * PAGE, there, other=-1)
    page = tl.where(slot >= 0, slot // PAGE, -1)
    tl.store(out + i * out_stride + p, page.to(out.dtype.element_ty), p < columns)


class _Launches(dict[tuple[int, int], launch.Launch]):
    def __missing__(self, key: tuple[int, int]) -> launch.Launch:
        device, page = key
        on = pdl(device)
        self[key] = page_table_kernel.bind(PAGE=page, PDL=on, BLOCK=BLOCK, num_warps=4, launch_pdl=on)
        return self[key]


_launches: _Launches = launch.keeps(_Launches())


def build_page_table(
    req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, page_size: int, out: Tensor
) -> Tensor:
    bs, columns = out.shape
    if bs and columns:
        rows, width = req_to_token.shape
        pieces = -(-columns // BLOCK)
        _launches[out.get_device(), page_size].start(
            (bs * pieces, 1, 1),
            req_to_token,
            req_pool_indices,
            kv_lens,
            out,
            rows,
            width,
            req_to_token.stride(0),
            columns,
            out.stride(0),
            pieces,
        )
    return out
