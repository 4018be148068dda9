"""Extreme offsets and lengths: no kernel may subtract what would wrap, and the suite shows one that does."""

from __future__ import annotations

import itertools

import pytest
import torch

from hal.backends.cpu._bits import load, store
from hal.backends.cpu._index import length
from hal.backends.cpu._jit import Kernel
from hal.conformance.proofs.extremes import VALUES
from hal.ops import get_spec
from hal.ops._spans import clamped_lengths

EDGES = sorted({max(-(2**63), min(x + d, 2**63 - 1)) for x in VALUES[torch.int64] for d in (-1, 0, 1)})


def _lengths(n, starts, ends, rooms, out):  # type: ignore[no-untyped-def]
    for i in range(n):
        store(out, i, length(load(starts, i), load(ends, i), load(rooms, i)))


def test_the_length_of_any_two_offsets() -> None:
    rooms = [r for r in EDGES if r >= 0] + [53, 2**31 - 1]
    start, end, room = (torch.tensor(x) for x in zip(*itertools.product(EDGES, EDGES, rooms), strict=True))
    wanted = [min(max(e - s, 0), r) for s, e, r in itertools.product(EDGES, EDGES, rooms)]
    out = torch.empty_like(start)
    Kernel(_lengths, "int i64 i64 i64 i64")()(
        len(wanted), start.data_ptr(), end.data_ptr(), room.data_ptr(), out.data_ptr()
    )
    assert out.tolist() == wanted
    for r in rooms:
        some = room == r
        assert clamped_lengths(start[some], end[some], r).tolist() == [
            x for x, mine in zip(wanted, some.tolist(), strict=True) if mine
        ]


@pytest.mark.parametrize("op", ["decode_attention", "extend_attention"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_widest_window_is_none(op: str, backend: str) -> None:
    import hal

    s = get_spec(op)
    args = s.make(dtype="fp32", bs=2, longest=5, head_dim=72)  # by torch on the cpu backend, too
    found = [getattr(hal, op)(**args, backend=backend)]
    for window in (2**62, 2**63 - 1):
        args = s.make(dtype="fp32", bs=2, longest=5, head_dim=72) | {"sliding_window": window}
        found.append(getattr(hal, op)(**args, backend=backend))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    with pytest.raises(hal.ArgumentError, match="sliding_window: expected an int64"):
        getattr(hal, op)(**args | {"sliding_window": 2**70}, backend=backend)
