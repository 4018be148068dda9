"""How decode_attention's keys are shared out among programs (`hal.backends.cuda._shares`): under TRITON_INTERPRET=1, or
on a CUDA device."""

import os
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed here")

import triton
import triton.language as tl

from hal.backends.cuda import _split
from hal.backends.cuda._shares import BEGUN, find_own, find_uneven, keys_of

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(
    not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 or a CUDA device"
)
STEP, FEW, MANY, SLACK = 4, 8, 16, 4
"""Keys of a tile; requests that are looked at together, if they are no more, and of more; tiles that make no odds."""
MOST = 64
"""Requests of a program that are written down."""


@triton.jit
def put(at, request, begin, parts, low, high, line, leads, share):  # type: ignore[no-untyped-def]
    tl.store(at, request)
    tl.store(at + 1, begin)
    tl.store(at + 2, parts)
    tl.store(at + 3, low)
    tl.store(at + 4, high)
    tl.store(at + 5, line)
    tl.store(at + 6, leads)
    tl.store(at + 7, share)


@triton.jit
def shares_kernel(  # type: ignore[no-untyped-def]
    indptr, to, lonely, nnz, bs, programs, STEP: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr,
    SLACK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """What each program has, by eight numbers a request; whether the first says that nothing is split."""
    c = tl.program_id(0)
    keys, share, first, stop, before, alone = find_own(
        indptr, tl.arange(0, FEW), tl.arange(0, MANY), c, nnz, bs, programs, STEP, 0, STEP, SLACK
    )
    if c == 0:
        tl.store(lonely, alone)
    at = to + c * (8 * MOST)
    for request in range(first, stop):
        begin, parts, low, high, line, leads, before = keys_of(indptr, request, c, before, nnz, keys, share, STEP)
        put(at, request, begin, parts, low, high, line, leads, share)
        at += 8


@triton.jit
def uneven_kernel(  # type: ignore[no-untyped-def]
    indptr, to, nnz, bs, programs, window, STEP: tl.constexpr, MANY: tl.constexpr, WINDOW: tl.constexpr,
    ENOUGH: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """The same of programs that share multiprocessors."""
    c = tl.program_id(0)
    keys, share, first, stop, before, part = find_uneven(
        indptr, tl.arange(0, MANY), c, nnz, bs, programs, window, STEP, 0, WINDOW, STEP, ENOUGH
    )
    at = to + c * (8 * MOST)
    for request in range(first, stop):
        if share == 0:
            begin, parts, low, high = _split.keys_of(indptr, request, part, before, nnz, keys, window, STEP, WINDOW)
            line, leads = part, before
        else:
            begin, parts, low, high, line, leads, before = keys_of(
                indptr, request, part, before, nnz, keys, share, STEP, window, WINDOW
            )
        put(at, request, begin, parts, low, high, line, leads, share)
        at += 8


class Share(NamedTuple):
    """What a program has of a request."""

    program: int
    request: int
    begin: int
    parts: int
    low: int
    high: int
    line: int
    leads: int
    share: int


def shares(lengths: list[int], programs: int, indptr: Any = None, alone: bool = False) -> list[Share]:
    """`alone`: it must be said that nothing is split; it may be only where nothing is."""
    device = "cuda" if CUDA else "cpu"
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0) if indptr is None else torch.tensor(indptr)
    starts = starts.to(device, torch.int32)
    bs = len(starts) - 1
    grid = programs + min(bs, programs) if programs > 1 else bs + 1
    to = torch.full((grid, MOST, 8), -1, dtype=torch.int32, device=device)
    lonely = torch.zeros(1, dtype=torch.bool, device=device)
    shares_kernel[(grid,)](starts, to, lonely, int(starts.max()), bs, programs, STEP, FEW, MANY, SLACK, MOST)
    found = _found(to)
    assert not alone or bool(lonely)
    assert not bool(lonely) or {x.parts for x in found} == {1}
    return found


def uneven(lengths: list[int], programs: int, window: int = -1, indptr: Any = None) -> list[Share]:
    """Of `find_uneven`, whose grid has a program for each request too."""
    device = "cuda" if CUDA else "cpu"
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0) if indptr is None else torch.tensor(indptr)
    starts = starts.to(device, torch.int32)
    bs = len(starts) - 1
    to = torch.full((bs + programs, MOST, 8), -1, dtype=torch.int32, device=device)
    uneven_kernel[(bs + programs,)](
        starts, to, int(starts.max()), bs, programs, window, STEP, MANY, window >= 0, 5, MOST
    )
    return _found(to)


def _found(to: torch.Tensor) -> list[Share]:
    return [Share(c, *row) for c, rows in enumerate(to.tolist()) for row in rows if row[0] >= 0]


def check(found: list[Share], lengths: list[int], programs: int) -> None:
    """Every key is some program's once; a request's parts have lines that follow each other, and nobody else's."""
    assert len({x.line for x in found}) == len(found)
    assert all(0 <= x.line < len(lengths) + programs for x in found)
    for request, length in enumerate(lengths):
        own = [x for x in found if x.request == request]
        assert own
        assert {x.parts for x in own} == {len(own)}
        assert [x.line for x in own] == list(range(own[0].leads, own[0].leads + len(own)))
        assert {x.leads for x in own} == {own[0].leads}
        assert (own[0].low, own[-1].high) == (0, length)
        assert all(x.low % STEP == 0 for x in own)
        # Of equal parts the last may have nothing.
        assert all(x.high == y.low or (y.share == 0 and y.low > length) for x, y in pairwise(own))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=24), st.sampled_from((2, 5, 12)), st.sampled_from((-1, 60)))
