"""kv_transfer on the CPU: copies the rows of slot pairs between two host pools, in the largest pieces they allow.

A run of pairs that are consecutive on both sides is a block of three dims, tokens x layers x pieces of a row, each
with a byte stride on either side (`hal.kv.pool.Plane`). Invariant: a dim whose stride is, on both sides, the
number of bytes that lie within it merges into one longer copy; what can't merge is looped over.
All four layouts, and any pair of them, are that one loop.
"""

from __future__ import annotations

from array import array

from torch import Tensor, int64

from hal._errors import ArgumentError
from hal.backends.cpu._bits import LINE, cast, fence, load, move, stream_line, view
from hal.backends.cpu._call import need_cpu
from hal.backends.cpu._jit import Kernel, inline
from hal.backends.cpu._pool import run
from hal.backends.cpu._team import take as next_turn
from hal.kv.pool import KVPool, Plane


@inline
def _slot(slots, slots_64, i):  # type: ignore[no-untyped-def]
    return load(cast(slots, "i64"), i) if slots_64 else load(cast(slots, "i32"), i)


NEAR = 1 << 18
"""Bytes of a pass that are read, and as many that are written: together a quarter of a common L2 cache."""

STREAM = 1 << 22
"""Bytes from which a transfer writes past the caches, which saves reading what it is to overwrite."""


