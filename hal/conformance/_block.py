"""One tensor in an allocation of ours, and which of the bytes in and around it have changed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hal import _host
from hal._remote.wire import Span

ZONE = 4096
FAR_BYTES = 1 << 28
"""An allocation larger than this is watched only around the rows of its first dim."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    span: Span
    _before: list[Tensor] = field(default_factory=list)
    _after: list[Tensor] | None = None

    def snapshot(self) -> None:
        """Remembers every watched byte."""
        self._before, self._after = self._bytes(), None

    def take(self) -> None:
        """Copies every watched byte out: from here on it is judged as it is now, whatever is written later."""
        self._after = self._bytes()

    def _bytes(self) -> list[Tensor]:
        return [self.raw[w.start : w.stop].clone() for w in self._windows]

    def _now(self) -> list[Tensor]:
        return self._bytes() if self._after is None else self._after

    def changes(self, named: Tensor | None) -> str | None:
        """What changed since `snapshot` beyond the elements in `named` (None: none of them), in words."""
        item = self.view.dtype.itemsize
        for w, before, after in zip(self._windows, self._before, self._now(), strict=True):
            now = after
            if named is not None and named.numel():
                now = after.clone()
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
        mark = _host.full((span,), -1, dtype=torch.int64)
        mark.as_strided(w.shape, w.stride).copy_(_host.arange(numel).view(w.shape))
        element = int(mark[(at - w.offset) // item])
        if element < 0:
            return f"{self.name}: {count} bytes written into the gaps between the tensor's rows"
        lead = [] if w.index is None else [w.index]
        where = lead + [int(i) for i in torch.unravel_index(_host.tensor(element), w.shape)]
        return f"{self.name}{where}: changed, though the contract does not name it ({count} bytes in all)"

    def values(self) -> Tensor:
        """The tensor as it is now, contiguous."""
        return self._elements(self._now())

    def values_before(self) -> Tensor:
        """The tensor as it was at the snapshot, contiguous."""
        return self._elements(self._before)

    def _elements(self, copies: list[Tensor]) -> Tensor:
        item = self.view.dtype.itemsize
        parts = [w.view(b, item) for w, b in zip(self._windows, copies, strict=True)]
        if not parts:
            return _host.empty(self.view.shape, dtype=self.view.dtype)
        whole = parts[0] if self._windows[0].index is None else torch.stack(parts)
        return whole.contiguous().clone().view(self.view.dtype)


def windows_of(shape: tuple[int, ...], stride: tuple[int, ...], at: int, item: int, total: int) -> tuple[_Window, ...]:
    """What of an allocation is watched: all of it, or, where it is far larger than its rows, what is around each row.

    Rows whose surroundings overlap are watched as a whole, however large: what may be written to one would count as
    written outside the next.
    """
    inner = sum((n - 1) * s for n, s in zip(shape[1:], stride[1:], strict=True)) + 1
    if total <= FAR_BYTES or stride[0] * item < inner * item + ZONE:
        return (_Window(0, total, None, shape, stride, at),)
    out = []
    for i in range(shape[0]):
        first = at + i * stride[0] * item
        start = max(0, first - ZONE // 2)
        stop = min(total, first + inner * item + ZONE // 2)
        out.append(_Window(start, stop, i, shape[1:], stride[1:], first - start))
    return tuple(out)
