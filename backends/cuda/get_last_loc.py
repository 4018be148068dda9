# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated"
# A kernel is typed by its arguments at run time.
"""get_last_loc: ``out[i] = req_to_token[requests[i], lens[i] - 1]``, -1 where that is no element.

One thread a request. All index math is in 64 bits, after the index was checked.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda._device import pdl
from hal.triton import launch
from hal.triton.plans import RESULT, Plan, Result, Step, length, plans

BLOCK = 128


@launch.jit(do_not_specialize=("table", "requests", "lens", "out", "bs", "rows", "width", "stride"))
def last_loc_kernel(
    table, requests, lens, out, bs: tl.int64, rows: tl.int64, width: tl.int64, stride: tl.int64,
    PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < bs
    request = tl.load(requests + i, inside, other=-1).to(tl.int64)
    length = tl.load(lens + i, inside, other=0).to(tl.int64)
    valid = (request >= 0) & (request < rows) & (length > 0) & (length <= width)
    at = tl.where(valid, request, 0) * stride + tl.where(valid, length, 1) - 1
    slot = tl.load(table + at, valid, other=-1)
    tl.store(out + i, slot.to(out.dtype.element_ty), inside)


@plans
def _plans(req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor) -> Plan:
    on = pdl(req_to_token.get_device())
    run = last_loc_kernel.bind(PDL=on, BLOCK=BLOCK, num_warps=4, launch_pdl=on)
    args = (
        "req_to_token",
        "req_pool_indices",
        "prefix_lens",
        RESULT,
        length("prefix_lens"),
        length("req_to_token"),
        req_to_token.shape[1],
        req_to_token.stride(0),
    )
    return Plan((Step(run, length("prefix_lens", per=BLOCK), args),), returns=Result("prefix_lens"))


@_plans.launcher
def get_last_loc(req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor) -> Tensor:
    return _plans.start(req_to_token, req_pool_indices, prefix_lens)  # type: ignore[no-any-return]


def warm(device: torch.device, args: dict[str, Any] | None) -> None:
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    get_last_loc(**(args or {"req_to_token": zero.int()[None], "req_pool_indices": zero, "prefix_lens": zero}))
