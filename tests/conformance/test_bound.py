"""The bound, against errors made on purpose: what it must let through, what it must not."""

from __future__ import annotations

import pytest
import torch

from hal.ops.proofs.judge import ROPE_SLACK, Candidate, Want, half_ulp, headroom, largest, right_any, rounded, same_bits

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def wanted(value: torch.Tensor, slack: float | torch.Tensor) -> Want:
    slack = torch.as_tensor(slack, dtype=torch.float64).expand(value.shape)
    return Want(torch.ones(value.shape, dtype=torch.bool), (Candidate(value, slack),))


def grid(dtype: torch.dtype) -> torch.Tensor:
    """Every finite number of a two-byte dtype; a spread of them for fp32."""
    if dtype == torch.float32:
        return torch.randn(4096, dtype=torch.float32)
    if dtype.itemsize == 1:
        codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    else:
        codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = codes.view(dtype)
    return x[torch.isfinite(x.float())]


@pytest.mark.parametrize("dtype", [*FLOATS, *FP8])
def test_the_nearest_number_is_right_and_the_next_ones_are_not(dtype: torch.dtype) -> None:
    """With no slack there is one right answer: both neighbours of it are wrong, at every number of the dtype."""
    x = grid(dtype).float().double()
    x = torch.unique(x)
    near = rounded(x, dtype)
    assert bool(right_any(near, wanted(x, 0.0)).all())
    up, down = rounded(x[1:], dtype), rounded(x[:-1], dtype)
    assert not bool(right_any(up, wanted(x[:-1], 0.0)).any())
    assert not bool(right_any(down, wanted(x[1:], 0.0)).any())


@pytest.mark.parametrize("dtype", FLOATS)
def test_half_an_ulp_and_the_slack_and_no_more(dtype: torch.dtype) -> None:
    """An output one step away is right exactly where the truth lies within slack of the midpoint."""
    low = torch.tensor([1.0, 1.5, 3.0, 100.0], dtype=dtype)
    high = torch.nextafter(low.float(), torch.tensor(torch.inf)).to(dtype)
    if dtype != torch.float32:
        bits = low.view(torch.int16) + 1
        high = bits.view(dtype)
    middle = (low.double() + high.double()) / 2
    slack = 1e-3 * (high.double() - low.double())
    for near, answer in ((0.5, True), (0.999, True), (1.01, False), (3.0, False)):
        truth = middle + near * slack
        assert bool(right_any(low, wanted(truth, slack)).all()) == answer, near
        assert bool(right_any(high, wanted(truth, slack)).all())


@pytest.mark.parametrize("dtype", [*FLOATS, *FP8])
def test_headroom_is_at_most_one_where_a_result_is_right_and_at_least_one_where_it_is_wrong(dtype: torch.dtype) -> None:
    """Also where slack reaches over a power of two, past which an ulp is another one, and over zero."""
    edge = 2.0 ** torch.randint(-3, 4, (400,)).to(torch.float64)
    ulp = edge * torch.finfo(dtype).eps
    truth = (edge + (torch.rand(400, dtype=torch.float64) - 0.5) * 8 * ulp) * torch.tensor([1.0, -1.0]).repeat(200)
    seen = set()
    for slack in (0 * ulp, ulp * torch.rand(400, dtype=torch.float64) * 4, truth.abs() * 2):
        near = rounded(truth, dtype).double()
        for steps in torch.arange(-6, 6.5, 0.5).tolist():
            got = rounded(near + steps * ulp, dtype)
            for i, ok in enumerate(right_any(got, wanted(truth, slack)).tolist()):
                room = round(headroom(got[i : i + 1], wanted(truth[i : i + 1], slack[i : i + 1])), 6)
                assert room <= 1 if ok else room >= 1, (truth[i], slack[i], got[i], ok, room)
                seen.add((ok, room > 1))
    assert seen >= {(True, False), (False, True)}


def test_a_right_result_past_a_power_of_two_is_within_the_bound() -> None:
    truth = torch.tensor([1 - 2.0**-10], dtype=torch.float64)
    got = torch.tensor([1 + 2.0**-7]).bfloat16()
    want = wanted(truth, 1.3 * 2.0**-8)
    assert bool(right_any(got, want))
    assert 0.97 < headroom(got, want) < 0.98


def test_double_rounding_is_seen() -> None:
    """Rounding to fp16 on the way to bf16 goes wrong on ties that fp16 makes; one rounding never does."""
    x = torch.randn(20_000, dtype=torch.float64)
    slack = x.abs() * ROPE_SLACK
    assert bool(right_any(x.to(torch.float32).to(torch.bfloat16), wanted(x, slack)).all())
    wrong = ~right_any(x.to(torch.float16).to(torch.bfloat16), wanted(x, slack))
    assert 0.005 < float(wrong.double().mean()) < 0.2


