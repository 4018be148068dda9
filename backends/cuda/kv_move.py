# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated"
# A kernel is typed by its arguments at run time.
"""kv_move: rows of slots to the workspace, then from there to other slots, some layers at a time.

A row is one (half, layer, pair), in page_head one head of it; row r of a batch lies at r times its bytes in the
workspace. Invariant: the second launch of a batch starts when the first is done, so every row has been read before
any is written, and no row belongs to two batches.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal._errors import ArgumentError, HalError
from hal.backends.cuda._cache import Plans
from hal.backends.cuda._copy import Tables, _strides
from hal.backends.cuda._device import multiprocessors, next_power_of_2, pdl
from hal.kv.pool import KVPool, Plane
from hal.triton import launch

# Unlike kv_transfer's, these rows never cross a bus that few programs saturate: small tiles, many programs.
TILE_BYTES = 8192
WARPS = 8
PROGRAMS = 64
"""A multiprocessor's, at most."""


@launch.jit(
    do_not_specialize="""
    src_slots dst_slots bases workspace n rows unit first count layers size page_stride token_stride
    chunk_stride
    """.split()
)
def move_rows_kernel(
    src_slots, dst_slots, bases, workspace,
    n: tl.int64, rows: tl.int64, unit: tl.int64, first: tl.int64, count: tl.int64, layers: tl.int64, size: tl.int64,
    page_stride: tl.int64, token_stride: tl.int64, chunk_stride: tl.int64,
    PAGE: tl.constexpr, CHUNKS: tl.constexpr, BYTES: tl.constexpr, WORDS: tl.constexpr, WORD: tl.constexpr,
    ALIGN: tl.constexpr, BACK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    w = tl.arange(0, next_power_of_2(WORDS))[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        r = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        there = r < rows
        chunk, pair, u = r % CHUNKS, r // CHUNKS % n, unit + r // CHUNKS // n
        s = tl.load(src_slots + pair, there, other=-1).to(tl.int64)
        d = tl.load(dst_slots + pair, there, other=-1).to(tl.int64)
        there = there & (s >= 0) & (s < size) & (d >= 0) & (d < size)
        slot = tl.where(there, d if BACK else s, 0)
        a = tl.load(bases + u // count * layers + first + u % count, there, other=0)
        a += slot // PAGE * page_stride + slot % PAGE * token_stride + chunk * chunk_stride
        row = tl.multiple_of(a.to(tl.pointer_type(WORD))[:, None], [ALIGN, ALIGN]) + w
        held = (workspace + r * BYTES).to(tl.pointer_type(WORD))
        kept = tl.multiple_of(held[:, None], [ALIGN, ALIGN]) + w
        mask = there[:, None] & (w < WORDS)
        if BACK:
            tl.store(row, tl.load(kept, mask), mask)
        else:
            tl.store(kept, tl.load(row, mask), mask)


class _Group:
    """Halves (k and v) that one launch moves: everything but the slots, decided once."""

    def __init__(self, planes: tuple[Plane, ...], page: int, align: int, device: torch.device) -> None:
        p = planes[0]
        seamless = p.page_stride == page * p.token_stride
        self.halves, self.chunks, self.row_bytes = len(planes), p.chunks, p.row_bytes
        self.strides = (p.token_stride if seamless else p.page_stride, p.token_stride, p.chunk_stride)
        for number in (p.chunk_bytes, *self.strides, *(base for q in planes for base in q.bases)):
            align = min(align, number & -number) if number else align
        word = min(align, 8)
        words = p.chunk_bytes // word
        self.rows = max(1, min(64, TILE_BYTES // (next_power_of_2(words) * word)))
        self.tables = Tables(device, [base for q in planes for base in q.bases])
        (self.bases,) = self.tables.tensors
        on = pdl(device.index if device.index is not None else -1)
        self.there, self.back = (
            move_rows_kernel.bind(
                PAGE=1 if seamless else page,
                CHUNKS=p.chunks,
                BYTES=p.chunk_bytes,
                WORDS=words,
                WORD={8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[word],
                ALIGN=align,
                BACK=back,
                ROWS=self.rows,
                PDL=on,
                num_warps=WARPS,
                launch_pdl=on,
            )
            for back in (False, True)
        )


_plans: Plans[list[_Group]] = Plans(256)
_in_graphs: list[list[_Group]] = []
"""A graph that is replayed reads the plan's tables: those must outlive the cache."""


def _plan(pool: KVPool, align: int) -> list[_Group]:
    """Kept by the identity of the pool's planes, for as long as they live."""
    planes = pool.planes()
    key = (id(planes[0]), pool.page_size, align, pool.device)
    found = _plans.get(key)
    capturing = pool.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if found is None:
        if capturing:
            raise HalError(
                "hal: kv_move: the first move within a pool can't be captured in a graph; run it once before"
            )
        alike = len(planes) == 1 or _strides(planes[0]) == _strides(planes[1])
        groups = [planes] if alike else [(p,) for p in planes]
        made = [_Group(g, pool.page_size, align, pool.device) for g in groups if g[0].row_bytes]
        found = _plans.hold(key, made, planes[0])
    if capturing and not any(found is kept for kept in _in_graphs):
        _in_graphs.append(found)
    return found


def kv_move(
    pool: KVPool, src_slots: Tensor, dst_slots: Tensor, workspace: Tensor, *, layers: range | None = None
) -> None:
    n, first = src_slots.shape[0], 0 if layers is None else layers.start
    count = pool.num_layers if layers is None else len(layers)
    if not n or not count or not pool.num_slots:
        return
    at, device = workspace.data_ptr(), pool.device
    most = PROGRAMS * multiprocessors(device.index if device.type == "cuda" else -1)
    for g in _plan(pool, min(16, at & -at) if at else 16):
        g.tables.use()
        room = workspace.shape[0] // (n * g.row_bytes)
        if not room:
            raise ArgumentError(
                "kv_move", "workspace", f"at least {n * g.row_bytes} bytes", f"{workspace.shape[0]} bytes"
            )
        for unit in range(0, g.halves * count, room):
            rows = n * min(room, g.halves * count - unit) * g.chunks
            grid = (min(-(-rows // g.rows), most), 1, 1)
            for start in (g.there, g.back):
                start.start(
                    grid,
                    src_slots,
                    dst_slots,
                    g.bases,
                    workspace,
                    n,
                    rows,
                    unit,
                    first,
                    count,
                    pool.num_layers,
                    pool.num_slots,
                    *g.strides,
                )
