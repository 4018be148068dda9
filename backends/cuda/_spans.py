# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""What the kernels over ragged requests share.

A program has a group of GROUP requests (or several, one after the other), and of their outputs every PARTS-th
chunk. It sums the lengths of all requests before its own in whole tiles; programs are bounded in number, so that
is linear in the requests. In a chunk no request is searched for: the request of output o is the number of the
group's ends <= o, by comparing all with all in registers.
"""

import triton
import triton.language as tl

from hal.backends.cuda._device import multiprocessors

GROUP = 32
"""Requests compared with a chunk at once."""
TILE = 1024
"""Lengths summed at once."""
BLOCK = 256
"""Outputs in a chunk."""
WARPS = 8


@triton.jit
def clamped(starts, ends, j, bs, most):
    """max(end - start, 0), at most `most`: as unsigned, the difference of any two int64 is right."""
    start = tl.load(starts + j, j < bs, other=0).to(tl.int64)
    end = tl.load(ends + j, j < bs, other=0).to(tl.int64)
    length = tl.where(end > start, (end - start).to(tl.uint64), 0)
    return tl.minimum(length, most.to(tl.uint64)).to(tl.int64)


@triton.jit
def extents(prefixes, lens, j, bs, PREFIX: tl.constexpr):
    """(prefix, seq) in int64; (0, 0) where not 0 <= prefix <= seq < 2^31. Without PREFIX it is 0."""
    seq = tl.load(lens + j, j < bs, other=0).to(tl.int64)
    prefix = tl.zeros_like(seq)
    if PREFIX:
        prefix = tl.load(prefixes + j, j < bs, other=0).to(tl.int64)
    ok = (prefix >= 0) & (prefix <= seq) & (seq <= 2147483647)
    return tl.where(ok, prefix, 0), tl.where(ok, seq, 0)


@triton.jit
def owners(ending, low, BLOCK: tl.constexpr):
    """Of outputs low to low + BLOCK: how many of the group's requests end at or before each, and its place in its own.

    `ending` [GROUP]: where each request of the group ends.
    """
    o = tl.arange(0, BLOCK)
    run = tl.max(tl.where(ending <= low, ending, 0), 0)
    near = tl.minimum(tl.maximum(ending - low, 0), BLOCK).to(tl.int32)[:, None]
    before = near <= o[None, :]
    behind = tl.sum(before.to(tl.int32), 0)
    began = tl.max(tl.where(before, near, 0), 0)
    return behind, low + o - tl.where(began > 0, low + began, run)


@triton.jit
def slot_of(page, at, PAGE: tl.constexpr, WIDE: tl.constexpr):
    """The slot `at` places into `page`, or -1 where int32 (WIDE: int64) can't hold all slots of the page."""
    top: tl.constexpr = 9223372036854775807 if WIDE else 2147483647
    ok = (page >= 0) & (page <= (top - PAGE + 1) // PAGE)
    return tl.where(ok, tl.where(ok, page, 0) * PAGE + at, -1)


def grid(bs: int, size: int, device: int) -> tuple[tuple[int, int, int], int, int]:
    """(grid, groups of a program, parts of a group) for `bs` requests with up to `size` outputs."""
    most = 4 * multiprocessors(device)
    groups = -(-bs // GROUP) or 1
    each = -(-groups // most)
    programs = -(-groups // each)
    parts = min(-(-size // BLOCK) or 1, most // programs or 1)
    return (programs * parts, 1, 1), each, parts
