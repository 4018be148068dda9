"""What the references share: gathers and scatters that are safe on any index and never sync; exact first calls."""

from __future__ import annotations

import torch
from torch import Tensor

from hal import _host
from hal.kv.view import count_slots

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Of an element's bytes: the dtype that holds its bits, for what is moved or compared bit for bit."""

SETTLED = ("cos", "sin", "exp", "log", "log2", "tanh", "sqrt", "rsqrt")
"""Every elementwise function of torch's that references, oracles, samples and the demo's engine call."""


def settle() -> None:
    """Calls each of `SETTLED` once on one element, so that no first call is made by several threads.

    oneMKL 2024, which torch's CPU wheels contain, chooses the kernel of a vector function in its first call. Where
    that comes from two threads at once, one of them computes its half of that one tensor with half the digits
    (https://github.com/pytorch/pytorch/issues/188792): in 1 of 1500 fresh processes, cos was off by 1.5e-4.
    """
    for dtype in (torch.float32, torch.float64):
        one = _host.ones(1, dtype=dtype)
        for name in SETTLED:
            getattr(one, name)()


settle()


def in_range(index: Tensor, size: int) -> Tensor:
    """bool: 0 <= index < size."""
    return (index >= 0) & (index < size)


def store_rows(target: Tensor, slots: Tensor, valid: Tensor, rows: Tensor) -> None:
    """``target[slots[i]] = rows[i]`` where ``valid[i]``, bit for bit, without reading a value on the host.

    A boolean mask would sync. Instead an invalid row repeats the store of the first valid one, and
    where none is valid, row 0 is stored onto itself.

    Args:
        target: ``[S, *row]``, or ``[P, page_size, *row]``; any strides.
        slots: ``[n]`` int. valid: ``[n]`` bool. rows: ``[n, *row]``, target's dtype.
    """
    paged, size = target.ndim == rows.ndim + 1, count_slots(target, rows.ndim - 1)
    n = slots.shape[0]
    if n == 0 or size == 0:
        return
    first = valid.to(torch.int8).argmax().view(1)
    pick = torch.where(valid, torch.arange(n, device=slots.device, dtype=torch.int64), first)
    some = valid.any()
    index = torch.where(some, slots.to(torch.int64)[pick], 0)
    bits = BITS.get(target.dtype.itemsize)
    if bits is not None:  # fp8 has no index kernels everywhere, and bits are what is moved
        target, rows = target.view(bits), rows.view(bits)
    where = (index // target.shape[1], index % target.shape[1]) if paged else (index,)
    zero = torch.zeros(1, dtype=torch.int64, device=slots.device)
    own = target[zero, zero] if paged else target[zero]
    target.index_put_(where, torch.where(some, rows[pick], own))


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 -> fp8 with +-Inf -> +-max and NaN -> NaN (torch's own cast gives Inf for e5m2)."""
    top = torch.finfo(dtype).max
    return x.clamp(-top, top).to(dtype)
