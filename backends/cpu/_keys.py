"""Attention of few queries: where the keys and values of a block lie, and requests whose keys are split.

Invariant: an offset into the cache is made only of a slot that was compared with its size.
"""

from __future__ import annotations

import numpy as np

from hal.backends.cpu._amx import copy_rows, evenly
from hal.backends.cpu._bits import address, load, shift, store
from hal.backends.cpu._index import get, in_a_row
from hal.backends.cpu._jit import inline
from hal.backends.cpu._vector import LANES

BLOCK = 256
"""Keys in a block, a multiple of 32."""
SPREAD = BLOCK // LANES


@inline
def list_rows(  # type: ignore[no-untyped-def]
    j, high, indices, indices_64, num_slots, page, page_bits, k_page, k_row, v_page, v_row, k_at, v_at
):  # fmt: skip
    """(the position after a block of the keys that are there, how many): where they lie. The last one is repeated up
    to a multiple of 32."""
    m = 0
    k_last = v_last = 0
    while j < high and m < BLOCK:
        slot = get(indices, indices_64, j)
        if slot < 0 or slot >= num_slots:
            j += 1
            continue
        whole = slot >> page_bits if page_bits else slot // page
        rest = slot - whole * page
        k_last = whole * k_page + rest * k_row
        v_last = whole * v_page + rest * v_row
        n = 1
        if rest + LANES <= page and m + LANES <= BLOCK and j + LANES <= high and in_a_row(indices, indices_64, j):
            n = LANES
        for c in range(n):
            store(k_at, m + c, k_last + c * k_row)
            store(v_at, m + c, v_last + c * v_row)
        k_last += (n - 1) * k_row
        v_last += (n - 1) * v_row
        m += n
        j += n
    if m:
        for c in range(m, (m + 31) // 32 * 32):
            store(k_at, c, k_last)
            store(v_at, c, v_last)
    return j, m


@inline
def spread(cache, at, dim, room, to):  # type: ignore[no-untyped-def]
    """Where 16 rows lie, and bytes from one to the next: in the cache if that is the same for all, else in `room`."""
    step, first = load(at, 1) - load(at, 0), shift(cache, load(at, 0))
    if not evenly(at):
        step, first = dim, room
        copy_rows(first, cache, at, dim)
    store(to, 0, address(first))
    store(to, SPREAD, 2 * step)


@inline
def list_tiles(  # type: ignore[no-untyped-def]
    j, high, indices, indices_64, num_slots, page, page_bits, k_cache, k_page, k_row, dim, v_cache, v_page, v_row,
    v_dim, at, k_room, v_room, k_by, v_by,
):  # fmt: skip
    """`list_rows`, by sixteens: where the first one is, and bytes from one to the next. The last of an odd number of
    them is repeated."""
    m = 0
    while j < high and m < BLOCK:
        to = m // LANES
        slot = get(indices, indices_64, j)
        whole = slot >> page_bits if page_bits else slot // page
        rest = slot - whole * page
        if 0 <= slot < num_slots and rest + LANES <= page and j + LANES <= high and in_a_row(indices, indices_64, j):
            store(k_by, to, address(shift(k_cache, whole * k_page + rest * k_row)))
            store(k_by, SPREAD + to, 2 * k_row)
            store(v_by, to, address(shift(v_cache, whole * v_page + rest * v_row)))
            store(v_by, SPREAD + to, 2 * v_row)
            m += LANES
            j += LANES
            continue
        n = 0
        while j < high and n < LANES:
            slot = get(indices, indices_64, j)
            if 0 <= slot < num_slots:
                whole = slot >> page_bits if page_bits else slot // page
                rest = slot - whole * page
                store(at, n, whole * k_page + rest * k_row)
                store(at, LANES + n, whole * v_page + rest * v_row)
                n += 1
            j += 1
        if n:
            for c in range(n, LANES):
                store(at, c, load(at, n - 1))
                store(at, LANES + c, load(at, LANES + n - 1))
            spread(k_cache, at, dim, shift(k_room, m * dim), shift(k_by, to))
            spread(v_cache, shift(at, LANES), v_dim, shift(v_room, m * v_dim), shift(v_by, to))
            m += n
    tiles = (m + LANES - 1) // LANES
    if tiles % 2:
        for i in range(0, 2 * SPREAD, SPREAD):
            store(k_by, i + tiles, load(k_by, i + tiles - 1))
            store(v_by, i + tiles, load(v_by, i + tiles - 1))
    return j, m


@inline
def split(low, high, pieces, piece):  # type: ignore[no-untyped-def]
    """(first, last, how many there are) of a piece of the keys from `low` to `high`; a piece is a multiple of 64."""
    if pieces == 1 or high <= low:
        return low, high, 1
    each = ((high - low + pieces - 1) // pieces + 63) // 64 * 64
    return low + piece * each, min(high, low + (piece + 1) * each), (high - low + each - 1) // each


@inline
def join(ends, acc, group, v_dim, partial, count):  # type: ignore[no-untyped-def]
    """What `count` pieces at `partial` have found, as if one had seen all of their keys."""
    size = group * (v_dim + 2)
    for g in range(group):
        top, total, x = np.float32(-np.inf), np.float32(0.0), shift(acc, g * v_dim)
        for c in range(count):
            top = max(top, load(partial, c * size + g))
        for d in range(v_dim):
            store(x, d, np.float32(0.0))
        for c in range(count):
            mine = shift(partial, c * size)
            by = np.exp2(load(mine, g) - (top if top > -np.inf else np.float32(0.0)))
            total += by * load(mine, group + g)
            y = shift(mine, 2 * group + g * v_dim)
            for d in range(v_dim):
                store(x, d, load(x, d) + by * load(y, d))
        store(ends, g, top)
        store(ends, group + g, total)
