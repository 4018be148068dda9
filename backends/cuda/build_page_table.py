# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""build_page_table: ``out[i, p] = req_to_token[r_i, p * page_size] // page_size``, -1 past the last page.

A program has a piece of a row. All index math is in 64 bits, on a page number below the row's length.
"""

import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda._device import pdl
from hal.triton import launch
from hal.triton.plans import Plan, Step, length, plans

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


@plans
def _plans(req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, page_size: int, out: Tensor) -> Plan:
    on = pdl(out.get_device())
    run = page_table_kernel.bind(PAGE=page_size, PDL=on, BLOCK=BLOCK, num_warps=4, launch_pdl=on)
    pieces = -(-out.shape[1] // BLOCK)
    args = (
        "req_to_token",
        "req_pool_indices",
        "kv_lens",
        "out",
        length("req_to_token"),
        req_to_token.shape[1],
        req_to_token.stride(0),
        out.shape[1],
        out.stride(0),
        pieces,
    )
    return Plan((Step(run, length("out", times=pieces), args),), returns="out")


@_plans.launcher
def build_page_table(
    req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, page_size: int, out: Tensor
) -> Tensor:
    return _plans.start(  # type: ignore[no-any-return]
        req_to_token, req_pool_indices, kv_lens, page_size, out
    )
