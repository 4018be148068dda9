# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""What the kernels over ragged requests share.

A program has a group of requests (or several, one after the other), and of each request's outputs every PARTS-th
chunk: a tile of [requests, outputs], whose rows are runs of memory. While there are programs for all, a group is one
request. The lengths of all requests before the group are added up lane by lane and reduced once; programs are bounded
in number, so that is linear in the requests.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from hal.backends.cuda._device import multiprocessors, pdl
from hal.triton import launch

MANY = 8
"""Requests of a group, where there are more of them than programs."""


class Tile(NamedTuple):
    """How a program of one kernel works; each op has one for a request alone and one for a group of `MANY`."""

    chunk: int
    """Outputs of each request that it makes at once."""
    lengths: int
    """Lengths that it adds at once."""
    warps: int


Tiles = dict[int, Tile]


class Launches(dict[tuple[int, ...], launch.Launch]):
    """A kernel's launches, by device, the values of its own constexprs `names`, and requests of a group."""

    def __init__(self, kernel: launch.Kernel, tiles: Tiles, *names: str) -> None:
        self.kernel, self.tiles, self.names = kernel, tiles, names
        launch.keeps(self)

    def __missing__(self, key: tuple[int, ...]) -> launch.Launch:
        device, *values, group = key
        on, (chunk, lengths, warps) = pdl(device), self.tiles[group]
        self[key] = made = self.kernel.bind(
            **dict(zip(self.names, values, strict=True)),
            PDL=on,
            CHUNK=chunk,
            GROUP=group,
            TILE=lengths,
            num_warps=warps,
            launch_pdl=on,
        )
        return made


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
def slot_of(page, at, PAGE: tl.constexpr, WIDE: tl.constexpr):
    """The slot `at` places into `page`, or -1 where int32 (WIDE: int64) can't hold all slots of the page."""
    top: tl.constexpr = 9223372036854775807 if WIDE else 2147483647
    ok = (page >= 0) & (page <= (top - PAGE + 1) // PAGE)
    return tl.where(ok, tl.where(ok, page, 0) * PAGE + at, -1)


@triton.jit
def turns(count, part, log, CHUNK: tl.constexpr):
    """How many chunks of `count` outputs are this part's: every 2^log-th. No division: in 64 bits that is a call."""
    return (tl.maximum(count - part * CHUNK, 0) + ((CHUNK << log) - 1)) // CHUNK >> log


def grid(bs: int, size: int, device: int, tiles: Tiles) -> tuple[tuple[int, int, int], int, int, int]:
    """(grid, requests of a group, groups of a program, log2 of a group's parts) for `bs` requests, `size` outputs."""
    sms = multiprocessors(device)
    group = 1 if bs <= 4 * sms else MANY
    groups = -(-bs // group) or 1
    each = -(-groups // (4 * sms))
    programs = -(-groups // each)
    # No more parts than run at once: each one adds up the lengths anew.
    parts = min(-(-size // tiles[group].chunk) or 1, sms // programs or 1)
    log = parts.bit_length() - 1
    return (programs << log, 1, 1), group, each, log
