"""`Meter`: hal's ops, each call counted and timed, with who ran it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import hal


@dataclass
class Use:
    """What one op was used for: `backend` and `lane` as `hal.explain` gave them for its first call."""

    op: str
    backend: str
    lane: str
    calls: int = 0
    seconds: float = 0.0
    first: float = 0.0
    """Of `seconds`, the first call's: it may have compiled."""


@dataclass
class Meter:
    """Calls hal's ops by name: ``meter.get_last_loc(...)`` is ``hal.get_last_loc(...)``, and remembered.

    On an accelerator each call is synced before and after, so that the time is the op's own: an
    engine that is not a demonstration calls ``hal.<op>`` itself and never syncs.

    Args:
        device: where the engine's tensors are.
    """

    device: torch.device
    uses: dict[str, Use] = field(default_factory=dict)

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op.startswith("_"):
            raise AttributeError(op)
        function = getattr(hal, op)

        def call(*args: Any, **kwargs: Any) -> Any:
            use = self.uses.get(op)
            if use is None:
                chosen = hal.explain(op, *args, **kwargs)
                use = self.uses[op] = Use(op, chosen.backend, chosen.lane)
            self._sync()
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self._sync()
            took = time.perf_counter() - start
            use.first = took if use.calls == 0 else use.first
            use.calls += 1
            use.seconds += took
            return result

        return call

    def _sync(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
