"""Faults that only extreme lengths show: a difference that wrapped, where the compiler was told that none does."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from sabotage._healthy import calling


def compiled(starts: Any, ends: Any, room: int) -> Iterator[tuple[int, int, int, int]]:
    """(request, its start, where it goes, its length) as LLVM may compile this, the difference being ``nsw``::

        n = end - start
        if n < 0 or n > room - at:  # below 0: it wrapped
            n = room - at

    After ``end > start`` a difference that can't wrap is not below 0, so the first test is gone.
    """
    at = 0
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        if end <= start or at >= room:
            continue
        n = ctypes.c_int64(end - start).value
        n = room - at if n > room - at else n
        yield i, start, at, n
        at = ctypes.c_int64(at + n).value
    yield -1, 0, at, room - at if at < room else 0


@calling(
    "assign_extend_cache_locs",
    r"out\[\d+\]: expected -?\d+, got|outside the tensor|died \(SIG(SEGV|BUS)\)",
    "extremes",
    device=("cpu",),
    dies=True,
)
def the_test_for_a_wrapped_length_is_compiled_away(
    good: Any, req_to_token: Any, req_pool_indices: Any, start_offsets: Any, end_offsets: Any, out: Any
) -> Any:
    rows, width = req_to_token.shape
    word = ctypes.c_int64 if out.element_size() == 8 else ctypes.c_int32
    requests = req_pool_indices.tolist()
    for i, start, at, n in compiled(start_offsets, end_offsets, out.shape[0]):
        # What was lost may be far: a few words show it.
        for t in range(min(n, max(out.shape[0], 4))):
            inside = i >= 0 and 0 <= requests[i] < rows and 0 <= start + t < width
            slot = int(req_to_token[requests[i], start + t]) if inside else -1
            word.from_address((out.data_ptr() + (at + t) * out.element_size()) % 2**64).value = slot
    return out


@calling("write_req_to_token", r"req_to_token\[\d+, \d+\]: (expected|changed)", "extremes")
def a_wrapped_length_moves_the_next_request_back(
    good: Any, req_to_token: Any, req_pool_indices: Any, start_offsets: Any, end_offsets: Any, src: Any
) -> None:
    rows, width = req_to_token.shape
    requests, slots = req_pool_indices.tolist(), src.tolist()
    for i, start, at, n in compiled(start_offsets, end_offsets, src.shape[0]):
        if i < 0 or not 0 <= requests[i] < rows:
            continue
        for t in range(max(0, -at, -start), min(n, len(slots) - at, width - start)):
            if 0 <= slots[at + t] < 2**31:
                req_to_token[requests[i], start + t] = slots[at + t]