@inline
def _copy(dst, src, size, streamed):  # type: ignore[no-untyped-def]
    if streamed:
        for i in range(size // LINE):
            stream_line(view(dst + i * LINE, "u8"), view(src + i * LINE, "u8"))
    else:
        move(view(dst, "u8"), view(src, "u8"), size)


@inline
def _pieces(  # type: ignore[no-untyped-def]
    src, dst, tokens, s_token, d_token, layers, s_layer, d_layer, pieces, s_piece, d_piece, size, streamed
):
    """In the order of reading, but that a row which is whole on one side is finished before the next."""
    outer, inner = (layers, tokens) if s_token < s_layer else (tokens, layers)
    s_outer, s_inner = (s_layer, s_token) if s_token < s_layer else (s_token, s_layer)
    d_outer, d_inner = (d_layer, d_token) if s_token < s_layer else (d_token, d_layer)
    whole = s_piece < min(s_token, s_layer) or d_piece < min(d_token, d_layer)
    first, last = (1, pieces) if whole else (pieces, 1)
    for g in range(first):
        for i in range(outer):
            for j in range(inner):
                for h in range(last):
                    _copy(
                        dst + i * d_outer + j * d_inner + (g + h) * d_piece,
                        src + i * s_outer + j * s_inner + (g + h) * s_piece,
                        size,
                        streamed,
                    )


@inline
def _block(  # type: ignore[no-untyped-def]
    src, dst, tokens, s_token, d_token, layers, s_layer, d_layer, pieces, s_piece, d_piece, size, streamed
):
    for _ in range(3):  # each pass may make the next dim mergeable
        if s_piece == size and d_piece == size:
            size, pieces, s_piece = size * pieces, 1, -1
        if s_layer == size and d_layer == size:
            size, layers, s_layer = size * layers, 1, -1
        if s_token == size and d_token == size:
            size, tokens, s_token = size * tokens, 1, -1
    # Rows in pieces are read or written in several passes: over no more tokens than the L2 cache holds.
    step = max(1, NEAR // (layers * pieces * size)) if pieces > 1 else tokens
    for first in range(0, tokens, step):
        _pieces(
            src + first * s_token,
            dst + first * d_token,
            min(step, tokens - first),
            s_token,
            d_token,
            layers,
            s_layer,
            d_layer,
            pieces,
            s_piece,
            d_piece,
            size,
            streamed,
        )


def _kernel(  # type: ignore[no-untyped-def]
    counter, grain, n, src_slots, src_64, dst_slots, dst_64, layers, uniform, pieces, size, streamed,
    src_bases, s_slots, s_page, s_page_stride, s_token, s_layer, s_piece,
    dst_bases, d_slots, d_page, d_page_stride, d_token, d_layer, d_piece,
):  # fmt: skip
    s_linear = s_page_stride == s_page * s_token
    d_linear = d_page_stride == d_page * d_token
    begin = next_turn(counter, grain) if grain else 0
    while begin < n:
        end = min(begin + grain, n) if grain else n
        i = begin
        while i < end:
            s, d = _slot(src_slots, src_64, i), _slot(dst_slots, dst_64, i)
            i += 1
            if s < 0 or s >= s_slots or d < 0 or d >= d_slots:
                continue
            tokens = 1
            while i < end:
                s_next, d_next = s + tokens, d + tokens
                if _slot(src_slots, src_64, i) != s_next or _slot(dst_slots, dst_64, i) != d_next:
                    break
                if s_next >= s_slots or d_next >= d_slots:
                    break
                if not ((s_linear or s_next % s_page) and (d_linear or d_next % d_page)):
                    break
                tokens += 1
                i += 1
            s_at = s // s_page * s_page_stride + s % s_page * s_token
            d_at = d // d_page * d_page_stride + d % d_page * d_token
            for m in range(1 if uniform else layers):
                _block(
                    load(src_bases, m) + s_at,
                    load(dst_bases, m) + d_at,
                    tokens,
                    s_token,
                    d_token,
                    layers if uniform else 1,
                    s_layer,
                    d_layer,
                    pieces,
                    s_piece,
                    d_piece,
                    size,
                    streamed,
                )
        if streamed:
            fence()
        begin = next_turn(counter, grain) if grain else n


kernel = Kernel(
    _kernel,
    "i64 int int u8 bool u8 bool int bool int int bool  i64 int int int int int int  i64 int int int int int int",
    shared=True,
)


def kv_transfer(
    src: KVPool, dst: KVPool, src_slots: Tensor, dst_slots: Tensor, *, layers: range | None = None, method: str = "auto"
) -> None:
    need_cpu("kv_transfer", src_slots, dst_slots)
    for pool in (src, dst):
        if pool.device.type != "cpu":
            raise ArgumentError("kv_transfer", "backend", "host pools, for backend 'cpu'", repr(pool))
    which = slice(0, src.num_layers) if layers is None else slice(layers.start, layers.stop)
    count = which.stop - which.start
    if count <= 0:
        return
    slots = (src_slots.data_ptr(), src_slots.dtype is int64, dst_slots.data_ptr(), dst_slots.dtype is int64)
    for a, b in zip(src.planes(), dst.planes(), strict=True):
        pieces, size = max(a.chunks, b.chunks), min(a.chunk_bytes, b.chunk_bytes)
        a_bases, a_args, a_uniform = _side(src, a, which, size)
        b_bases, b_args, b_uniform = _side(dst, b, which, size)
        streamed = src_slots.shape[0] * count * a.row_bytes >= STREAM and all(
            x % LINE == 0 for x in (size, b.page_stride, b.token_stride, *b_bases, b_args[-1])
        )
        run(
            kernel,
            (),
            src_slots.shape[0],
            2 * count * a.row_bytes,
            (
                *slots,
                count,
                a_uniform and b_uniform,
                pieces,
                size,
                streamed,
                a_bases.buffer_info()[0],
                *a_args,
                b_bases.buffer_info()[0],
                *b_args,
            ),
            max(src.page_size, dst.page_size),
        )


def _side(pool: KVPool, plane: Plane, which: slice, size: int) -> tuple[array[int], tuple[int, ...], bool]:
    """The layers' addresses, the kernel's arguments for this side, and whether one stride joins the layers."""
    bases = array("q", plane.bases[which])
    step = bases[1] - bases[0] if len(bases) > 1 else 0
    piece = plane.chunk_stride if plane.chunks > 1 else size
    place = (plane.page_stride, plane.token_stride, step, piece)
    args = (pool.num_slots, pool.page_size, *place)
    return bases, args, isinstance(pool.k, Tensor) or len(bases) == 1
