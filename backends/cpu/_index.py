"""Index tensors of either width, by one compiled kernel: a pointer ``u8`` beside a bool that says int64."""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.cpu._bits import cast, load, store
from hal.backends.cpu._jit import inline

LONGEST = 2**31 - 1
"""A request is no longer than this, so that no sum of lengths can wrap."""


def index(t: Tensor | None) -> tuple[int, bool]:
    """The two arguments that a kernel takes for an index tensor; null for None."""
    return (0, False) if t is None else (t.data_ptr(), t.dtype is torch.int64)


@inline
def get(p, wide, i):  # type: ignore[no-untyped-def]
    if wide:
        return load(cast(p, "i64"), i)
    return load(cast(p, "i32"), i)


@inline
def put(p, wide, i, x):  # type: ignore[no-untyped-def]
    if wide:
        store(cast(p, "i64"), i, x)
    else:
        store(cast(p, "i32"), i, x)


@inline
def length(start, end, most):  # type: ignore[no-untyped-def]
    """``max(end - start, 0)``, at most `most`, 0 or more: of any two int64. The one way in which kernels subtract them.

    numba says of every sum and difference of int64 that it can't wrap, so LLVM may drop a test for one that did: here
    none does. ``start + most`` stops at the largest int64, beyond which no end lies.
    """
    reach = min(start, 0x7FFFFFFFFFFFFFFF - most) + most
    return max(min(end, reach), start) - start


@inline
def slot_of(page, at, page_size, wide):  # type: ignore[no-untyped-def]
    """The slot `at` places into `page`, or -1 where int32 (`wide`: int64) can't hold all slots of the page."""
    top = 0x7FFFFFFFFFFFFFFF if wide else 0x7FFFFFFF
    if page < 0 or page > (top - page_size + 1) // page_size:
        return -1
    return page * page_size + at
