"""kv_transfer for Ascend: copies token rows between two pools.

Rows on one device move by a kernel: a program takes every P-th pair of slots, and a tile of layers is one
strided copy in and one out, rows contiguous. Between device and host the runtime's copies do it, on
pinned memory: rows are packed by the kernel into a contiguous staging buffer (or spread from it), so that
page size 1 is not a copy per token, and the host side goes in runs of consecutive slots (`_runtime`).
"""

# A kernel's parameters have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from hal._errors import HalError
from hal.backends.ascend import _runtime
from hal.backends.ascend._device import TILE_BYTES, current, is_capturing, pow2, slots_on, vector_cores
from hal.kv.pool import KVPool
from hal.lowered import shared_writes
from hal.triton import launch

INTS = tuple(
    """
    n src_size dst_size src_page dst_page layers s_page s_token s_layer s_chunk d_page d_token d_layer d_chunk
    """.split()
)


@launch.jit(do_not_specialize=("src", "dst", "src_slots", "dst_slots", *INTS))
@shared_writes("dst")
def _move_rows(
    src, dst, src_slots, dst_slots, n, src_size, dst_size, src_page, dst_page, layers,
    s_page, s_token, s_layer, s_chunk, d_page, d_token, d_layer, d_chunk,
    CHUNKS: tl.constexpr, WORDS: tl.constexpr, LAYER_TILE: tl.constexpr, TILE: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    # PACKED: row i of "src", or of "dst", is pair i's, whatever its slot; both slots decide all the same.
    word = tl.arange(0, TILE)[None, :]
    for i in range(tl.program_id(0), n, tl.num_programs(0)):
        s = tl.load(src_slots + i).to(tl.int64)
        d = tl.load(dst_slots + i).to(tl.int64)
        if (s >= 0) & (s < src_size) & (d >= 0) & (d < dst_size):
            if PACKED == "src":
                s = tl.cast(i, tl.int64)
            if PACKED == "dst":
                d = tl.cast(i, tl.int64)
            here = (s // src_page) * s_page + (s % src_page) * s_token
            there = (d // dst_page) * d_page + (d % dst_page) * d_token
            for chunk in range(CHUNKS):
                for first in range(0, layers, LAYER_TILE):
                    layer = tl.arange(0, LAYER_TILE)[:, None]
                    at = src + here + chunk * s_chunk + first * s_layer
                    to = dst + there + chunk * d_chunk + first * d_layer
                    for w in range(0, WORDS, TILE):
                        mask = (layer < layers - first) & (word < WORDS - w)
                        row = tl.load(at + layer * s_layer + w + word, mask=mask)
                        tl.store(to + layer * d_layer + w + word, row, mask=mask)


def kv_transfer(
    src: KVPool, dst: KVPool, src_slots: Tensor, dst_slots: Tensor, *, layers: range | None = None, method: str = "auto"
) -> None:
    """The contract is `hal.ops.kv_transfer`'s. Slots on the device only where both pools are there."""
    todo = range(src.num_layers) if layers is None else layers
    if not todo or src_slots.shape[0] == 0 or not src.num_slots or not dst.num_slots:
        return
    there = dst.device if src.device.type == "cpu" else src.device
    if src_slots.device.type == "cpu" and is_capturing(there):
        raise HalError("hal: kv_transfer: slots on the CPU can't be captured in a graph; give slots on the device")
    if src.device != dst.device or method == "direct":
        with current(there):
            _runtime.stage(src, dst, src_slots, dst_slots, todo, move)
    else:
        move(src, dst, slots_on(src_slots, there), slots_on(dst_slots, there), todo, todo)


def move(src: KVPool, dst: KVPool, src_slots: Tensor, dst_slots: Tensor, src_layers: range, dst_layers: range) -> None:
    """Rows from pool to pool by the kernel. Pools and slots are on one device."""
    for name in ("k", "v"):
        a, b = getattr(src, name), getattr(dst, name)
        if a is None:
            continue
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            _move(src, dst, _layers(src, a, src_layers), _layers(dst, b, dst_layers), src_slots, dst_slots)
            continue
        # Addresses can't be passed as integers here, so a pool of separate layers is a launch a layer.
        for i, j in zip(src_layers, dst_layers, strict=True):
            one, other = (_layers(p, h, range(x, x + 1)) for p, h, x in ((src, a, i), (dst, b, j)))
            _move(src, dst, one, other, src_slots, dst_slots)


def _layers(pool: KVPool, half: Tensor | tuple[Tensor, ...], layers: range) -> Tensor:
    """Those layers of one half of a pool."""
    if isinstance(half, tuple):
        return half[layers.start].unsqueeze(0)
    return half.narrow(_runtime.LAYER_DIM[pool.layout], layers.start, len(layers))


def _move(
    src: KVPool, dst: KVPool, a: Tensor, b: Tensor, src_slots: Tensor, dst_slots: Tensor, packed: str = ""
) -> None:
    x, y = _Steps(src, a), _Steps(dst, b)
    chunks = max(x.chunks, y.chunks)
    word = _word(a, b, (*x.steps(chunks), *y.steps(chunks), x.row // chunks))
    layers = a.shape[_runtime.LAYER_DIM[src.layout]]
    words = x.row // chunks // word.itemsize
    tile = min(pow2(words), 2 * TILE_BYTES // word.itemsize)
    rows = max(1, min(pow2(layers), 2 * TILE_BYTES // word.itemsize // tile))
    n = src_slots.shape[0]
    sizes = [pool.num_slots for pool in (src, dst)]
    if packed:
        sizes = [sizes[packed == "src"]] * 2
    _move_rows(
        (min(n, vector_cores(src.device)),),
        a.view(word),
        b.view(word),
        src_slots,
        dst_slots,
        n,
        *sizes,
        src.page_size,
        dst.page_size,
        layers,
        *(step // word.itemsize for step in (*x.steps(chunks), *y.steps(chunks))),
        CHUNKS=chunks,
        WORDS=words,
        LAYER_TILE=rows,
        TILE=tile,
        PACKED=packed,
    )


def through(
    pool: KVPool, half: Tensor | tuple[Tensor, ...], rows: Tensor, src_slots: Tensor, dst_slots: Tensor, layers: range
) -> None:
    """Rows of those layers of one half to other slots, by way of `rows` ``[layers, n, bytes]``."""
    between = KVPool(rows, None, layout="layer_first")
    if isinstance(half, Tensor):
        pieces = [(_layers(pool, half, layers), rows)]
    else:
        pieces = [(half[i].unsqueeze(0), row) for i, row in zip(layers, rows.unsqueeze(1), strict=True)]
    for there, here in pieces:
        _move(pool, between, there, here, src_slots, dst_slots, packed="dst")
    for there, here in pieces:
        _move(between, pool, here, there, src_slots, dst_slots, packed="src")


class _Steps:
    """How rows are found in one half of a pool, in bytes. A row is `chunks` pieces (page_head: one a head)."""

    def __init__(self, pool: KVPool, half: Tensor) -> None:
        item = half.element_size()
        st = [s * item for s in half.stride()]
        lead = {"layer_first": 2, "page_first": 2, "page_first_direct": 3, "page_head": 5}[pool.layout]
        self.layer = st[_runtime.LAYER_DIM[pool.layout]]
        self.chunks, self.chunk = 1, 0
        self.row = math.prod(half.shape[lead:]) * item
        if pool.layout == "page_head":
            self.page, self.token = st[0], st[2]
            self.chunks, self.chunk = half.shape[1], st[1]
            self.row = half.shape[1] * half.shape[4] * item
        elif pool.layout == "page_first_direct":
            self.page, self.token = st[0], st[2]
        else:
            self.token = st[0 if pool.layout == "page_first" else 1]
            self.page = self.token * pool.page_size

    def steps(self, chunks: int) -> tuple[int, int, int, int]:
        """Page, token, layer and chunk; where only the other pool has chunks, they lie one after the other here."""
        return self.page, self.token, self.layer, self.chunk if self.chunks > 1 else self.row // chunks


def _word(a: Tensor, b: Tensor, steps: tuple[int, ...]) -> torch.dtype:
    """The widest integer of at most 32 bits of which every step and every start is a multiple."""
    item = a.element_size()
    places = (a.data_ptr(), b.data_ptr(), *(t.storage_offset() * item for t in (a, b)))
    sizes = tuple(t.shape[-1] * item for t in (a, b))
    strides = tuple(s * item for t in (a, b) for s in t.stride()[:-1])
    for word in (torch.int32, torch.int16):
        if not any(x % word.itemsize for x in (*steps, *places, *sizes, *strides)):
            return word
    return torch.int8


def supports(sig: Any) -> str | None:
    """Slots on the device need both pools there: a kernel here can't reach host memory."""
    src, dst, slots = sig["src"], sig["dst"], sig["src_slots"]
    if slots.device != "cpu" and (src.device == "cpu" or dst.device == "cpu"):
        return "device_slots: with one pool on the host the slots must be on the CPU"
    return None
