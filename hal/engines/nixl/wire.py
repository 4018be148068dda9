"""What goes on the wire: whole pages in the layout ``page_head``, packed and unpacked by `kv_transfer`.

A page there has all layers of a head side by side, so the heads that a peer has, or wants, are one range of bytes of
each page, whatever the layouts, page sizes and head counts of the two pools.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hal
from hal import KVPool, SlotAllocator
from hal._errors import HalError
from hal.engines.nixl.errors import LinkFull


@dataclass(frozen=True)
class Piece:
    """Some of a request's pages, packed.

    Args:
        pages: which of them.
        event: recorded after the last of their rows; None: they are there.
    """

    pages: slice
    event: Any = None

    def ready(self) -> None:
        """Waits for them."""
        if self.event is not None:
            self.event.synchronize()


PIECE_BYTES = 256 << 20
"""Of rows that are packed and then written, on a GPU while the next are packed. So many take it 0.2 ms, and the host no
less."""


class Wire:
    """Staging memory beside `pool`, on its device.

    Args:
        pool: whose rows are staged.
        page_size: tokens of a page on the wire.
        tokens: capacity, rounded up to whole pages.
    """

    def __init__(self, pool: KVPool, page_size: int, tokens: int) -> None:
        self.of = pool
        self.num_pages = -(-tokens // page_size)
        self.heads = pool.row_shape[0] if len(pool.row_shape) == 2 else 1

        def make(row: tuple[int, ...]) -> Tensor:
            shape = (self.num_pages, self.heads, page_size, pool.num_layers, row[-1] * pool.dtype.itemsize)
            return torch.zeros(shape, dtype=torch.uint8, device=pool.device).view(pool.dtype)

        v = None if pool.v_row_shape is None else make(pool.v_row_shape)
        self.pool = KVPool(make(pool.row_shape), v, layout="page_head", page_size=page_size)
        self.allocator = SlotAllocator(self.pool.num_slots, page_size)
        self.pool_bytes = sum(t.numel() * t.element_size() for t in self.pool.tensors)
        self.memory = "DRAM" if pool.device.type == "cpu" else "VRAM"
        self.device_id = pool.device.index or 0

    def take(self, tokens: int, request: str) -> Tensor:
        """Slots of staging memory for a request's tokens, of pages of its own.

        Raises:
            LinkFull: there are not as many.
        """
        try:
            return self.allocator.alloc(tokens)
        except HalError:
            raise LinkFull(
                f"hal: link: request {request}: the staging memory is full: {tokens} tokens asked for, "
                f"{self.allocator.available} of {self.pool.num_slots} free — poll until others have ended, or make "
                "the Link with more staging"
            ) from None

    def free(self, staged: Tensor) -> None:
        self.allocator.free(staged[:: self.pool.page_size])

    def pages(self, staged: Tensor) -> list[int]:
        found: list[int] = (staged[:: self.pool.page_size] // self.pool.page_size).tolist()
        return found

    def pack(self, slots: Tensor, staged: Tensor) -> Iterator[Piece]:
        """From the pool to the staging memory, in the current stream's order: each piece is there once `ready`."""
        page = self.pool.page_size
        each = max(1, PIECE_BYTES // (self.pool_bytes // self.num_pages))
        for i in range(0, -(-len(slots) // page), each):
            rows = slice(i * page, (i + each) * page)
            hal.kv_transfer(self.of, self.pool, slots[rows], staged[rows])
            event = None
            if self.of.device.type == "cuda":
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(self.of.device))
            yield Piece(slice(i, i + each), event)

    def unpack(self, staged: Tensor, slots: Tensor) -> None:
        """The other way; when it returns, the rows are there."""
        hal.kv_transfer(self.pool, self.of, staged, slots)
        # The link writes outside the device's order of streams: what comes next must not overtake this.
        if self.of.device.type == "cuda":
            torch.cuda.current_stream(self.of.device).synchronize()

    def regions(self) -> list[tuple[int, int, int, str]]:
        """Of k and v: address, bytes, device, and a name."""
        return [(t.data_ptr(), t.numel() * t.element_size(), self.device_id, "") for t in self.pool.tensors]

    def described(self) -> dict[str, Any]:
        """What a peer must know to write here."""
        return {
            "bases": [p.bases[0] for p in self.pool.planes()],
            "pages": self.num_pages,
            "heads": self.heads,
            "memory": self.memory,
            "device": self.device_id,
        }

    def descriptors(
        self, pages: list[int], head: int, there: dict[str, Any], to: list[int], to_head: int, heads: int
    ) -> tuple[Any, Any]:
        """(what to read here, where to write there), ``[copies, 3]`` of (address, bytes, device): the fewest.

        Args:
            pages: staged here; `to`: as many of the peer's.
            head: the first here; `to_head`: its place there; `heads`: how many.
            there: the peer's `described`.
        """
        mine, theirs = np.array(pages, np.int64), np.array(to, np.int64)
        # Pages that follow one another at both ends are one copy, where a page has no other heads.
        joined = (np.diff(mine) * self.heads == heads) & (np.diff(theirs) * there["heads"] == heads)
        begins = np.flatnonzero(np.concatenate(([True], ~joined)))
        count = np.diff(begins, append=len(mine))
        planes = self.pool.planes()
        here, away = (np.empty((len(planes), len(begins), 3), np.uint64) for _ in range(2))
        for i, (plane, base) in enumerate(zip(planes, there["bases"], strict=True)):
            each = plane.chunk_stride
            here[i, :, 0] = plane.bases[0] + mine[begins] * plane.page_stride + head * each
            away[i, :, 0] = base + theirs[begins] * (there["heads"] * each) + to_head * each
            here[i, :, 1] = away[i, :, 1] = count * (heads * each)
        here[:, :, 2], away[:, :, 2] = self.device_id, there["device"]
        return here.reshape(-1, 3), away.reshape(-1, 3)
