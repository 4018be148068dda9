"""`SlotAllocator`: which slots of a pool are free."""

from __future__ import annotations

import torch
from torch import Tensor

from hal import _host
from hal._errors import ArgumentError, HalError


class SlotAllocator:
    """Hands out the slots of a pool, whole pages, the longest consecutive runs it can.

    Consecutive host slots are what lets `kv_transfer` move many tokens in one copy. Best fit: the
    smallest free run that holds the request, and only if there is none, several runs, longest first.

    Args:
        num_slots: capacity in tokens; what exceeds a whole number of pages is never handed out.
        page_size: every allocation is rounded up to whole pages.

    Example:
        >>> allocator = SlotAllocator(num_slots=64, page_size=16)
        >>> slots = allocator.alloc(20)
        >>> slots.tolist() == list(range(20))
        True
        >>> allocator.free(slots); allocator.available
        64
    """

    def __init__(self, num_slots: int, page_size: int = 1) -> None:
        for name, value, least in (("num_slots", num_slots, 0), ("page_size", page_size, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ArgumentError("SlotAllocator", name, f"an int >= {least}", repr(value))
        self.page_size = page_size
        self._pages = num_slots // page_size
        self._runs: dict[int, int] = {0: self._pages} if self._pages else {}
        self._ends: dict[int, int] = {self._pages: 0} if self._pages else {}
        self._used = bytearray(self._pages)

    @property
    def available(self) -> int:
        """Free slots."""
        return sum(self._runs.values()) * self.page_size

    def alloc(self, tokens: int) -> Tensor:
        """`tokens` slots as an int64 CPU tensor; the rest of the last page stays reserved with them.

        Raises:
            HalError: fewer slots are free; nothing is taken.
        """
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise ArgumentError("SlotAllocator", "tokens", "an int >= 0", repr(tokens))
        need = -(-tokens // self.page_size)
        if need > sum(self._runs.values()):
            raise HalError(f"hal: SlotAllocator: {tokens} slots asked for, {self.available} free; free some first")
        taken: list[tuple[int, int]] = []
        while need:
            fitting = [start for start, n in self._runs.items() if n >= need]
            start = (
                min(fitting, key=lambda s: (self._runs[s], s))
                if fitting
                else max(self._runs, key=lambda s: (self._runs[s], -s))
            )
            n = min(need, self._runs[start])
            self._take(start, n)
            taken.append((start, n))
            need -= n
        page = self.page_size
        runs = [_host.arange(s * page, (s + n) * page) for s, n in taken]
        return torch.cat(runs)[:tokens] if runs else _host.empty(0, dtype=torch.int64)

    def free(self, slots: Tensor) -> None:
        """Gives back the pages that hold `slots` (-1 is ignored).

        Raises:
            ArgumentError: a slot outside the pool, or in a page that is free already; nothing is freed.
        """
        pages = sorted({int(s) // self.page_size for s in slots.tolist() if s != -1})
        for p in pages:
            if not 0 <= p < self._pages:
                top = self._pages * self.page_size
                raise ArgumentError("SlotAllocator", "slots", f"slots in [0, {top})", f"a slot of page {p}")
            if not self._used[p]:
                raise ArgumentError("SlotAllocator", "slots", "slots in use", f"page {p}, which is free already")
        for p in pages:
            self._give(p, 1)

    def _take(self, start: int, n: int) -> None:
        length = self._runs.pop(start)
        del self._ends[start + length]
        if length > n:
            self._runs[start + n] = length - n
            self._ends[start + length] = start + n
        self._used[start : start + n] = b"\1" * n

    def _give(self, start: int, n: int) -> None:
        self._used[start : start + n] = bytes(n)
        end = start + n
        if end in self._runs:
            length = self._runs.pop(end)
            end += length
        if start in self._ends:
            start = self._ends.pop(start)
        self._runs[start] = end - start
        self._ends[end] = start
