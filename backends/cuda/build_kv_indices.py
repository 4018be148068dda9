# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""build_kv_indices: ``req_to_token[r_i, start_i : start_i + len_i]`` packed into `out`, its sums into `kv_indptr`.

The requests are shared out as `_spans` says. A start is compared with the table before it is added to.
"""

import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal import launch
from hal.backends.cuda._device import pdl
from hal.backends.cuda._spans import BLOCK, GROUP, TILE, WARPS, extents, grid, owners


@launch.jit(
    do_not_specialize=(
        "table", "requests", "lens", "indptr", "out", "starts", "bs", "rows", "width", "stride", "size", "each",
        "parts",
    )
)  # fmt: skip
def kv_indices_kernel(
    table, requests, lens, indptr, out, starts,
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
        _, length = extents(lens, lens, at + tl.arange(0, TILE), tl.minimum(bs, first), False)
        total += tl.sum(length, 0)
    for group in range(first, tl.minimum(bs, first + each * GROUP), GROUP):
        j = group + tl.arange(0, GROUP)
        _, length = extents(lens, lens, j, bs, False)
        ending = tl.cumsum(length, 0)
        if part == 0:
            tl.store(indptr + j + 1, tl.minimum(total + ending, size).to(indptr.dtype.element_ty), j < bs)
        stop = tl.minimum(tl.sum(length, 0), size - total)
        for low in range(part * BLOCK, stop, parts * BLOCK):
            behind, t = owners(ending, low, BLOCK)
            o = low + tl.arange(0, BLOCK)
            mine = o < stop
            request = tl.load(requests + group + behind, mine, other=-1).to(tl.int64)
            start = tl.zeros([BLOCK], tl.int64)
            if starts is not None:
                start = tl.load(starts + group + behind, mine, other=0).to(tl.int64)
            there = mine & (request >= 0) & (request < rows) & (start >= -t) & (start < width - t)
            column = tl.where(there, start, 0) + tl.where(there, t, 0)
            slot = tl.load(table + tl.where(there, request, 0) * stride + column, there, other=-1)
            tl.store(out + total + o, slot.to(out.dtype.element_ty), mine)
        total += tl.sum(length, 0)
    if tl.program_id(0) == 0:
        tl.store(indptr, tl.zeros([], indptr.dtype.element_ty))


class _Launches(dict[int, launch.Launch]):
    def __missing__(self, device: int) -> launch.Launch:
        on = pdl(device)
        self[device] = kv_indices_kernel.bind(
            PDL=on, BLOCK=BLOCK, GROUP=GROUP, TILE=TILE, num_warps=WARPS, launch_pdl=on
        )
        return self[device]


_launches: _Launches = launch.keeps(_Launches())


def build_kv_indices(
    req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, kv_indptr: Tensor, out: Tensor,
    kv_start: Tensor | None = None,
) -> Tensor:  # fmt: skip
    bs, size = kv_lens.numel(), out.numel()
    rows, width = req_to_token.shape
    device = out.get_device()
    programs, each, parts = grid(bs, size, device)
    _launches[device].start(
        programs, req_to_token, req_pool_indices, kv_lens, kv_indptr, out, kv_start,
        bs, rows, width, req_to_token.stride(0), size, each, parts,
    )  # fmt: skip
    return out


def supports(sig: object) -> None:
    """Every call of the contract."""
