"""The memory that a backend is judged in: every tensor in an allocation of ours, with guard zones.

A sample's tensors are rebuilt in memory that the backend's process has mapped too, with the same strides and
the same position relative to 16 bytes, each in a block of its own. Whatever is not an element of the tensor —
zones before and after it, gaps between its rows — holds a poison, and so do the elements of pure outputs.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from hal._remote.memory import PAGE, Memory
from hal._remote.wire import Arguments, Pool, Span, View
from hal.conformance._block import FAR_BYTES, ZONE, Block, bits, extent, windows_of
from hal.kv.pool import KVPool

POISONS = (0xFF, 0x5A)
"""A NaN in every float dtype and -1 in every integer; a finite number, far out of range as an index."""

SIZE = 1 << 37
"""Bytes of address space for all tensors of a case; the largest samples reach over 2^31 elements."""
RESULT = 1 << 16


@dataclass
class Placed:
    """Arguments in memory of ours.

    Attributes:
        values: what the backend is called with.
        blocks: argument -> its tensors; a pool's k and v halves, layer by layer where they are a list.
    """

    values: dict[str, Any]
    blocks: dict[str, list[Block]]
    arena: Arena

    def all(self) -> Iterator[Block]:
        for blocks in self.blocks.values():
            yield from blocks

    def snapshot(self) -> Placed:
        for block in self.all():
            block.snapshot()
        return self

    def take(self) -> Placed:
        for block in self.all():
            block.take()
        return self

    def same_layout(self, other: Placed) -> bool:
        """Do the blocks of both have the same sizes?"""
        return [b.raw.numel() for b in self.all()] == [b.raw.numel() for b in other.all()]

    @cached_property
    def arguments(self) -> Arguments:
        """What another process needs to know to call with them."""
        blocks = list(self.all())
        index = {b.raw.untyped_storage().data_ptr(): i for i, b in enumerate(blocks)}

        def view(t: Tensor) -> View:
            block = index[t.untyped_storage().data_ptr()]
            return View(block, int(t.storage_offset()) * t.dtype.itemsize, t.dtype, tuple(t.shape), tuple(t.stride()))

        def half(t: Any) -> Any:
            return tuple(map(view, t)) if isinstance(t, tuple) else None if t is None else view(t)

        def value(v: Any) -> Any:
            if isinstance(v, Tensor):
                return view(v)
            return Pool(half(v.k), half(v.v), v.layout, v.page_size) if isinstance(v, KVPool) else v

        values = {name: value(v) for name, v in self.values.items()}
        # A new tensor that a call returns is of the size of its arguments; what is not used does not exist.
        room = min(RESULT + 4 * sum(b.raw.numel() for b in blocks), FAR_BYTES)
        return Arguments(values, tuple(b.span for b in blocks), (self.arena.take(room), room))


@dataclass(frozen=True)
class Spot:
    """Where a tensor may lie: `raw` is bytes [start, ...) of the memory, the tensor begins `at` bytes into it."""

    raw: Tensor
    at: int
    start: int


class Arena:
    """Memory that another process may have mapped too, handed out from the beginning and taken back from the end.

    It is one file without a name, as large as anything that the suite ever asks for; only what is touched exists.
    """

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("tensors")
        else:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
            self.fd = self._file.fileno()
        os.ftruncate(self.fd, size)
        self.memory = Memory.of_file(self.fd, size)
        self.top = 0

    def take(self, size: int, align: int = 64) -> int:
        """The offset of `size` bytes."""
        start = -(-self.top // align) * align
        if start + size > self.size:
            raise MemoryError(f"{size} bytes more than the {self.size} of the suite's memory")
        self.top = start + size
        return start

    @contextmanager
    def borrow(self) -> Iterator[None]:
        """What is handed out inside is taken back on leaving."""
        mark = self.top
        try:
            yield
        finally:
            if self.top - mark > FAR_BYTES:
                self._forget(mark, self.top)
            self.top = mark

    def _forget(self, start: int, stop: int) -> None:
        """Gives the pages of a very large block back to the system."""
        libc = ctypes.CDLL(None, use_errno=True)
        if hasattr(libc, "fallocate"):
            libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
            first = -(-start // PAGE) * PAGE
            libc.fallocate(self.fd, _PUNCH_HOLE | _KEEP_SIZE, first, max(stop // PAGE * PAGE - first, 0))


_KEEP_SIZE, _PUNCH_HOLE = 1, 2


@dataclass(frozen=True)
class Room:
    """Where tensors get their blocks.

    Args:
        where: what the caller makes of a block, as in `hal._remote.wire.Span`.
        side: the tensor's ``end`` or ``start`` lies at a page that may not be touched while the call runs: a single
            byte read or written past it kills the process, whether or not the value matters. Else zones.
    """

    arena: Arena
    where: str = "device"
    side: str = ""

    def __call__(self, size: int, position: int) -> Spot:
        """A block for `size` bytes that begin at `position` modulo 16 (beside a page: where they have to)."""
        if self.side:
            inner = -(-max(size, 1) // PAGE) * PAGE
            start = self.arena.take(inner + 2 * PAGE, PAGE) + PAGE
            raw = self.arena.memory.raw(start, start + inner)
            return Spot(raw, inner - size if self.side == "end" else 0, start)
        total = size + 2 * ZONE + 16
        start = self.arena.take(total)
        return Spot(self.arena.memory.raw(start, start + total), ZONE + position, start)


def place(
    arguments: Mapping[str, Any],
    room: Room,
    *,
    poison: int = POISONS[0],
    outputs: frozenset[str] = frozenset(),
    shift: int = 0,
    where: Mapping[str, str] | None = None,
    apart: frozenset[str] = frozenset(),
) -> Placed:
    """`arguments` of a sample, rebuilt in memory of ours, with a snapshot taken.

    Args:
        poison: the byte in everything that is not an element.
        outputs: arguments whose elements hold the poison too (``dst`` stands for a whole pool).
        shift: elements by which each tensor starts off its place.
        where: argument -> where the caller takes it, if not where `room` says.
        apart: arguments that get memory of their own even where they are a part of another one's, as MLA's v is of k.
    """
    values: dict[str, Any] = {}
    blocks: dict[str, list[Block]] = {}
    wholes: list[tuple[Tensor, Tensor]] = []
    for name, value in arguments.items():
        use = replace(room, where=where[name]) if where and name in where else room

        def build(label: str, t: Tensor, use: Room = use, name: str = name) -> Tensor:
            for whole, there in wholes if name not in apart else ():
                if _begins(t, whole):
                    return there[..., : t.shape[-1]]
            # An expanded tensor (a bad argument) is one element there as here.
            thin = t
            for dim, (n, st) in enumerate(zip(t.shape, t.stride(), strict=True)):
                if n > 1 and st == 0:
                    thin = thin.narrow(dim, 0, 1)
            block = _block(label, thin, use, poison, shift, name in outputs)
            blocks.setdefault(name, []).append(block)
            if thin is t:
                wholes.append((t, block.view))
            return block.view.expand(t.shape)

        if isinstance(value, Tensor):
            values[name] = build(name, value)
        elif isinstance(value, KVPool):
            values[name] = _pool(name, value, build)
        else:
            values[name] = value
    return Placed(values, blocks, room.arena).snapshot()


def _begins(t: Tensor, whole: Tensor) -> bool:
    """Whether each row of `t` is the beginning of that row of `whole`, in the same memory."""
    if not t.numel() or (t.data_ptr(), t.dtype, t.stride()) != (whole.data_ptr(), whole.dtype, whole.stride()):
        return False
    return t.shape[:-1] == whole.shape[:-1] and t.shape[-1] <= whole.shape[-1]


def _pool(name: str, pool: KVPool, build: Callable[[str, Tensor], Tensor]) -> KVPool:
    def half(label: str, t: Any) -> Any:
        if t is None:
            return None
        if isinstance(t, tuple):
            return [build(f"{label}[{i}]", layer) for i, layer in enumerate(t)]
        return build(label, t)

    return KVPool(half(f"{name}.k", pool.k), half(f"{name}.v", pool.v), layout=pool.layout, page_size=pool.page_size)


def _block(name: str, t: Tensor, room: Room, poison: int, shift: int, is_output: bool) -> Block:
    item, span = t.dtype.itemsize, extent(t)
    position = (t.data_ptr() + shift * item) % 16 if t.numel() else 0
    spot = room(span * item, position)
    raw, at = spot.raw, spot.at
    shape, stride = tuple(t.shape), tuple(t.stride())
    flat = raw[: raw.numel() // item * item].view(t.dtype)
    view = flat.as_strided(shape, stride, flat.storage_offset() + at // item)
    windows = windows_of(shape, stride, at, item, raw.numel())
    for w in windows:
        raw[w.start : w.stop].fill_(poison)
    if is_output:
        bits(view).fill_(int.from_bytes(bytes([poison]) * item, "little", signed=item > 1))
    elif t.numel():
        bits(view).copy_(bits(t))
    parts = tuple((w.start, w.stop) for w in windows)
    there = Span(spot.start, spot.start + raw.numel(), parts, room.where, bool(room.side))
    return Block(name, view, raw, windows, there)
