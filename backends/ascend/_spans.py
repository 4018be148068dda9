"""What the ragged ops' kernels share: a request's extent, and how `out` is split over the programs.

The programs share *out* evenly, not the requests: each walks over the lengths, as scalars, to find the
requests that overlap its piece, so that the longest request is split like any other and no program waits
for another's sum.
"""

# A kernel's parameters have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

from hal.backends.ascend._device import cdiv, vector_cores

LONGEST = tl.constexpr(2**31 - 1)
"""`hal.ops._spans.LONGEST`: of a request. No sum of lengths can wrap in 64 bits."""


@triton.jit
def extent(prefixes, lens, j, PREFIXED: tl.constexpr):
    """(prefix, seq) of request `j` in int64; (0, 0) where not ``0 <= prefix <= seq <= LONGEST``."""
    seq = tl.load(lens + j).to(tl.int64)
    prefix = tl.load(prefixes + j).to(tl.int64) if PREFIXED else seq * 0
    ok = (prefix >= 0) & (prefix <= seq) & (seq <= LONGEST)
    return tl.where(ok, prefix, 0), tl.where(ok, seq, 0)


@triton.jit
def clamped(starts, ends, j, most):
    """(start, length) of request `j`: ``max(end - start, 0)``, at most `most`; in int64, and nothing in it wraps."""
    start = tl.load(starts + j).to(tl.int64)
    end = tl.load(ends + j).to(tl.int64)
    # start + most stops at the largest int64, beyond which no end lies.
    reach = tl.minimum(start, 9223372036854775807 - most) + most
    return start, tl.maximum(tl.minimum(end, reach), start) - start


@triton.jit
def write_indptr(prefixes, lens, indptr, bs, capacity, PREFIXED: tl.constexpr, WORDS: tl.constexpr, keep=None):
    """``indptr[j]``: the tokens before request `j`, at most `capacity`; a block at a time, as words of int32. Of a
    request at most `keep` count."""
    lane = tl.arange(0, 64 * WORDS)
    # Small integers compare exactly in fp32, and only fp32 vectors compare in one instruction.
    lane_f = lane.to(tl.float32)
    total = capacity * 0
    for first in range(0, bs + 1, 64):
        count = tl.minimum(bs + 1 - first, 64)
        sums = tl.full([64 * WORDS], 0, tl.int32)
        for i in range(count):
            at = (i * WORDS).to(tl.float32)
            sums = tl.where(lane_f == at, total.to(tl.int32), sums)
            if WORDS == 2:
                sums = tl.where(lane_f == at + 1.0, (total >> 32).to(tl.int32), sums)
            if first + i < bs:
                prefix, seq = extent(prefixes, lens, first + i, PREFIXED)
                length = seq - prefix
                if keep is not None:
                    length = tl.minimum(length, keep)
                total = tl.minimum(total + length, capacity)
        tl.store(indptr + tl.cast(first, tl.int64) * WORDS + lane, sums, mask=lane < count * WORDS)


def shares(capacity: int, device: torch.device, least: int = 256) -> tuple[int, int]:
    """(programs, elements of `out` each): pieces of at least `least`, on no more programs than cores."""
    share = cdiv(capacity, min(vector_cores(device), cdiv(capacity, least)))
    return cdiv(capacity, share), share


@triton.jit
def copy_columns(row, out, first, last, shift, known, width, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """``out[t] = row[t + shift]`` for t in [first, last), in blocks; -1 where not `known`, or outside [0, width)."""
    lane = tl.arange(0, BLOCK)
    for t in range(first, last, BLOCK):
        count = tl.minimum(last - t, BLOCK).to(tl.int32)
        # Lanes [inside, beyond) lie in the row; a start far outside it is pulled to its edge.
        column = tl.minimum(tl.maximum(t + shift, -BLOCK), width)
        inside = tl.maximum(-column, 0).to(tl.int32)
        beyond = tl.minimum(width - column, count).to(tl.int32)
        beyond = tl.where(known, beyond, 0)
        slot = tl.full([BLOCK], -1, tl.int32)
        if inside < beyond:
            slot = tl.load(row + column + lane, mask=(lane >= inside) & (lane < beyond), other=-1)
        store(out, t, slot, slot >> 31, count, BLOCK, WORDS)


@triton.jit
def store(out, t, slots, above, count, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """``out[t : t + count]``, of low words and, where there are two, high ones."""
    if WORDS == 2:
        wide = tl.arange(0, BLOCK * WORDS)
        tl.store(out + t * 2 + wide, tl.interleave(slots, above), mask=wide < count * 2)
    else:
        lane = tl.arange(0, BLOCK)
        tl.store(out + t + lane, slots, mask=lane < count)


@triton.jit
def largest_page(page_size, WORDS: tl.constexpr):
    """The last page whose every slot a dtype of WORDS * 32 bits can hold."""
    if WORDS == 2:
        top = tl.full([], 2**63 - 1, tl.int64)
    else:
        top = tl.full([], 2**31 - 1, tl.int64)
    return (top - page_size + 1) // page_size


@triton.jit
def put_run(slots, above, lane, lane_f, at, run, page, inside, page_size, most, WORDS: tl.constexpr):
    """`run` consecutive slots of a page, from `inside` on, in lanes [at, at + run); none where the page is none: their
    low words in `slots`, the high ones in `above`. `lane_f` is `lane` in fp32.

    Returns:
        slots, above, and the run: no longer than until the low word wraps.
    """
    if (page >= 0) & (page <= most):
        slot = page * page_size + inside
        if WORDS == 2:
            run = tl.minimum(run, (1 << 32) - (slot & 0xFFFFFFFF))
        at_f = at.to(tl.float32)
        mine = (lane_f >= at_f) & (lane_f < at_f + run.to(tl.float32))
        slots = tl.where(mine, (slot - at).to(tl.int32) + lane, slots)
        if WORDS == 2:
            above = tl.where(mine, (slot >> 32).to(tl.int32), above)
    return slots, above, run


@triton.jit
def open_page(last, prefix, page_size):
    """The page that the token at `prefix` goes on in, after the token with slot `last`; -1 where that can't be it."""
    follows = (last >= 0) & (last % page_size == (prefix - 1) % page_size)
    return tl.where(follows, last // page_size, -1)
