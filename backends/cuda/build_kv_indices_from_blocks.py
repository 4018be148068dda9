# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""build_kv_indices_from_blocks: the slots of ``[start_i, start_i + len_i)`` of a block table packed into `out`.

The requests are shared out as `_spans` says, and their sums written into `kv_indptr`. A start is pulled to where
nothing that is added to it wraps, so that each slot's numbers are of 32 bits. Neighbouring lanes read the same entry
of the table, which is one access.
"""

import triton
import triton.language as tl
from torch import Tensor, int64
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda._spans import MANY, Tile, extents, inside, lengths_and_starts, slot_of, steps, turns
from hal.triton import launch
from hal.triton.plans import Plan, length, plans

AT_ONCE, FEW = 4, 8
"""Programs a multiprocessor that the slots are shared among; requests a multiprocessor that have one each."""
TILES = {1: Tile(512, 128, 2), MANY: Tile(256, 512, 4)}


@triton.jit
def pages_of(start, skipped, count, end, PAGE: tl.constexpr):
    """(the page to count from, what lies ahead of a request's token 0 from there on, the tokens [low, high) of `count`
    that are inside a table of `end`), the last three in int32: token t has page ``(ahead + t) // PAGE`` of these, where
    the sum, taken as unsigned, is below 2^32."""
    base, low, high = inside(start, skipped, count, end)
    page = tl.maximum(base, 0) // PAGE
    return page, (base - page * PAGE).to(tl.int32), low, high


@launch.jit(do_not_specialize="table lens indptr out starts bs columns stride size keep each log".split())
def kv_indices_from_blocks_kernel(
    table, lens, indptr, out, starts,
    bs: tl.int64, columns: tl.int64, stride: tl.int64, size: tl.int64, keep: tl.int64, each: tl.int32, log: tl.int32,
    PAGE: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = (tl.program_id(0) >> log).to(tl.int64) * each * GROUP
    part = (tl.program_id(0) & ((1 << log) - 1)).to(tl.int64)
    # Asked for before the sums.
    whole, start = lengths_and_starts(lens, starts, first, bs, GROUP)
    lanes = tl.zeros([TILE], tl.int64)
    for at in range(0, first, TILE):
        _, before = extents(lens, lens, at + tl.arange(0, TILE), tl.minimum(bs, first), False)
        lanes += tl.minimum(before, keep)
    total = tl.sum(lanes, 0)
    # Triton's interpreter takes a small argument for an int32, whatever it is annotated as.
    end = columns.to(tl.int64) * PAGE
    for group in range(first, tl.minimum(bs, first + each * GROUP), GROUP):
        j = group + tl.arange(0, GROUP)
        if GROUP > 1:
            whole, start = lengths_and_starts(lens, starts, group, bs, GROUP)
        length = tl.minimum(whole, keep)
        ending = total + tl.cumsum(length, 0)
        if part == 0:
            tl.store(indptr + j + 1, tl.minimum(ending, size).to(indptr.dtype.element_ty), j < bs)
        begin = ending - length
        count = tl.minimum(length, tl.maximum(size - begin, 0))
        first_page, ahead, low, high = pages_of(start, whole - length, count, end, PAGE)
        row = (j.to(tl.int64) * stride + first_page)[:, None]
        to = begin[:, None]
        most = tl.max(count, 0)
        count, ahead, low, high = count.to(tl.int32)[:, None], ahead[:, None], low[:, None], high[:, None]
        for turn in range(turns(most, part, log, CHUNK)):
            done = ((turn << log) + part) * CHUNK
            t0 = done.to(tl.int32)
            t = tl.arange(0, CHUNK)[None, :]
            place = (ahead + t0 + t).to(tl.uint32)
            there = (t >= low - t0) & (t < high - t0)
            block = tl.load(table + row + (place // PAGE).to(tl.int32), there, other=-1)
            if WIDE:
                block = block.to(tl.int64)
            slot = slot_of(block, (place % PAGE).to(tl.int32), PAGE, WIDE)
            tl.store(out + (to + done) + t, slot.to(out.dtype.element_ty), t < count - t0)
        total += tl.sum(length, 0)
    if tl.program_id(0) == 0:
        tl.store(indptr, tl.zeros([], indptr.dtype.element_ty))


@plans
def _plans(
    block_table: Tensor,
    kv_lens: Tensor,
    page_size: int,
    kv_indptr: Tensor,
    out: Tensor,
    kv_start: Tensor | None,
    keep_last: int,
) -> Plan:
    bs, size = length("kv_lens"), length("out")
    keep = 2**31 - 1 if keep_last < 0 else min(keep_last, 2**31 - 1)
    args = (
        "block_table",
        "kv_lens",
        "kv_indptr",
        "out",
        "kv_start",
        bs,
        block_table.shape[1],
        block_table.stride(0),
        size,
        keep,
    )
    # No more work than the last tokens: a buffer made for whole rows must not be split as finely as they.
    found = steps(
        kv_indices_from_blocks_kernel,
        TILES,
        "kv_lens",
        size.at_most(bs.times(keep)),
        out.get_device(),
        args,
        at_once=AT_ONCE,
        few=FEW,
        PAGE=page_size,
        WIDE=out.dtype is int64,
    )
    return Plan(found, returns="out")


@_plans.launcher
def build_kv_indices_from_blocks(
    block_table: Tensor,
    kv_lens: Tensor,
    page_size: int,
    kv_indptr: Tensor,
    out: Tensor,
    kv_start: Tensor | None = None,
    *,
    keep_last: int = -1,
) -> Tensor:
    return _plans.start(  # type: ignore[no-any-return]
        block_table, kv_lens, page_size, kv_indptr, out, kv_start, keep_last
    )
