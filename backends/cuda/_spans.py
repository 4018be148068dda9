# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""What the kernels over ragged requests share.

A program has a group of requests (or several, one after the other), and of each request's outputs every PARTS-th
chunk: a tile of [requests, outputs], whose rows are runs of memory. While there are programs for all, a group is one
request. The lengths of all requests before the group are added up lane by lane and reduced once; programs are bounded
in number, so that is linear in the requests.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from hal.backends.cuda._device import multiprocessors, pdl
from hal.triton import launch
from hal.triton.plans import ANY, Size, Step, length

MANY = 8
"""Requests of a group, where there are more of them than programs."""


class Tile(NamedTuple):
    """How a program of one kernel works; each op has one for a request alone and one for a group of `MANY`."""

    chunk: int
    """Outputs of each request that it makes at once."""
    lengths: int
    """Lengths that it adds at once."""
    warps: int


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
def lengths_and_starts(lens, starts, group, bs, GROUP: tl.constexpr):
    """Of a group's requests, from 0 where there are no `starts`."""
    j = group + tl.arange(0, GROUP)
    _, length = extents(lens, lens, j, bs, False)
    start = tl.zeros([GROUP], tl.int64)
    if starts is not None:
        start = tl.load(starts + j, j < bs, other=0).to(tl.int64)
    return length, start


@triton.jit
def inside(start, skipped, count, end):
    """(where `count` places begin: `skipped` behind `start`; those [low, high) of them that are in [0, `end`); int32).

    A start further outside is as much outside, and pulled to where nothing that is added to it wraps.
    """
    begin = tl.minimum(tl.maximum(start, -2147483648), end) + skipped
    low = tl.minimum(tl.maximum(-begin, 0), count).to(tl.int32)
    high = tl.minimum(tl.maximum(end - begin, 0), count).to(tl.int32)
    return begin, low, high


@triton.jit
def slot_of(page, at, PAGE: tl.constexpr, WIDE: tl.constexpr):
    """The slot `at` places into `page`, or -1 where int32 (WIDE: int64) can't hold all slots of the page."""
    top: tl.constexpr = 9223372036854775807 if WIDE else 2147483647
    ok = (page >= 0) & (page <= (top - PAGE + 1) // PAGE)
    return tl.where(ok, tl.where(ok, page, 0) * PAGE + at, -1)


@triton.jit
def turns(count, part, log, CHUNK: tl.constexpr):
    """How many chunks of `count` outputs are this part's: every 2^log-th. No division: in 64 bits that is a call."""
    return (tl.maximum(count - part * CHUNK, 0) + ((CHUNK << log) - 1)) // CHUNK >> log


def parts(programs: Size, chunks: Size, most: int) -> Size:
    """log2 of the parts of a program's outputs, of which there are no more than run at once (each one adds up the
    lengths anew), and than there are `chunks`."""
    return chunks.at_least(1).at_most(programs.within(most).at_least(1)).log2()


def steps(
    kernel: launch.Kernel,
    tiles: dict[int, Tile],
    requests: str,
    size: Size,
    device: int,
    args: tuple[Any, ...],
    *where: tuple[str, int, int],
    at_once: int = 1,
    few: int = 4,
    **static: Any,
) -> tuple[Step, ...]:
    """The launch for few requests, and that for many: how many outputs are made at most is `size`, to `args` are added
    the groups of a program and log2 of a group's parts, of which `at_once` run on a multiprocessor. `few`: requests a
    multiprocessor that have programs of their own."""
    sms, on = multiprocessors(device), pdl(device)
    found = []
    for group, low, high in ((1, -1, few * sms), (MANY, few * sms, ANY)):
        chunk, lengths, warps = tiles[group]
        run = kernel.bind(**static, PDL=on, CHUNK=chunk, GROUP=group, TILE=lengths, num_warps=warps, launch_pdl=on)
        groups = length(requests, per=group).at_least(1)
        each = groups.per(few * sms)
        programs = groups.per(each)
        log = parts(programs, size.per(chunk), at_once * sms)
        found.append(Step(run, programs.doubled(log), (*args, each, log), ((requests, low, high), *where)))
    return tuple(found)
