"""Index tensors of either width, by one compiled kernel: a pointer ``u8`` beside a bool that says int64."""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba.extending import intrinsic
from torch import Tensor

from hal.backends.cpu import _vector as vec
from hal.backends.cpu._bits import cast, load, store, types
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


@intrinsic  # type: ignore[untyped-decorator]
def _counts(typingctx: Any, p: Any, i: Any) -> Any:
    """Whether the 16 elements from the i-th are each one more than the last."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x = vec.raw(b, args[0], p.kind, args[1])
        lane = x.type.element
        up = b.add(vec.shuffle(b, x, x, [0] * vec.LANES), ir.Constant(x.type, [lane(j) for j in range(vec.LANES)]))
        odd = b.bitcast(b.icmp_signed("!=", x, up), ir.IntType(vec.LANES))
        return b.icmp_signed("==", odd, odd.type(0))

    return types.boolean(p, types.int64), codegen


@inline
def in_a_row(p, wide, i):  # type: ignore[no-untyped-def]
    """Whether 16 index elements from the i-th are each one more than the last."""
    if get(p, wide, i + 1) != get(p, wide, i) + 1:
        return False
    if wide:
        return _counts(cast(p, "i64"), i)
    return _counts(cast(p, "i32"), i)


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
