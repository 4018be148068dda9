"""Lists of slots that know when they are stale.

By numpy: torch's operators that index share the work among OpenMP's threads from 3,000 elements on, and what takes
microseconds then waits for those to be woken: 8 ms an operator on one machine of 16 cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hal import KVPool
from hal._errors import ArgumentError
from hal.engines.nixl.errors import LinkError


@dataclass(frozen=True)
class Stamped:
    """Slots, and how often the pages that hold them had been freed when the list was made.

    Args:
        slots: ``[n]`` int64, on the CPU.
        stamps: ``[n]`` int64.
    """

    slots: Tensor
    stamps: np.ndarray


class Generations:
    """How often each page of a pool has been freed."""

    def __init__(self, pool: KVPool) -> None:
        self.num_slots, self.page_size = pool.num_slots, pool.page_size
        self.counts = np.zeros(-(-pool.num_slots // pool.page_size), np.int64)
        self._place = np.zeros(pool.num_slots, np.int64)

    def stamp(self, slots: Tensor | Stamped) -> Stamped:
        """Raises:
        ArgumentError: no slots, one that the pool has not, or one twice.
        """
        if isinstance(slots, Stamped):
            return slots
        if slots.device.type != "cpu" or slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
            got = f"{slots.dtype}{list(slots.shape)} on {slots.device}"
            raise ArgumentError("Link", "slots", "[n] int32 or int64 on the CPU", got)
        slots = slots.to(torch.int64)
        places = slots.numpy()
        if not len(places) or places.min() < 0 or places.max() >= self.num_slots:
            expected = f"one slot or more, each in [0, {self.num_slots})"
            raise ArgumentError("Link", "slots", expected, str(slots.tolist()[:8]))
        # Of two that are the same, the one that is written here last is not the other.
        order = np.arange(len(places))
        self._place[places] = order
        if (self._place[places] != order).any():
            raise ArgumentError("Link", "slots", "each slot once", str(slots.tolist()[:8]))
        return Stamped(slots.clone(), self.counts[places // self.page_size])

    def freed(self, slots: Tensor) -> None:
        pages = sorted({s // self.page_size for s in slots.tolist() if s >= 0})
        self.counts[np.array(pages, np.int64)] += 1

    def check(self, stamped: Stamped, request: str) -> None:
        """Raises:
        LinkError: one of the slots has been freed since.
        """
        slots = stamped.slots.numpy()
        stale = slots[self.counts[slots // self.page_size] != stamped.stamps]
        if len(stale):
            raise LinkError(
                f"hal: link: request {request}: a stale list of slots: {stale.tolist()[:8]} have been freed since "
                "it was made, and may be another request's — make the list anew"
            )
