# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated"
"""How the keys of requests are shared out among the programs that run at once, found by each of them from kv_indptr
alone: of MLA's rows on Hopper, where that is one a multiprocessor (`find`), and of keys and values apart, where it is
several (`find_uneven`).

Where requests cut into equal parts fill the programs, each program has one of those (`_split.py`). Else, as where forty
requests are as long, for sixty-six programs, each takes an equal share of all tiles, request after request: the end of
one, whole ones, the beginning of the next. To begin a request takes as long as some tiles, `BEGUN`, and so it counts as
its tiles and those.

A request's first part is that of the first program that has some of its tiles, and so on. A part's line is its program
and its request added up: no two are the same, as from one part to the next the program, the request or both are one on.

Source: "Stream-K" (Osama et al., PPoPP 2023), which shares out a product's tiles so; here, of attention's keys.
"""

from collections.abc import Iterator

import triton
import triton.language as tl

from hal.backends.cuda import _split
from hal.backends.cuda._attention import entry
from hal.backends.cuda._split import counts, even, seen, shortest, total_of, wider
from hal.triton.plans import MOST

BEGUN = tl.constexpr(2)
"""Tiles that as much time as to begin a request would be for: its queries, the first rows, what is left at the end."""
LONG_ENOUGH = tl.constexpr(8)
"""Of shorter requests, in tiles and `BEGUN`, in the mean, more begin at once where each has a program."""
AT_LEAST = tl.constexpr(10)
"""Sixteenths of the programs that run at once which whole requests take as long as, where they are fewer."""
HUGE = tl.constexpr(2**31 - 1)


def waves(programs: int) -> Iterator[tuple[int, int, bool]]:
    """(of more than how many requests, of up to how many, whether those may each be a program's, or two of them one's,
    and none split, if they are alike): as many as fill programs, or little fewer."""
    low = -1
    for most in (programs, 2 * programs):
        few = most - programs // 8 - 1
        yield low, few, False
        yield few, most, True
        low = most
    yield low, MOST, False


