# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""build_kv_indices: ``req_to_token[r_i, start_i : start_i + len_i]`` packed into `out`, its sums into `kv_indptr`; or,
where those are GIVEN, each list to where they say.

The requests are shared out as `_spans` says. A start is compared with the table before it is added to. The first slots
of a program are asked for before anything is known of where they go: the table's memory has the longest way.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda._spans import MANY, Launches, Tile, extents, grid, lengths_and_starts, turns
from hal.triton import launch

TILES = {1: Tile(1024, 128, 4), MANY: Tile(256, 512, 4)}
GIVEN_TILES = {1: Tile(1024, 0, 4)}


@triton.jit
def _own(table, requests, lens, starts, group, stop, rows, stride, GROUP: tl.constexpr):
    """(lengths, rows of the table, whether there are such, starts) of a group's requests up to `stop`."""
    j = group + tl.arange(0, GROUP)
    length, start = lengths_and_starts(lens, starts, group, stop, GROUP)
    request = tl.load(requests + j, j < stop, other=-1).to(tl.int64)
    known = (request >= 0) & (request < rows)
    return length, table + tl.where(known, request, 0) * stride, known, start


@triton.jit
def _slots(row, known, start, length, t, width):
    """[GROUP, CHUNK] slots of a group's tokens `t`, -1 outside the table."""
    start = start[:, None]
    there = (t < length[:, None]) & known[:, None] & (start >= -t) & (start < width - t)
    return tl.load(row[:, None] + tl.where(there, start + t, 0), there, other=-1)


@triton.jit
def _given(indptr, group, stop, length, size, GROUP: tl.constexpr):
    """(where a group's lists begin, how much of each has room) by the sums, which may be any numbers."""
    j = group + tl.arange(0, GROUP)
    low: tl.constexpr = -2147483648  # as good as any below: no list is longer
    begin = tl.load(indptr + j, j < stop, other=0).to(tl.int64)
    end = tl.load(indptr + j + 1, j < stop, other=0).to(tl.int64)
    begin = tl.minimum(tl.maximum(begin, low), size)
    return begin, tl.minimum(length, tl.minimum(tl.maximum(end, low), size) - begin)


@launch.jit(
    do_not_specialize=(
        "table", "requests", "lens", "indptr", "out", "starts", "bs", "rows", "width", "stride", "size", "each",
        "log",
    )
)  # fmt: skip
def kv_indices_kernel(
    table, requests, lens, indptr, out, starts,
    bs: tl.int64, rows: tl.int64, width: tl.int64, stride: tl.int64, size: tl.int64, each: tl.int32, log: tl.int32,
    GIVEN: tl.constexpr, PDL: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = (tl.program_id(0) >> log).to(tl.int64) * each * GROUP
    part = (tl.program_id(0) & ((1 << log) - 1)).to(tl.int64)
    stop = tl.minimum(bs, first + each * GROUP)
    mine = part * CHUNK + tl.arange(0, CHUNK)[None, :]
    length, row, known, start = _own(table, requests, lens, starts, first, stop, rows, stride, GROUP)
    slot = _slots(row, known, start, length, mine, width)
    total = tl.zeros([], tl.int64)
    if not GIVEN:
        lanes = tl.zeros([TILE], tl.int64)
        for at in range(0, first, TILE):
            _, before = extents(lens, lens, at + tl.arange(0, TILE), tl.minimum(bs, first), False)
            lanes += before
        total = tl.sum(lanes, 0)
    for group in range(first, stop, GROUP):
        if GIVEN:
            to, fits = _given(indptr, group, stop, length, size, GROUP)
        else:
            ending = total + tl.cumsum(length, 0)
            if part == 0:
                j = group + tl.arange(0, GROUP)
                tl.store(indptr + j + 1, tl.minimum(ending, size).to(indptr.dtype.element_ty), j < bs)
            to = ending - length
            fits = tl.minimum(length, size - to)
            total += tl.sum(length, 0)
        to = to[:, None]
        tl.store(out + to + mine, slot.to(out.dtype.element_ty), (mine < fits[:, None]) & (mine >= -to))
        for turn in range(1, turns(tl.max(fits, 0), part, log, CHUNK)):
            t = ((turn << log) + part) * CHUNK + tl.arange(0, CHUNK)[None, :]
            slot = _slots(row, known, start, fits, t, width)
            tl.store(out + to + t, slot.to(out.dtype.element_ty), (t < fits[:, None]) & (t >= -to))
        if GROUP > 1:
            length, row, known, start = _own(table, requests, lens, starts, group + GROUP, stop, rows, stride, GROUP)
            slot = _slots(row, known, start, length, mine, width)
    if not GIVEN and tl.program_id(0) == 0:
        tl.store(indptr, tl.zeros([], indptr.dtype.element_ty))


_launches = Launches(kv_indices_kernel, TILES, "GIVEN")
_launches_given = Launches(kv_indices_kernel, GIVEN_TILES, "GIVEN")


def build_kv_indices(
    req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, kv_indptr: Tensor | None, out: Tensor,
    kv_start: Tensor | None = None, *, given_indptr: Tensor | None = None,
) -> Tensor:  # fmt: skip
    bs, size = kv_lens.numel(), out.numel()
    rows, width = req_to_token.shape
    device = out.get_device()
    if given_indptr is not None:
        programs, group, each, log = grid(bs, size, device, GIVEN_TILES, sums=False)
        run = _launches_given[device, True, group]
    else:
        programs, group, each, log = grid(bs, size, device, TILES)
        run = _launches[device, False, group]
    run.start(
        programs, req_to_token, req_pool_indices, kv_lens, kv_indptr if given_indptr is None else given_indptr, out,
        kv_start, bs, rows, width, req_to_token.stride(0), size, each, log,
    )  # fmt: skip
    return out
