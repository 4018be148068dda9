"""The memory that a backend is judged in: every tensor in an allocation of ours, with guard zones.

A sample's tensors are rebuilt on the target's device with the same strides and the same position
relative to 16 bytes, each alone in its allocation. Whatever is not an element of the tensor — zones
before and after it, gaps between its rows — holds a poison, and so do the elements of pure outputs.
After the call every byte that the contract does not name must be as it was.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hal.kvpool import KVPool

POISONS = (0xFF, 0x5A)
"""A NaN in every float dtype and -1 in every integer; a finite number, far out of range as an index."""

ZONE = 4096
FAR_BYTES = 1 << 28
"""An allocation larger than this is watched only around the rows of its first dim."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PAGE = mmap.PAGESIZE


def bits(t: Tensor) -> Tensor:
    """`t` as integers of the same size: what is moved, filled and compared without a float's opinion."""
    return t.view(_BITS[t.dtype.itemsize])


def extent(t: Tensor) -> int:
    """Elements from the first to the last of `t`, gaps included."""
    if t.numel() == 0:
        return 0
    return 1 + sum((n - 1) * st for n, st in zip(t.shape, t.stride(), strict=True))


@dataclass(frozen=True)
class _Window:
    """A watched part of an allocation: bytes [start, stop), and the part of the tensor inside it."""

    start: int
    stop: int
    index: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, raw: Tensor, item: int) -> Tensor:
        """The tensor's part, as integers, in `raw`, a copy of this window."""
        usable = raw[: raw.numel() // item * item]
        return usable.view(_BITS[item]).as_strided(self.shape, self.stride, self.offset // item)


@dataclass
class Block:
    """One tensor in an allocation of ours.

    Attributes:
        name: as the contract calls it: ``k_cache``, ``dst.k``, ``dst.k[3]``.
        view: what the backend gets.
        raw: the whole allocation as bytes.
    """

    name: str
    view: Tensor
    raw: Tensor
    _windows: tuple[_Window, ...]
    _before: list[Tensor] = field(default_factory=list)

    def snapshot(self) -> None:
        """Remembers every watched byte."""
        self._before = [self.raw[w.start : w.stop].to("cpu", copy=True) for w in self._windows]

    def touched(self, named: Tensor | None) -> str | None:
        """What changed since `snapshot` beyond the elements in `named` (None: none of them), in words."""
        item = self.view.dtype.itemsize
        for w, before in zip(self._windows, self._before, strict=True):
            now = self.raw[w.start : w.stop].to("cpu", copy=True)
            if named is not None and named.numel():
                allowed = named if w.index is None else named[w.index]
                part = w.view(now, item)
                part.copy_(torch.where(allowed, w.view(before, item), part))
            if not torch.equal(now, before):
                return self._where(w, int((now != before).nonzero()[0]), int((now != before).sum()))
        return None

    def _where(self, w: _Window, at: int, count: int) -> str:
        item = self.view.dtype.itemsize
        span = 1 + sum((n - 1) * s for n, s in zip(w.shape, w.stride, strict=True)) if 0 not in w.shape else 0
        if at < w.offset:
            return f"{self.name}: {count} bytes written outside the tensor, {w.offset - at} bytes before it"
        if at >= w.offset + span * item:
            past = at - w.offset - span * item
            return (
                f"{self.name}: {count} bytes written outside the tensor, {past} bytes past the end of "
                f"{'it' if w.index is None else f'row {w.index}'}"
            )
        numel = 1
        for n in w.shape:
            numel *= n
        mark = torch.full((span,), -1, dtype=torch.int64)
        mark.as_strided(w.shape, w.stride).copy_(torch.arange(numel).view(w.shape))
        element = int(mark[(at - w.offset) // item])
        if element < 0:
            return f"{self.name}: {count} bytes written into the gaps between the tensor's rows"
        lead = [] if w.index is None else [w.index]
        where = lead + [int(i) for i in torch.unravel_index(torch.tensor(element), w.shape)]
        return f"{self.name}{where}: changed, though the contract does not name it ({count} bytes in all)"

    def values(self) -> Tensor:
        """The tensor as it is now, contiguous, on the CPU."""
        return bits(self.view).contiguous().to("cpu", copy=True).view(self.view.dtype)

    def element_values_before(self) -> Tensor | None:
        """The tensor as it was at the snapshot, contiguous."""
        item = self.view.dtype.itemsize
        parts = [w.view(b, item) for w, b in zip(self._windows, self._before, strict=True)]
        if not parts:
            return None
        whole = parts[0] if self._windows[0].index is None else torch.stack(parts)
        return whole.contiguous().clone().view(self.view.dtype)


@dataclass
class Placed:
    """Arguments in memory of ours.

    Attributes:
        values: what the backend is called with.
        blocks: argument -> its tensors; a pool's k and v halves, layer by layer where they are a list.
    """

    values: dict[str, Any]
    blocks: dict[str, list[Block]]

    def all(self) -> Iterator[Block]:
        for blocks in self.blocks.values():
            yield from blocks

    def snapshot(self) -> Placed:
        for block in self.all():
            block.snapshot()
        return self


Allocator = Callable[[int, int], tuple[Tensor, int]]
"""(bytes, position of the tensor modulo 16) -> (raw uint8, offset of the tensor's first byte)"""


def on_device(device: torch.device, pinned: bool = False) -> Allocator:
    """Ordinary memory, or pinned host memory, with `ZONE` bytes on either side."""

    def allocate(size: int, position: int) -> tuple[Tensor, int]:
        total = size + 2 * ZONE + 16
        if total > FAR_BYTES and device.type == "cpu":
            # Lazily committed: only the pages of the rows will ever exist.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
            return torch.frombuffer(mmap.mmap(-1, total, flags=flags), dtype=torch.uint8), ZONE + position
        if pinned:
            return torch.empty(total, dtype=torch.uint8, pin_memory=True), ZONE + position
        return torch.empty(total, dtype=torch.uint8, device=device), ZONE + position

    return allocate


def against_pages(side: str) -> Allocator:
    """Memory that ends (``side="end"``) or begins (``"start"``) at a page that may not be touched.

    A single byte read or written past it kills the process, whether or not the value matters.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def allocate(size: int, position: int) -> tuple[Tensor, int]:
        inner = -(-max(size, 1) // PAGE) * PAGE
        area = mmap.mmap(-1, inner + 2 * PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(area))
        for guard in (base, base + PAGE + inner):
            if libc.mprotect(guard, PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        raw = torch.frombuffer(area, dtype=torch.uint8, count=inner, offset=PAGE)
        return raw, inner - size if side == "end" else 0

    return allocate


def place(
    arguments: Mapping[str, Any],
    allocate: Allocator,
    *,
    poison: int = POISONS[0],
    outputs: frozenset[str] = frozenset(),
    shift: int = 0,
    host: Mapping[str, Allocator] | None = None,
    apart: frozenset[str] = frozenset(),
) -> Placed:
    """`arguments` of a sample, rebuilt in memory of ours, with a snapshot taken.

    Args:
        poison: the byte in everything that is not an element.
        outputs: arguments whose elements hold the poison too (``dst`` stands for a whole pool).
        shift: elements by which each tensor starts off its place.
        host: argument -> another allocator, for what stays on the host.
        apart: arguments that get memory of their own even where they are a part of another one's, as MLA's v is of k.
    """
    values: dict[str, Any] = {}
    blocks: dict[str, list[Block]] = {}
    wholes: list[tuple[Tensor, Tensor]] = []
    for name, value in arguments.items():
        use = (host or {}).get(name, allocate)

        def build(label: str, t: Tensor, use: Allocator = use, name: str = name) -> Tensor:
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
    return Placed(values, blocks).snapshot()


def _begins(t: Tensor, whole: Tensor) -> bool:
    """Whether each row of `t` is the beginning of that row of `whole`, in the same memory."""
    if not t.numel() or (t.data_ptr(), t.dtype, t.stride()) != (
        whole.data_ptr(),
        whole.dtype,
        whole.stride(),
    ):
        return False
    return t.shape[:-1] == whole.shape[:-1] and t.shape[-1] <= whole.shape[-1]


def _pool(name: str, pool: KVPool, build: Callable[[str, Tensor], Tensor]) -> KVPool:
    def half(label: str, t: Any) -> Any:
        if t is None:
            return None
        if isinstance(t, tuple):
            return [build(f"{label}[{i}]", layer) for i, layer in enumerate(t)]
        return build(label, t)

    return KVPool(
        half(f"{name}.k", pool.k), half(f"{name}.v", pool.v), layout=pool.layout, page_size=pool.page_size
    )


def _block(name: str, t: Tensor, allocate: Allocator, poison: int, shift: int, is_output: bool) -> Block:
    item, span = t.dtype.itemsize, extent(t)
    position = (t.data_ptr() + shift * item) % 16 if t.numel() else 0
    raw, at = allocate(span * item, position)
    shape, stride = tuple(t.shape), tuple(t.stride())
    view = raw[: raw.numel() // item * item].view(t.dtype).as_strided(shape, stride, at // item)
    windows = _windows(shape, stride, at, span, item, raw.numel())
    for w in windows:
        raw[w.start : w.stop].fill_(poison)
    if is_output:
        bits(view).fill_(int.from_bytes(bytes([poison]) * item, "little", signed=item > 1))
    elif t.numel():
        bits(view).copy_(bits(t))
    return Block(name, view, raw, windows)


def _windows(
    shape: tuple[int, ...], stride: tuple[int, ...], at: int, span: int, item: int, total: int
) -> tuple[_Window, ...]:
    if total <= FAR_BYTES:
        return (_Window(0, total, None, shape, stride, at),)
    inner = sum((n - 1) * s for n, s in zip(shape[1:], stride[1:], strict=True)) + 1
    out = []
    for i in range(shape[0]):
        first = at + i * stride[0] * item
        start = max(0, first - ZONE // 2)
        out.append(
            _Window(
                start,
                min(total, first + inner * item + ZONE // 2),
                i,
                shape[1:],
                stride[1:],
                first - start,
            )
        )
    return tuple(out)
