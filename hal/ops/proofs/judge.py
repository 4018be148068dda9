"""What a result may be, and whether it is: the bound of the conformance suite, in one place.

A float result is right where it lies between the correctly rounded ``value - slack`` and the
correctly rounded ``value + slack``, `value` being the float64 truth. Rounding is monotone, so that
is "within half an ulp of the output dtype, plus slack" without having to say what an ulp is next to
a power of two, a subnormal or the overflow threshold. No slack: the one correctly rounded number.

The slack for RoPE is 8 * 2^-24 * sum|terms|: fp32 products, their sum with or without contraction,
and a division by a scale within 2 ulp. That for attention is `attention_slack`. Nothing outside this
file may widen them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hal import _host
from hal.ops._torch import BITS
from hal.ops.spec import FP8

ROPE_SLACK = 8 * 2.0**-24


def norm_rope_slack(head_dim: int) -> float:
    """The slack of RMSNorm, then RoPE, relative to sum|terms|, with an fp32 sum of squares in any order.

    A sum of head_dim positive products is within head_dim steps of 2^-24, of which the square root leaves half; then
    the reciprocal root within 2 ulp, two products, and RoPE's own.
    """
    return ROPE_SLACK + (head_dim / 2 + 8) * 2.0**-24


ATTENTION_STEP = 2.0**-23
"""What one step of fp32 arithmetic may add to attention, relative."""
ATTENTION_SPLIT = 512
"""Keys that the parts of a split reduction have at least; each part merged is one step more."""


@dataclass(frozen=True)
class Candidate:
    """One thing that an element may be.

    Args:
        value: float64, or, where `slack` is None, the result's own dtype.
        slack: float64, absolute; None: bit for bit.
    """

    value: Tensor
    slack: Tensor | None = None


@dataclass(frozen=True)
class Want:
    """What one result must be.

    Args:
        named: bool, the result's shape: the elements that the contract names. All others must stay
            bytewise as they were.
        candidates: a named element must be right by one of them (several: equal slots in one call).
        dtype: of a new tensor that is returned, where its candidates are float64; None: that of the candidates.
        fields: for an argument that is a `KVPool`: ``"k"``, ``"v"`` -> `Want` of each layer-stacked half.
        free: a workspace: its named elements may be anything after the call.
    """

    named: Tensor
    candidates: tuple[Candidate, ...] = ()
    fields: dict[str, Want] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    free: bool = False


def exactly(values: Tensor | list[int], dtype: torch.dtype) -> Want:
    """Every element, bit for bit."""
    value = values if isinstance(values, Tensor) else _host.tensor(values, dtype=dtype)
    return Want(torch.ones_like(value, dtype=torch.bool), (Candidate(value),))


def largest(dtype: torch.dtype) -> float:
    """The largest finite number of a float dtype."""
    return float(torch.finfo(dtype).max)


def attention_slack(
    dtype: torch.dtype, head_dim: int, logit: Tensor, keys: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The slack of attention's output and of its log-sum-exp: ``u sum p|v| + e sum p|v|`` and ``e``.

    ``e = 2^-23 (head_dim * logit + splits + 8)``: a logit is a sum of head_dim fp32 products, and an error in it is
    a relative error of its weight; then the merging of splits, the exponential, the sums and the division. ``u`` is
    for weights that are rounded to the queries' dtype before they meet the values; the sum of weights is not.

    Args:
        dtype: the queries'. head_dim: of queries and keys.
        logit: float64, ``scale * max_j sum_d |q_d k_jd|``.
        keys: how many keys a query sees; shape like `logit`.
        weight: float64, ``sum_j p_j |v_j|``, like `logit` with the values' dim behind.
    """
    u = 0.0 if dtype == torch.float32 else float(torch.finfo(dtype).eps) / 2
    splits = torch.ceil(keys.to(torch.float64) / ATTENTION_SPLIT)
    relative = ATTENTION_STEP * (head_dim * logit + splits + 8)
    return (u + relative).unsqueeze(-1) * weight, relative


def to_odd_fp32(x: Tensor) -> Tensor:
    """float64 -> float32, rounded to odd, so that a second rounding to fewer bits is a correct one."""
    y = x.to(torch.float32)
    back = y.to(torch.float64)
    even = (y.view(torch.int32) & 1) == 0
    inexact = torch.isfinite(x) & (back != x) & even
    toward = torch.where(back < x, torch.inf, -torch.inf).to(torch.float32)
    return torch.where(inexact, torch.nextafter(y, toward), y)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 -> `dtype`, to nearest even, once. The fp8 dtypes saturate; NaN stays NaN."""
    if dtype == torch.float64:
        return x
    if dtype == torch.float32:
        return x.to(dtype)
    if dtype in FP8:
        return to_odd_fp32(x.clamp(-largest(dtype), largest(dtype))).to(dtype)
    return to_odd_fp32(x).to(dtype)


def right(out: Tensor, candidate: Candidate) -> Tensor:
    """bool per element: is `out` what `candidate` allows?"""
    if candidate.slack is None:
        return same_bits(out, candidate.value)
    low = rounded(candidate.value - candidate.slack, out.dtype).to(torch.float64)
    high = rounded(candidate.value + candidate.slack, out.dtype).to(torch.float64)
    got = out.to(torch.float32).to(torch.float64) if out.dtype != torch.float64 else out
    inside = (got >= low) & (got <= high)
    # inf - inf: the truth is an infinity that any slack around it leaves as it is.
    inside |= torch.isinf(candidate.value) & (got == rounded(candidate.value, out.dtype).to(torch.float64))
    return inside | (torch.isnan(got) & torch.isnan(candidate.value))


def right_any(out: Tensor, want: Want) -> Tensor:
    """bool per element: right by one candidate, or not named."""
    if want.free:
        return torch.ones_like(want.named)
    ok = ~want.named
    for candidate in want.candidates:
        ok = ok | right(out, candidate)
    return ok


def headroom(out: Tensor, want: Want) -> float:
    """The largest error in units of the bound; 0 for exact results.

    The bound is slack, plus half an ulp there where the slack ends, as `right` rounds the end and not the truth.
    """
    worst = 0.0
    floats = [c for c in want.candidates if c.slack is not None]
    if not floats or not bool(want.named.any()):
        return worst
    got = out.to(torch.float32).to(torch.float64) if out.dtype != torch.float64 else out
    best = _host.full(out.shape, torch.inf, dtype=torch.float64)
    for c in floats:
        assert c.slack is not None
        value = c.value.clamp(-largest(out.dtype), largest(out.dtype)) if out.dtype in FP8 else c.value
        error = got - value
        ratio = error.abs() / (half_ulp(value + error.sign() * c.slack, out.dtype) + c.slack)
        usable = torch.isfinite(value) & torch.isfinite(got)
        best = torch.minimum(best, torch.where(usable, ratio, torch.zeros_like(ratio)))
    return float(best[want.named].max())


def half_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the spacing of `dtype` at float64 `x`."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.abs().clamp(min=float(info.smallest_normal)))
    return torch.ldexp(torch.full_like(x, float(info.eps) / 2), exponent - 1)


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """bool per element: the same bits (any NaN equals only the same NaN, -0 is not 0)."""
    if a.dtype != b.dtype:
        raise TypeError(f"comparing the bits of {a.dtype} with {b.dtype}")
    ints = BITS[a.dtype.itemsize]
    return a.contiguous().view(ints) == b.contiguous().view(ints)
