# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""write_req_to_token: ``req_to_token[r_i, start_i + t]`` becomes the next of `src`; -1 is skipped.

The requests are shared out as `_spans` says. A column is compared with the table before it is added to.
"""

import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal import launch
from hal.backends.cuda._device import pdl
from hal.backends.cuda._spans import BLOCK, GROUP, TILE, WARPS, clamped, grid, owners


@launch.jit(
    do_not_specialize=(
        "table", "requests", "starts", "ends", "src", "bs", "rows", "width", "stride", "size", "each", "parts",
    )
)  # fmt: skip
def write_kernel(
    table, requests, starts, ends, src,
    bs: tl.int64, rows: tl.int64, width: tl.int64, stride: tl.int64, size: tl.int64, each: tl.int32, parts: tl.int32,
    PDL: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = (tl.program_id(0) // parts).to(tl.int64) * each * GROUP
    part = (tl.program_id(0) % parts).to(tl.int64)
    total = tl.zeros([], tl.int64)
    for at in range(0, first, TILE):
        total += tl.sum(clamped(starts, ends, at + tl.arange(0, TILE), tl.minimum(bs, first), size), 0)
    for group in range(first, tl.minimum(bs, first + each * GROUP), GROUP):
        length = clamped(starts, ends, group + tl.arange(0, GROUP), bs, size)
        ending = tl.cumsum(length, 0)
        stop = tl.minimum(tl.sum(length, 0), size - total)
        for low in range(part * BLOCK, stop, parts * BLOCK):
            behind, t = owners(ending, low, BLOCK)
            o = low + tl.arange(0, BLOCK)
            there = o < stop
            slot = tl.load(src + total + o, there, other=-1).to(tl.int64)
            request = tl.load(requests + group + behind, there, other=-1).to(tl.int64)
            start = tl.load(starts + group + behind, there, other=0).to(tl.int64)
            there = there & (request >= 0) & (request < rows) & (start >= -t) & (start < width - t)
            there = there & (slot >= 0) & (slot <= 2147483647)
            column = tl.where(there, start, 0) + tl.where(there, t, 0)
            tl.store(table + tl.where(there, request, 0) * stride + column, slot.to(tl.int32), there)
        total += tl.sum(length, 0)


class _Launches(dict[int, launch.Launch]):
    def __missing__(self, device: int) -> launch.Launch:
        on = pdl(device)
        self[device] = write_kernel.bind(
            PDL=on, BLOCK=BLOCK, GROUP=GROUP, TILE=TILE, num_warps=WARPS, launch_pdl=on
        )
        return self[device]


_launches: _Launches = launch.keeps(_Launches())


def write_req_to_token(
    req_to_token: Tensor, req_pool_indices: Tensor, start_offsets: Tensor, end_offsets: Tensor, src: Tensor
) -> None:
    bs, size = req_pool_indices.numel(), src.numel()
    if not bs or not size:
        return
    rows, width = req_to_token.shape
    device = src.get_device()
    programs, each, parts = grid(bs, size, device)
    _launches[device].start(
        programs, req_to_token, req_pool_indices, start_offsets, end_offsets, src,
        bs, rows, width, req_to_token.stride(0), size, each, parts,
    )  # fmt: skip


def supports(sig: object) -> None:
    """Every call of the contract."""
