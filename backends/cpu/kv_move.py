"""kv_move on the CPU: rows of slots to the workspace, then from there to other slots, some layers at a time.

A row is one (layer, pair), in page_head one head of it; row r of a batch lies at r times its bytes in the workspace.
Invariant: all rows of a batch have been read before the second pass writes the first of them, and no row belongs to
two batches.
"""

from __future__ import annotations

from array import array

from torch import Tensor

from hal._errors import ArgumentError
from hal.backends.cpu._bits import load, move, view
from hal.backends.cpu._call import need_cpu
from hal.backends.cpu._index import get, index
from hal.backends.cpu._jit import Kernel
from hal.backends.cpu._pool import run
from hal.backends.cpu._team import take
from hal.kv.pool import KVPool


def _kernel(  # type: ignore[no-untyped-def]
    counter, grain, n, src_slots, src_64, dst_slots, dst_64, num_slots, page, page_stride, token_stride,
    bases, layers, chunks, chunk_stride, size, workspace, back,
):  # fmt: skip
    begin = take(counter, grain) if grain else 0
    while begin < n:
        for i in range(begin, min(begin + grain, n) if grain else n):
            s, d = get(src_slots, src_64, i), get(dst_slots, dst_64, i)
            if s < 0 or s >= num_slots or d < 0 or d >= num_slots:
                continue
            slot = d if back else s
            at = slot // page * page_stride + slot % page * token_stride
            for m in range(layers):
                for h in range(chunks):
                    row = view(load(bases, m) + at + h * chunk_stride, "u8")
                    kept = view(workspace + ((m * n + i) * chunks + h) * size, "u8")
                    if back:
                        move(row, kept, size)
                    else:
                        move(kept, row, size)
        begin = take(counter, grain) if grain else n


kernel = Kernel(_kernel, "i64 int int u8 bool u8 bool int int int int i64 int int int int int bool", shared=True)


def kv_move(
    pool: KVPool, src_slots: Tensor, dst_slots: Tensor, workspace: Tensor, *, layers: range | None = None
) -> None:
    need_cpu("kv_move", src_slots, dst_slots, workspace)
    if pool.device.type != "cpu":
        raise ArgumentError("kv_move", "backend", "a host pool, for backend 'cpu'", repr(pool))
    n = src_slots.shape[0]
    todo = range(pool.num_layers) if layers is None else layers
    slots = (*index(src_slots), *index(dst_slots), pool.num_slots, pool.page_size)
    for p in pool.planes():
        room = workspace.shape[0] // max(1, n * p.row_bytes)
        for first in range(todo.start, todo.stop if n * p.row_bytes else todo.start, max(1, room)):
            bases = array("q", p.bases[first : min(first + room, todo.stop)])
            for back in (False, True):
                run(
                    kernel,
                    (),
                    n,
                    2 * len(bases) * p.row_bytes,
                    (
                        *slots,
                        p.page_stride,
                        p.token_stride,
                        bases.buffer_info()[0],
                        len(bases),
                        p.chunks,
                        p.chunk_stride,
                        p.chunk_bytes,
                        workspace.data_ptr(),
                        back,
                    ),
                )
