"""What a tensor must be before its address may go to a kernel: plain memory, no element twice, outside of autograd."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

LARGEST = float(torch.finfo(torch.float64).max)


def flaw(t: Tensor) -> str | None:
    """Why the values of `t` are not those at its address; None: they are."""
    kind = type(t).__name__
    if t.is_nested or t.layout is not torch.strided:
        return f"a {kind} of layout {'nested' if t.is_nested else str(t.layout).removeprefix('torch.')}"
    try:
        with warnings.catch_warnings():
            # A FakeTensor has an address of 0, and says on the way that it will raise one day.
            warnings.simplefilter("ignore")
            nowhere = not t.data_ptr() and t.numel() > 0
    except (RuntimeError, ValueError):
        nowhere = True
    if nowhere:
        return f"a {kind} on {t.device} without memory of its own (fake, meta, functional, batched, a wrapper, ...)"
    if t.is_neg():
        return "a tensor whose negative bit is set: resolve_neg() makes a plain one"
    if t.is_conj():
        return "a tensor whose conjugate bit is set: resolve_conj() makes a plain one"
    return None


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may lie in one place: no, where the strides nest, each dim beyond the smaller ones' extent.

    Whether strides that don't nest meet is a hard problem, so all of those do.
    """
    extent = 0
    for n, step in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1:
            if step <= extent:
                break
            extent += (n - 1) * step
    else:
        return False
    # Not in order: from the smallest stride up.
    extent = 0
    for step, n in sorted(d for d in zip(strides, shape, strict=True) if d[1] != 1):
        if step <= extent:
            return 0 not in shape
        extent += (n - 1) * step
    return False


def tracked(t: Tensor) -> str | None:
    """What of `t` autograd would lose, since no op has a derivative; None: nothing."""
    if t.requires_grad and torch.is_grad_enabled():
        return "a tensor that requires grad, with grad mode on"
    # no_grad does not end forward mode.
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:  # type: ignore[no-untyped-call]
        return "a tensor that carries a tangent (forward-mode AD)"
    return None


def finite(value: object) -> bool:
    """An int or a float (no bool) that is a finite float64."""
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
        return -LARGEST <= value <= LARGEST
    return False


def show(value: object) -> str:
    """A value for an error text. Python refuses to write ints of thousands of digits."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return f"an int of {value.bit_length()} bits"
    return repr(value)
