"""The trace by blocks, lines and bytes says of random accesses what a dictionary of bytes says."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest

from hal.lowered import machine, runtime

EXTENT = 5000
SECOND = 1440
"""Where the second argument begins, in the first one's memory."""
UNITS = (1, 4, 16, 16, 64, 64, 128, 256)

LATE_READER = [*([(0, 0, 1, size, size, False)] for size in (128, 128, 256)), [(0, 128, 1, 16, 16, True)]]
"""The last writes what only the last reader has read, after two have read the same."""


def accesses(seed: int) -> list[list[tuple[int, int, int, int, int, bool]]]:
    """Of each program: argument, offset, rows, step, bytes of a row, and whether it writes."""
    rng = random.Random(seed)
    programs = rng.randint(2, 5)
    units = rng.sample(UNITS, 2)

    def draw(low: int, high: int) -> list[tuple[int, int, int, int, int]]:
        found = []
        while len(found) < 4:
            unit = rng.choice(units)
            row = unit * rng.randint(1, 6)
            step = row + unit * rng.choice((0, 0, 1, 3))
            argument = int(rng.random() < 0.3)
            at = rng.randrange(low, high) // unit * unit
            rows = min(rng.randint(1, 12), (high - at - row) // step + 1)
            if rows > 0 and at >= SECOND * argument:
                found.append((argument, at - SECOND * argument, rows, step, row))
        return found

    # All read the same pieces, and few write: or each program has a part of its own, and some cross the border.
    same, writes = draw(1024, 2600), rng.choice((0.03, 0.1))
    if seed % 2:
        return [[(*rng.choice(same), rng.random() < writes) for _ in range(8)] for _ in range(programs)]
    size = EXTENT // programs
    pieces = [draw(p * size, min(EXTENT, (p + 1) * size + rng.choice((0, 0, 16, 700)))) for p in range(programs)]
    return [[(*rng.choice(mine), rng.random() < 0.5) for _ in range(8)] for mine in pieces]


def expected(programs: list[list[Any]], shared: bool) -> tuple[int, ...] | None:
    """(program, other or -1, argument, offset, write) of the first race."""
    writers: dict[int, int] = {}
    readers: dict[int, int] = {}
    for me, todo in enumerate(programs, 1):
        for argument, offset, rows, step, row, write in todo:
            for at in (offset + r * step + b for r in range(rows) for b in range(row)):
                byte = at + SECOND * argument
                wrote, read = writers.get(byte, me), readers.get(byte, me)
                if wrote != me and not (write and shared):
                    return me, wrote, argument, at, write
                if write and read != me:
                    return me, read, argument, at, write
                mine = writers if write else readers
                mine[byte] = me if mine.get(byte, me) == me else -1
    return None


@pytest.mark.parametrize("shared", [False, True])
def test_races_are_those_of_the_bytes(shared: bool) -> None:
    runtime.load()
    library = runtime._library()
    place = machine._Workspace()
    place.make_room(64)
    place.state.arena_end, place.state.traced, place.state.arguments = place.state.arena + (1 << 20), 1, 2
    copy = library.hal_copy
    copy.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    memory = ctypes.create_string_buffer(EXTENT + 64)
    words = [0] * (2 + 2 * runtime.MAX_DIMS)
    found = 0
    for seed in range(400):
        # Begins anywhere: what the trace keeps together does not depend on it.
        base = ctypes.addressof(memory) + seed % 64
        programs = accesses(seed) if seed else LATE_READER
        given = (ctypes.c_int64 * 26)(base, EXTENT, shared, *words, base + SECOND, EXTENT - SECOND, shared, *words)

        def run(*_: Any, todo: list[list[Any]] = programs) -> None:
            for argument, offset, rows, step, row, write in todo[place.state.program - 1]:
                handle = (runtime.HANDLE | argument << runtime.ARGUMENT_SHIFT) + offset
                ours = descriptor(place.state.arena, rows, row, row)
                theirs = descriptor(handle, rows, step, row)
                copy(place.at, 1, *((ours[1], theirs[1]) if write else (theirs[1], ours[1])))

        kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int32] * 6)(run)
        runtime.load()(ctypes.cast(kernel, ctypes.c_void_p), place.at, given, None, len(programs), 1, 1)
        s = place.state
        got = None
        if s.error:
            assert s.error == runtime.RACE
            who = s.error_program, s.error_other
            got = (*who, s.error_argument, s.error_offset, bool(s.error_access & runtime.WRITE))
        assert got == expected(programs, shared), seed
        found += got is not None
    assert 100 < found < 350, found


def descriptor(at: int, rows: int, step: int, row: int) -> tuple[Any, int]:
    """A memref of `rows` rows of bytes, in MLIR's form without a rank, and where it is; the first keeps it there."""
    of = (ctypes.c_int64 * 7)(at, at, 0, rows, row, step, 1)
    unranked = (ctypes.c_int64 * 2)(2, ctypes.addressof(of))
    return (of, unranked), ctypes.addressof(unranked)
