# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""build_kv_indices: ``req_to_token[r_i, start_i : start_i + len_i]`` packed into `out`, its sums into `kv_indptr`.

The requests are shared out as `_spans` says. A start is compared with the table before it is added to.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda._spans import MANY, Launches, Tile, extents, grid, lengths_and_starts, turns
from hal.triton import launch

TILES = {1: Tile(1024, 128, 4), MANY: Tile(256, 512, 4)}


@triton.jit
def _own(requests, lens, starts, group, bs, GROUP: tl.constexpr):
    """(lengths, rows of the table, starts) of a group's requests."""
    j = group + tl.arange(0, GROUP)
    length, start = lengths_and_starts(lens, starts, group, bs, GROUP)
    return length, tl.load(requests + j, j < bs, other=-1).to(tl.int64), start


@launch.jit(
    do_not_specialize=(
        "table", "requests", "lens", "indptr", "out", "starts", "bs", "rows", "width", "stride", "size", "each",
        "log",
    )
)  # fmt: skip
def kv_indices_kernel(
    table, requests, lens, indptr, out, starts,
    bs: tl.int64, rows: tl.int64, width: tl.int64, stride: tl.int64, size: tl.int64, each: tl.int32, log: tl.int32,
    PDL: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = (tl.program_id(0) >> log).to(tl.int64) * each * GROUP
    part = (tl.program_id(0) & ((1 << log) - 1)).to(tl.int64)
    # Asked for before the sums: the table's address has the longest way.
    length, request, start = _own(requests, lens, starts, first, bs, GROUP)
    lanes = tl.zeros([TILE], tl.int64)
    for at in range(0, first, TILE):
        _, before = extents(lens, lens, at + tl.arange(0, TILE), tl.minimum(bs, first), False)
        lanes += before
    total = tl.sum(lanes, 0)
    for group in range(first, tl.minimum(bs, first + each * GROUP), GROUP):
        if GROUP > 1:
            length, request, start = _own(requests, lens, starts, group, bs, GROUP)
        ending = total + tl.cumsum(length, 0)
        if part == 0:
            j = group + tl.arange(0, GROUP)
            tl.store(indptr + j + 1, tl.minimum(ending, size).to(indptr.dtype.element_ty), j < bs)
        known = (request >= 0) & (request < rows)
        row = (table + tl.where(known, request, 0) * stride)[:, None]
        to = (ending - length)[:, None]
        for turn in range(turns(tl.minimum(tl.max(length, 0), size - total), part, log, CHUNK)):
            t = ((turn << log) + part) * CHUNK + tl.arange(0, CHUNK)[None, :]
            mine = (t < length[:, None]) & (t < size - to)
            there = mine & known[:, None] & (start[:, None] >= -t) & (start[:, None] < width - t)
            slot = tl.load(row + tl.where(there, start[:, None] + t, 0), there, other=-1)
            tl.store(out + to + t, slot.to(out.dtype.element_ty), mine)
        total += tl.sum(length, 0)
    if tl.program_id(0) == 0:
        tl.store(indptr, tl.zeros([], indptr.dtype.element_ty))


_launches = Launches(kv_indices_kernel, TILES)


def build_kv_indices(
    req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, kv_indptr: Tensor, out: Tensor,
    kv_start: Tensor | None = None,
) -> Tensor:  # fmt: skip
    bs, size = kv_lens.numel(), out.numel()
    rows, width = req_to_token.shape
    device = out.get_device()
    programs, group, each, log = grid(bs, size, device, TILES)
    _launches[device, group].start(
        programs, req_to_token, req_pool_indices, kv_lens, kv_indptr, out, kv_start,
        bs, rows, width, req_to_token.stride(0), size, each, log,
    )  # fmt: skip
    return out
