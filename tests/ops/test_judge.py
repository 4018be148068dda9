"""Exact rounding, and headroom, in `hal.ops.proofs.judge`; what is taken for right is in conformance/test_bound.py."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction

import pytest
import torch

from hal.ops.proofs.inputs import FLOAT_DTYPES
from hal.ops.proofs.judge import Candidate, Want, headroom, rounded

SMALL = [n for n in FLOAT_DTYPES if n != "fp32"]
BITS = {1: (torch.uint8, torch.int8), 2: (torch.int16, torch.int16)}


def finite(dtype: torch.dtype) -> list[Fraction]:
    """Every finite number of a dtype, ascending, each once."""
    n = 8 * dtype.itemsize
    patterns = torch.arange(2**n, dtype=torch.int32).to(torch.int16 if n == 16 else torch.uint8)
    values = patterns.view(dtype).to(torch.float64)
    return sorted({Fraction(float(x)) for x in values[torch.isfinite(values)]})


def nearest_even(x: Fraction, numbers: list[Fraction], dtype: torch.dtype) -> float:
    """Exact rounding by its definition: the nearer neighbour, a tie to the one with the even last bit."""
    i = bisect.bisect_left(numbers, x)
    low, high = numbers[max(i - 1, 0)], numbers[i]
    if high == x or high - x < x - low:
        return float(high)
    if x - low < high - x:
        return float(low)
    even = torch.tensor([float(low)]).to(dtype)
    odd = int(even.view(BITS[dtype.itemsize][0])[0]) & 1
    return float(high) if odd else float(low)


@pytest.mark.parametrize("name", SMALL)
def test_rounded_is_exact_at_the_boundaries(name: str) -> None:
    dtype = FLOAT_DTYPES[name]
    numbers = finite(dtype)
    step = max(1, len(numbers) // 900)
    points = [*range(1, len(numbers), step), 1, 2, len(numbers) // 2, len(numbers) // 2 + 1, len(numbers) - 1]
    xs: list[float] = []
    for i in points:
        low, high = numbers[i - 1], numbers[i]
        tie = float((low + high) / 2)
        assert Fraction(tie) == (low + high) / 2
        xs += [float(low), tie, math.nextafter(tie, -math.inf), math.nextafter(tie, math.inf)]
        # Where rounding to fp32 first would land on the tie: the case for rounding to odd.
        xs += [tie * (1 + 2.0**-40), tie * (1 - 2.0**-40)]
    got = rounded(torch.tensor(xs, dtype=torch.float64), dtype).to(torch.float64).tolist()
    want = [nearest_even(Fraction(x), numbers, dtype) for x in xs]
    assert got == want


@pytest.mark.parametrize("name", list(FLOAT_DTYPES))
def test_rounded_past_the_largest(name: str) -> None:
    dtype = FLOAT_DTYPES[name]
    top = torch.finfo(dtype).max
    x = torch.tensor([torch.inf, -torch.inf, top * 2, torch.nan, top], dtype=torch.float64)
    got = rounded(x, dtype).to(torch.float32).tolist()
    over = top if name in ("e4m3", "e5m2") else torch.inf
    assert got[:3] == [over, -over, over]
    assert math.isnan(got[3])
    assert got[4] == top


def test_rounded_leaves_float64() -> None:
    x = torch.tensor([1 + 2.0**-50], dtype=torch.float64)
    assert rounded(x, torch.float64) is x


def test_headroom() -> None:
    named = torch.ones(2, dtype=torch.bool)
    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    exact = Want(named, (Candidate(truth, torch.zeros(2, dtype=torch.float64)),))
    assert headroom(torch.tensor([1.0, 2.0]), exact) == 0.0
    assert headroom(torch.tensor([1.0, 2.0]), Want(named, (Candidate(torch.tensor([1, 2])),))) == 0.0
    half = 2.0**-24
    assert (
        headroom(torch.tensor([1.0, 2.0]), Want(named, (Candidate(truth + half, torch.zeros(2, dtype=torch.float64)),)))
        == 1.0
    )
    off = Want(named, (Candidate(truth, torch.full((2,), 0.5, dtype=torch.float64)),))
    assert 0.4 < headroom(torch.tensor([1.2, 2.0]), off) < 0.5
    assert headroom(torch.tensor([torch.inf, 2.0]), exact) == 0.0
    assert (
        headroom(
            torch.tensor([448.0]).to(torch.float8_e4m3fn), Want(named[:1], (Candidate(truth[:1] * 1e4, truth[:1] * 0),))
        )
        == 0.0
    )