@triton.jit
def _tiles(n, keys, STEP: tl.constexpr):
    """The tiles of n keys each, one for none; one of any where there are as many `keys` to a tile; 0 where n is below
    0, for what has no part."""
    tiles = tl.where(keys == STEP, (tl.maximum(n, 1) + (STEP - 1)) // STEP, 1)
    return tl.where(n < 0, 0, tiles)


@triton.jit
def find(
    kv_indptr, each, c, nnz, bs, programs, SHORTEST: tl.constexpr, FEW_PARTS: tl.constexpr, STEP: tl.constexpr,
    SLACK: tl.constexpr,
):  # fmt: skip
    """(keys, share, first, stop, before, alone): program c has something of requests [first, stop).

    With a `share` of 0 that is one part, of at most so many `keys`, and `before` are the parts of requests before. Else
    it is what falls into its share of what all requests count, by tiles of so many `keys`; `before` is what those
    before `first` count. SLACK: so many tiles more than its share a program may have, if then each has one part, or
    whole requests, and fewer parts are to be begun and merged. `alone`: whether no request has several parts.
    ``each``: as in `_split.py`.
    """
    BLOCK: tl.constexpr = each.shape[0]
    n = seen(kv_indptr, each, nnz, bs, 0, False)
    keys, share, first, before = c * 0, c * 0, c, c
    aligned = False
    alone = c < 0
    if bs <= min(BLOCK, programs):
        total = total_of(n, 1)
        most = even(total, programs, shortest(total, SHORTEST, FEW_PARTS), 0)
        keys = tl.minimum(wider(n, 1, most, programs), tl.maximum(nnz, 1)).to(tl.int32)
        parts = counts(n, keys)
        stops = tl.cumsum(parts, 0)
        mine = (stops <= c) & (each < bs)
        first = tl.sum(mine.to(tl.int32))
        before = tl.max(tl.where(mine, stops, 0))
        tiles = tl.minimum(total, 2**30).to(tl.int32) // STEP + (BEGUN + 1) * bs
        part = _tiles(tl.minimum(keys, tl.max(n)), STEP, STEP)
        aligned = (tl.max(stops) <= programs) & (part <= tiles // programs + SLACK)
        alone = aligned & (tl.max(stops) == bs)
    stop = first + 1
    if not aligned:
        keys, total, longest = _counted(kv_indptr, n, each, nnz, bs, 0, STEP, False)
        share = (total - 1) // programs + 1
        whole = BEGUN + _tiles(longest, keys, STEP)
        if whole * tl.cast(bs, tl.int64) == total:  # all are as long
            several = ((share - 1) // whole + 1) * whole
            alone = (whole <= share) & (several <= share + SLACK)
            share = tl.where(alone, several, share)
        first, stop, before = _by_shares(kv_indptr, n, each, c, nnz, bs, 0, keys, share, STEP, False)
    return keys, share, first, tl.minimum(stop, bs), before, alone


@triton.jit
def find_uneven(
    kv_indptr, each, c, nnz, bs, programs, window, SHORTEST: tl.constexpr, FEW_PARTS: tl.constexpr,
    WINDOW: tl.constexpr, STEP: tl.constexpr, ENOUGH: tl.constexpr,
):  # fmt: skip
    """(keys, share, first, stop, before, part): `find` where several programs share a multiprocessor, and a grid has
    one for each request too: by shares only where `_split.find` would leave the memory idle, long enough to be worth
    it. `part` is in place of c for what follows. ENOUGH: sixteenths of all programs that read as fast as all do."""
    n = seen(kv_indptr, each, nnz, bs, window, WINDOW)
    keys, total, longest = _counted(kv_indptr, n, each, nnz, bs, window, STEP, WINDOW)
    share = (total - 1) // programs + 1
    mean = total // bs
    longest = BEGUN + _tiles(longest, keys, STEP)
    # The last wave takes as long as if it were of ENOUGH programs, and ends with the longest request alone.
    rest = bs % programs
    least = tl.where(bs < programs, AT_LEAST, ENOUGH)
    waves = bs // programs * 16 + tl.where(rest > 0, tl.maximum(rest * 16 // programs, least), 0)
    took = waves * mean + (longest - mean) * ENOUGH
    if (mean >= LONG_ENOUGH) & (took - 16 * share > share // 2):
        first, stop, before = _by_shares(kv_indptr, n, each, c, nnz, bs, window, keys, share, STEP, WINDOW)
    else:
        keys, first, before = tl.cast(tl.maximum(nnz, 1), tl.int32), c, c
        if (bs < programs) | (longest > 2 * share):
            keys, first, before, c = _split.find(
                kv_indptr, each, c, nnz, bs, programs, window, SHORTEST, FEW_PARTS, WINDOW
            )
        stop = first + 1
        share = c * 0
    return keys, share, first, tl.minimum(stop, bs), before, c


@triton.jit
def _counted(kv_indptr, n, each, nnz, bs, window, STEP: tl.constexpr, WINDOW: tl.constexpr):
    """(keys of a tile, what all requests count, keys of the longest). `n`: of the first requests."""
    BLOCK: tl.constexpr = each.shape[0]
    keys = tl.cast(STEP, tl.int32)
    total = total_of(_tiles(n, keys, STEP), 1)
    longest = tl.max(n)
    for b in range(BLOCK, bs, BLOCK):
        more = seen(kv_indptr, b + each, nnz, bs, window, WINDOW)
        total += total_of(_tiles(more, keys, STEP), 1)
        longest = tl.maximum(longest, tl.max(more))
    requests = tl.cast(bs, tl.int64)
    total += BEGUN * requests
    if total > 2**30:  # only where requests overlap: none is split
        keys = tl.cast(HUGE, tl.int32)
        total = (BEGUN + 1) * requests
    return keys, total.to(tl.int32), longest


@triton.jit
def _by_shares(
    kv_indptr, n, each, c, nnz, bs, window, keys, share, STEP: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """(first, stop, before) of program c. `n`: keys of the first requests."""
    BLOCK: tl.constexpr = each.shape[0]
    low, high = c * share, (c + 1) * share
    first, stop, before, base = c * 0, c * 0, c * 0, c * 0
    for b in range(0, bs, BLOCK):
        if bs > BLOCK:
            n = seen(kv_indptr, b + each, nnz, bs, window, WINDOW)
        own = _tiles(n, keys, STEP)
        ends = base + tl.cumsum(tl.where(n < 0, 0, own + BEGUN), 0)
        ended = (ends <= low) & (n >= 0)
        first += tl.sum(ended.to(tl.int32))
        stop += tl.sum(((ends - own < high) & (n >= 0)).to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(ended, ends, 0)))
        base = tl.max(ends)
    return first, stop, before


@triton.jit
def find_own(
    kv_indptr, few, many, c, nnz, bs, programs, SHORTEST: tl.constexpr, FEW_PARTS: tl.constexpr, STEP: tl.constexpr,
    SLACK: tl.constexpr,
):  # fmt: skip
    """`find`, of any number of requests; of one program, or one request, with less to look at. Whether one
    request is `alone` is not asked."""
    keys, share, first, stop, before = tl.cast(tl.maximum(nnz, 1), tl.int32), tl.cast(0, tl.int32), c, c + 1, c
    alone = c < 0
    if programs > 1:
        if bs == 1:
            keys, first, before, _ = _split.find_one(kv_indptr, c, nnz, programs, 0, SHORTEST, FEW_PARTS, False)
            stop = first + 1
        elif bs <= few.shape[0]:
            keys, share, first, stop, before, alone = find(
                kv_indptr, few, c, nnz, bs, programs, SHORTEST, FEW_PARTS, STEP, SLACK
            )
        else:
            keys, share, first, stop, before, alone = find(
                kv_indptr, many, c, nnz, bs, programs, SHORTEST, FEW_PARTS, STEP, SLACK
            )
    return keys, share, first, tl.minimum(stop, bs), before, alone


@triton.jit
def keys_of(
    kv_indptr, request, c, before, nnz, keys, share, STEP: tl.constexpr, window=0, WINDOW: tl.constexpr = False
):  # fmt: skip
    """Of a request that program c has something of, by what `find` gives: (where its keys begin, its parts, the first
    key of c, the key after its last, the line of c's part, the line of its first part, `before` of the next)."""
    begin = entry(kv_indptr, request, nnz)
    length = tl.maximum(entry(kv_indptr, request + 1, nnz) - begin, 0)
    if WINDOW:
        seen = tl.minimum(length, window + 1)
        begin += length - seen
        length = seen
    if share == 0:
        parts = counts(length, keys)
        own = (tl.maximum(length - 1, 0) // parts + STEP) // STEP * STEP
        low = (c - before) * own
        high = tl.minimum(low + own, length)
        line, leads, after = c, before, before
    else:
        tiles = _tiles(length, keys, STEP)
        at = before + BEGUN
        leads = at // share
        after = at + tiles
        parts = (after - 1) // share - leads + 1
        low = tl.maximum(c * share - at, 0) * keys
        high = tl.minimum(tl.minimum((c + 1) * share - at, tiles) * keys, length)
        line, leads = c + request, leads + request
    return begin, parts, low, high, line, leads, after