def test_fp32_products_are_within_the_rope_bound_and_bf16_ones_are_not() -> None:
    a, b, c, s = (torch.randn(50_000, dtype=torch.float32) for _ in range(4))
    truth = a.double() * c.double() - b.double() * s.double()
    terms = (a.double() * c.double()).abs() + (b.double() * s.double()).abs()
    want = wanted(truth, terms * ROPE_SLACK)
    assert bool(right_any(a * c - b * s, want).all())
    assert bool(right_any(torch.addcmul(a * c, b, s, value=-1), want).all())
    low = (a.bfloat16() * c.bfloat16() - b.bfloat16() * s.bfloat16()).float()
    assert float(right_any(low, want).double().mean()) < 0.2


@pytest.mark.parametrize("dtype", FP8)
def test_saturation(dtype: torch.dtype) -> None:
    top = largest(dtype)
    truth = torch.tensor([top, 1e4 * top, torch.inf, -torch.inf, torch.nan], dtype=torch.float64).clamp(-top, top)
    good = torch.tensor([top, top, top, -top, torch.nan]).to(dtype)
    assert bool(right_any(good, wanted(truth, 0.0)).all())
    bad = torch.tensor([0.0, 0.0, torch.nan, top, top]).to(dtype)
    assert not bool(right_any(bad, wanted(truth, 0.0)).any())


def test_nan_and_infinity_are_values_like_any_other() -> None:
    truth = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0], dtype=torch.float64)
    for wrong in (0.0, 1e30, -1.0):
        got = torch.full((4,), wrong)
        assert not bool(right_any(got, wanted(truth, 1e-7))[:3].any())
    assert bool(right_any(truth.float(), wanted(truth, 1e-7)).all())
    assert not bool(right_any(torch.full((4,), torch.nan), wanted(truth, 1e-7))[1:].any())


def test_the_overflow_threshold() -> None:
    """Above the largest fp16 plus half its ulp only infinity is right; below only the largest."""
    for truth, right in ((65519.0, 65504.0), (65520.0, torch.inf), (65536.0, torch.inf)):
        value = torch.tensor([truth], dtype=torch.float64)
        assert bool(right_any(torch.tensor([right]).half(), wanted(value, 0.0)))
        other = 65504.0 if right == torch.inf else torch.inf
        assert not bool(right_any(torch.tensor([other]).half(), wanted(value, 0.0)))


def test_subnormals_are_not_flushed() -> None:
    tiny = torch.tensor([2.0**-24, 3 * 2.0**-24], dtype=torch.float64)
    assert bool(right_any(tiny.half(), wanted(tiny, 0.0)).all())
    assert not bool(right_any(torch.zeros(2).half(), wanted(tiny, 0.0)).any())


def test_one_of_several_candidates_element_by_element() -> None:
    a, b = torch.tensor([1, 2]), torch.tensor([3, 4])
    want = Want(torch.ones(2, dtype=torch.bool), (Candidate(a), Candidate(b)))
    assert bool(right_any(torch.tensor([1, 4]), want).all())
    assert right_any(torch.tensor([1, 5]), want).tolist() == [True, False]


def test_unnamed_elements_are_never_wrong_here() -> None:
    want = Want(torch.tensor([True, False]), (Candidate(torch.tensor([1, 1])),))
    assert right_any(torch.tensor([1, 9]), want).tolist() == [True, True]


def test_bits_are_compared_as_bits() -> None:
    zero, minus = torch.tensor([0.0]), torch.tensor([-0.0])
    assert not bool(same_bits(zero, minus))
    nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert bool(same_bits(nan, nan.clone()))
    assert not bool(same_bits(nan, torch.tensor([torch.nan])))
    with pytest.raises(TypeError, match="comparing the bits"):
        same_bits(zero, zero.double())


@pytest.mark.parametrize("dtype", FLOATS)
def test_headroom_is_the_error_over_the_bound(dtype: torch.dtype) -> None:
    # float32's own values: torch rounds float64 to fp16 by way of float32, so twice.
    x = (torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float32) + 0.5).double()
    got = x.to(dtype)
    assert headroom(got, wanted(x, 0.0)) <= 1.0
    # A whole ulp off, in a binade of known spacing: twice the bound.
    one = torch.tensor([1.5], dtype=torch.float64)
    off = (one + 2 * half_ulp(one, dtype)).to(dtype)
    assert headroom(off, wanted(one, 0.0)) == pytest.approx(2.0)
