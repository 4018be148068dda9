"""Transfers by the copy engine: runs of rows in one batched call, staged on the device where that is longer.

cudaMemcpyBatchAsync can't be captured and refuses the legacy default stream, so copies go to a side
stream, with events both ways. The driver's entry is looked up, not assumed (12.8 and later have it);
without it, one copy a run.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from hal._errors import BackendError
from hal.kv.plan import Copies
from hal.triton.launch import lane


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("src_access_order", ctypes.c_int),
        ("src_location", ctypes.c_int * 2),
        ("dst_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


@cache
def _driver() -> tuple[Any, Any]:
    cuda = ctypes.CDLL("libcuda.so.1")
    one = cuda.cuMemcpyAsync
    one.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    batch = getattr(cuda, "cuMemcpyBatchAsync", None)
    if batch is not None:
        p = ctypes.c_void_p
        batch.argtypes = [p, p, p, ctypes.c_size_t, p, p, ctypes.c_size_t, p, p]
    return one, batch


def can_batch() -> bool:
    """Whether this driver copies many runs in one call. For `hal info`."""
    return _driver()[1] is not None


def copy(copies: Copies, stream: int) -> None:
    """Start `copies` on `stream` (not the legacy default one)."""
    to, frm, size = copies.dst, copies.src, copies.sizes
    batch = _driver()[1] if lane() == "device" else None
    if batch is None or len(to) <= 4:
        for t, f, n in zip(to.tolist(), frm.tolist(), size.tolist(), strict=True):
            one(t, f, n, stream)
        return
    attributes, index, fail = _Attributes(src_access_order=1), ctypes.c_size_t(0), ctypes.c_size_t(0)
    _ok(
        batch(
            to.data_ptr(),
            frm.data_ptr(),
            size.data_ptr(),
            len(to),
            ctypes.addressof(attributes),
            ctypes.addressof(index),
            1,
            ctypes.addressof(fail),
            stream,
        ),
        "cuMemcpyBatchAsync",
    )


def one(to: int, frm: int, size: int, stream: int) -> None:
    """Start one copy of `size` bytes."""
    if lane() == "device":
        _ok(_driver()[0](to, frm, size, stream), "cuMemcpyAsync")
    else:
        ctypes.memmove(to, frm, size)


def _ok(code: int, what: str) -> None:
    if code:
        raise BackendError(f"hal: cuda: kv_transfer: {what} returned CUDA error {code}")
