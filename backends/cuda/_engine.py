"""Transfers by the copy engine: runs of rows in one batched call, staged on the device where that is longer.

cudaMemcpyBatchAsync can't be captured and refuses the legacy default stream, so copies go to a side
stream, with events both ways. The driver's entry is looked up, not assumed (12.8 and later have it);
without it, one copy a run.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from hal._errors import BackendError
from hal.kvpool import KVPool
from hal.launch import lane

Runs = tuple[Any, Any, Any]
"""(dst address, src address, bytes) as three uint64 arrays."""


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


def batched() -> bool:
    """Whether this driver copies many runs in one call. For `hal info`."""
    return _driver()[1] is not None


def copy(runs: Runs, stream: int) -> None:
    """Start the copies of `runs` on `stream` (not the legacy default one)."""
    to, frm, size = runs
    if lane() != "device":
        for t, f, n in zip(to.tolist(), frm.tolist(), size.tolist(), strict=True):
            ctypes.memmove(t, f, n)
        return
    one, batch = _driver()
    if batch is None or len(to) <= 4:
        for t, f, n in zip(to.tolist(), frm.tolist(), size.tolist(), strict=True):
            _ok(one(t, f, n, stream), "cuMemcpyAsync")
        return
    attributes, index, fail = _Attributes(src_access_order=1), ctypes.c_size_t(0), ctypes.c_size_t(0)
    _ok(
        batch(
            to.ctypes.data, frm.ctypes.data, size.ctypes.data, len(to), ctypes.addressof(attributes),
            ctypes.addressof(index), 1, ctypes.addressof(fail), stream,
        ),
        "cuMemcpyBatchAsync",
    )  # fmt: skip


def _ok(code: int, what: str) -> None:
    if code:
        raise BackendError(f"hal: cuda: kv_transfer: {what} returned CUDA error {code}")


def addresses(src: KVPool, dst: KVPool, s: Any, d: Any, layers: range) -> Runs:
    """Every contiguous piece to copy, in an order in which those that belong together follow each other."""
    parts = []
    for a, b in zip(src.planes(), dst.planes(), strict=True):
        chunks, size = max((a.chunks, a.chunk_bytes), (b.chunks, b.chunk_bytes))
        sides = []
        for p, slots, page in ((b, d, dst.page_size), (a, s, src.page_size)):
            stride = p.chunk_stride if p.chunks == chunks else size
            token = slots // page * p.page_stride + slots % page * p.token_stride
            bases = np.array([p.bases[i] for i in layers], dtype=np.uint64).astype(np.int64)
            sides.append((_axis(bases), _axis(np.arange(chunks, dtype=np.int64) * stride), _axis(token), p))
        near = sides[0][3] if dst.device.type == "cpu" else sides[1][3]
        steps = {"layer": abs(near.bases[1] - near.bases[0]) if len(near.bases) > 1 else 0, "token": near.token_stride,
                 "chunk": near.chunk_stride if near.chunks > 1 else size}  # fmt: skip
        order = sorted(("layer", "chunk", "token"), key=lambda k: -steps[k])
        out = []
        for layer, chunk, token, _ in sides:
            axes = {"layer": layer, "chunk": chunk, "token": token}
            grid = (
                axes[order[0]][:, None, None] + axes[order[1]][None, :, None] + axes[order[2]][None, None, :]
            )
            out.append(grid.reshape(-1).astype(np.uint64))
        parts.append((out[0], out[1], np.full(len(out[0]), size, dtype=np.uint64)))
    to, frm, size_of = (np.concatenate([p[i] for p in parts]) for i in range(3))
    return to, frm, size_of


def _axis(x: Any) -> Any:
    return np.ascontiguousarray(x)


def merged(runs: Runs) -> Runs:
    """Neighbours that are consecutive on both sides, as one."""
    to, frm, size = runs
    keep = size > 0
    to, frm, size = to[keep], frm[keep], size[keep]
    if not len(to):
        return to, frm, size
    new = np.ones(len(to), dtype=bool)
    new[1:] = (to[1:] != to[:-1] + size[:-1]) | (frm[1:] != frm[:-1] + size[:-1])
    first = np.flatnonzero(new)
    total = np.add.reduceat(size, first)
    return to[first], frm[first], total