def test_each_key_is_some_programs_once_where_these_share_multiprocessors(
    lengths: list[int], programs: int, window: int
) -> None:
    """Of whole requests nobody asks how many parts are before."""
    found = uneven(lengths, programs, window)
    seen = [n if window < 0 else min(n, window + 1) for n in lengths]
    alone = [x._replace(line=x.request, leads=x.request) if x.parts == 1 else x for x in found]
    if found[0].share:
        check(found, seen, programs)
    else:
        assert len({(x.request, x.low) for x in alone}) == len(alone)
        for request, length in enumerate(seen):
            own = sorted((x for x in alone if x.request == request), key=lambda x: x.low)
            assert {x.parts for x in own} == {len(own)}
            assert (own[0].low, own[-1].high) == (0, length)
            assert all(x.high == y.low or y.low > length for x, y in pairwise(own))
            assert [x.line for x in own] == list(range(own[0].leads, own[0].leads + len(own)))
    assert all(x.begin == sum(lengths[: x.request]) + lengths[x.request] - seen[x.request] for x in found)


@pytest.mark.parametrize(
    ("lengths", "programs", "shared"),
    [
        ([100] * 13, 12, True),
        ([100] * 26, 12, True),
        ([20, 200] * 6, 12, True),
        ([40, 60, 80, 200, 190, 30, 150], 8, True),
        ([100] * 12, 12, False),
        ([100] * 23, 12, False),
        ([100] * 18, 12, False),
        ([100] * 8, 12, False),
        ([20] * 13, 12, False),
        ([120, *[8] * 12], 12, False),
    ],
    ids=lambda x: str(x)[:24],
)
def test_uneven_batches_are_shared_out_where_that_leaves_memory_idle(
    lengths: list[int], programs: int, shared: bool
) -> None:
    """Not where they fill whole waves, or enough of the last one; nor short ones, of which a long one is split."""
    found = uneven(lengths, programs)
    assert {x.share > 0 for x in found} == {shared}
    assert {x.request for x in found} == set(range(len(lengths)))
    if shared:
        check(found, lengths, programs)


def test_uneven_requests_that_overlap_are_not_split() -> None:
    found = uneven([], 4, indptr=[0, 2**30, 0, 2**30, 0, 2**30, 0, 2**30, 0, 2**30])
    assert sorted(x.request for x in found) == list(range(9))
    assert {x.parts for x in found} == {1}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 90), min_size=1, max_size=24), st.sampled_from((1, 2, 5, 12)))
def test_each_key_is_some_programs_once(lengths: list[int], programs: int) -> None:
    check(shares(lengths, programs), lengths, programs)


@pytest.mark.parametrize(("bs", "longest"), [(7, 50), (20, 30), (40, 21), (12, 100), (13, 100)])
def test_shares_are_even(bs: int, longest: int) -> None:
    """No program has more than its share, which is at most `SLACK` tiles more than as if all were one request's."""
    programs = 12
    found = shares([longest] * bs, programs)
    check(found, [longest] * bs, programs)
    tiles = -(-longest // STEP)
    even = -(-bs * (tiles + BEGUN.value) // programs)
    for c in range(programs):
        own = sum(-(-(x.high - x.low) // STEP) for x in found if x.program == c)
        assert own <= even + SLACK


@pytest.mark.parametrize(
    ("lengths", "programs", "parts"),
    [
        ([48] * 6, 12, [2] * 6),
        ([48] * 5, 12, [2] * 5),
        ([40] * 12, 12, [1] * 12),
        ([40] * 24, 12, [1] * 24),
        ([40] * 23, 12, [1] * 23),
        ([96], 12, [12]),
        ([5], 12, [2]),
    ],
    ids=str,
)
def test_equal_parts_and_whole_requests_where_programs_are_full_by_them(
    lengths: list[int], programs: int, parts: list[int]
) -> None:
    found = shares(lengths, programs, alone=len(parts) > 1 and max(parts) == 1)
    check(found, lengths, programs)
    assert [next(x.parts for x in found if x.request == i) for i in range(len(lengths))] == parts


def test_seven_for_twelve_programs() -> None:
    """One part each would take a program 25 tiles, and two each two of 13: shares are of 16, with 2 to begin."""
    found = shares([100] * 7, 12)
    check(found, [100] * 7, 12)
    assert {x.share for x in found} == {-(-7 * (25 + BEGUN.value) // 12)}
    assert max(x.parts for x in found) == 3


def test_requests_that_overlap_are_not_split() -> None:
    """Their keys may be more than is counted: each is one part."""
    indptr = [0, 2**30, 0, 2**30, 0, 2**30, 0, 2**30, 0, 2**30, 0, 2**30]
    found = shares([], 12, indptr)
    assert sorted(x.request for x in found) == list(range(11))
    assert {x.parts for x in found} == {1}
