"""The shared memory as the process that calls sees it: arguments rebuilt where they lie, or copied to a device."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal._remote.wire import Arguments, Pool, Span, View
from hal.kv.pool import KVPool

PAGE = mmap.PAGESIZE


class Memory:
    """A file that another process has mapped too, or memory of this process alone."""

    def __init__(self, area: mmap.mmap) -> None:
        self.area = area
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(area))

    @classmethod
    def of_file(cls, fd: int, size: int) -> Memory:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0)
        return cls(mmap.mmap(fd, size, flags=flags))

    def raw(self, start: int, stop: int) -> Tensor:
        """Bytes [start, stop), as a tensor with a storage of its own."""
        if stop == start:
            return _host.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.area, dtype=torch.uint8, count=stop - start, offset=start)

    def protect(self, start: int, stop: int, open_: bool) -> None:
        """Makes whole pages [start, stop) fit to touch, or not."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        if libc.mprotect(self.address + start, stop - start, mmap.PROT_READ | mmap.PROT_WRITE if open_ else 0):
            raise OSError(ctypes.get_errno(), "mprotect")


class Placed:
    """The arguments of a call, where it can take them."""

    def __init__(self, memory: Memory, arguments: Arguments, device: torch.device) -> None:
        self.memory = memory
        self.arguments = arguments
        self.raws = [self._raw(span, device) for span in arguments.blocks]
        self.values = {name: self._value(value) for name, value in arguments.values.items()}
        self.push(arguments)

    def _raw(self, span: Span, device: torch.device) -> Tensor:
        size = span.stop - span.start
        if span.where == "pinned":
            return _host.empty(size, dtype=torch.uint8, pin_memory=True)
        if span.where == "host" or device.type == "cpu":
            return self.memory.raw(span.start, span.stop)
        return torch.empty(size, dtype=torch.uint8, device=device)

    def _value(self, value: Any) -> Any:
        if isinstance(value, View):
            return self._tensor(value)
        if isinstance(value, Pool):
            return KVPool(self._half(value.k), self._half(value.v), layout=value.layout, page_size=value.page_size)
        return value

    def _half(self, half: Any) -> Any:
        if half is None:
            return None
        return [self._tensor(t) for t in half] if isinstance(half, tuple) else self._tensor(half)

    def _tensor(self, view: View) -> Tensor:
        raw, item = self.raws[view.block], view.dtype.itemsize
        whole = raw[: raw.numel() // item * item].view(view.dtype)
        return whole.as_strided(view.shape, view.stride, view.offset // item)

    def _copies(self, arguments: Arguments) -> Iterator[tuple[Tensor, Tensor]]:
        """(there, here) of every part that holds something; nothing for what lies in the shared memory itself."""
        for raw, span in zip(self.raws, arguments.blocks, strict=True):
            if raw.data_ptr() == self.memory.address + span.start:
                continue
            for start, stop in span.windows:
                yield raw[start:stop], self.memory.raw(span.start + start, span.start + stop)

    def push(self, arguments: Arguments | None = None) -> None:
        """Copies what lies in the shared memory to where the call takes it; of other arguments of the same layout."""
        for there, here in self._copies(arguments or self.arguments):
            there.copy_(here)

    def pull(self, arguments: Arguments | None = None) -> None:
        """Copies back, to the place of the call's own arguments or of others of the same layout."""
        for there, here in self._copies(arguments or self.arguments):
            here.copy_(there)

    @contextmanager
    def guard_pages(self) -> Iterator[None]:
        """The pages beside guarded blocks kill whoever touches them."""
        pages = [page for span in self.arguments.blocks if span.guarded for page in (span.start - PAGE, span.stop)]
        for page in pages:
            self.memory.protect(page, page + PAGE, False)
        try:
            yield
        finally:
            for page in pages:
                self.memory.protect(page, page + PAGE, True)
