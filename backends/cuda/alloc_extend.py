# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""alloc_extend: open pages are filled, then pages taken from the front of `free_pages`, in one launch.

The requests are shared out as `_spans` says, with two running sums: tokens, and new pages. A page is compared with
the list's length before it is read.
"""

import triton
import triton.language as tl
from torch import Tensor, int64
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda._spans import MANY, Tile, extents, slot_of, steps, turns
from hal.triton import launch
from hal.triton.plans import RESULT, Plan, Result, length, plans

TILES = {1: Tile(64, 128, 1), MANY: Tile(32, 512, 4)}


@triton.jit
def _pages(tokens, PAGE: tl.constexpr):
    """How many pages they begin. Below 2^31, so 32 bits divide faster. They are subtracted as such too: ptxas 12.8
    makes a 64-bit difference of two quotients by 56 one `IMAD.HI.U32`, short by 2^32 where the second is 0."""
    return ((tokens.to(tl.uint32) + (PAGE - 1)) // PAGE).to(tl.int32)


@launch.jit(do_not_specialize=("prefixes", "lens", "last", "free", "out", "result", "bs", "n", "size", "each", "log"))
def alloc_extend_kernel(
    prefixes, lens, last, free, out, result, bs: tl.int64, n: tl.int64, size: tl.int64, each: tl.int32, log: tl.int32,
    PAGE: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = (tl.program_id(0) >> log).to(tl.int64) * each * GROUP
    part = (tl.program_id(0) & ((1 << log) - 1)).to(tl.int64)
    # Asked for before the sums.
    prefix, seq = extents(prefixes, lens, first + tl.arange(0, GROUP), bs, True)
    loc = tl.load(last + first + tl.arange(0, GROUP), first + tl.arange(0, GROUP) < bs, other=-1).to(tl.int64)
    lanes = tl.zeros([TILE], tl.int64)
    opens = tl.zeros([TILE], tl.int64)
    for at in range(0, first, TILE):
        a, b = extents(prefixes, lens, at + tl.arange(0, TILE), tl.minimum(bs, first), True)
        lanes += b - a
        opens += (_pages(b, PAGE) - _pages(a, PAGE)).to(tl.int64)
    total = tl.sum(lanes, 0)
    pages = tl.sum(opens, 0)
    for group in range(first, tl.minimum(bs, first + each * GROUP), GROUP):
        if GROUP > 1:
            j = group + tl.arange(0, GROUP)
            prefix, seq = extents(prefixes, lens, j, bs, True)
            loc = tl.load(last + j, j < bs, other=-1).to(tl.int64)
        length, opened = seq - prefix, _pages(prefix, PAGE)
        taken = (_pages(seq, PAGE) - opened).to(tl.int64)
        # The page of position p is free[base + p // PAGE], where it is not the open one.
        base = (pages + tl.cumsum(taken, 0) - taken - opened)[:, None]
        to = (total + tl.cumsum(length, 0) - length)[:, None]
        follows = (loc >= 0) & (loc % PAGE == (prefix + PAGE - 1) % PAGE)
        current = tl.where(follows, loc // PAGE, -1)[:, None]
        for turn in range(turns(tl.minimum(tl.max(length, 0), size - total), part, log, CHUNK)):
            t = ((turn << log) + part) * CHUNK + tl.arange(0, CHUNK)[None, :]
            mine = (t < length[:, None]) & (t < size - to)
            position = (prefix[:, None] + t).to(tl.int32)
            page = position // PAGE
            is_open = page < opened[:, None]
            index = base + page
            there = mine & (index >= 0) & (index < n) & (is_open == 0)
            new = tl.load(free + tl.where(there, index, 0), there, other=-1).to(tl.int64)
            slot = slot_of(tl.where(is_open, current, new), position - page * PAGE, PAGE, WIDE)
            tl.store(out + to + t, slot.to(out.dtype.element_ty), mine)
        total += tl.sum(length, 0)
        pages += tl.sum(taken, 0)
    if first + each * GROUP >= bs:
        if part == 0:
            tl.store(result, pages)
        for turn in range(turns(size - total, part, log, CHUNK)):
            o = total + ((turn << log) + part) * CHUNK + tl.arange(0, CHUNK)
            tl.store(out + o, tl.full([CHUNK], -1, out.dtype.element_ty), o < size)


@plans
def _plans(
    prefix_lens: Tensor, seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int, out: Tensor
) -> Plan:
    size = length("out")
    args = (
        "prefix_lens",
        "seq_lens",
        "last_loc",
        "free_pages",
        "out",
        RESULT,
        length("prefix_lens"),
        length("free_pages"),
        size,
    )
    found = steps(
        alloc_extend_kernel, TILES, "prefix_lens", size, out.get_device(), args, PAGE=page_size, WIDE=out.dtype is int64
    )
    return Plan(found, returns=Result("prefix_lens", 1, int64))


@_plans.launcher
def alloc_extend(
    prefix_lens: Tensor, seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int, out: Tensor
) -> Tensor:
    return _plans.start(prefix_lens, seq_lens, last_loc, free_pages, page_size, out)  # type: ignore[no-any-return]
