"""`Meter`: hal's ops, each call counted and timed, with who ran it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hal
from hal.kv.pool import KVPool


@dataclass
class Use:
    """Calls of one op that one backend ran."""

    op: str
    backend: str
    lane: str
    calls: int = 0
    seconds: float = 0.0
    first: float = 0.0
    """Of `seconds`, the first call's: it selects, and may import and compile."""


class Meter:
    """hal's ops by name, remembered: ``meter.get_last_loc(...)`` is ``hal.get_last_loc(...)``.

    On an accelerator each call is synced before and after, so that the time is the op's own: an
    engine that is no demonstration calls ``hal.<op>``, or what `hal.bind` gives, and never syncs. What a graph
    captures, and what it replays, is not counted.

    Args:
        device: where the engine's tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._by_kind: dict[Any, Use] = {}
        self._uses: dict[tuple[str, str, str], Use] = {}

    @property
    def uses(self) -> list[Use]:
        """One for each op and who ran it, in the order of the first calls."""
        return list(self._uses.values())

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op.startswith("_"):
            raise AttributeError(op)
        function = getattr(hal, op)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._capturing():
                return function(*args, **kwargs)
            use = self._use(op, args, kwargs)
            sync(self.device)
            start = time.perf_counter()
            result = function(*args, **kwargs)
            sync(self.device)
            took = time.perf_counter() - start
            use.first = use.first if use.calls else took
            use.calls += 1
            use.seconds += took
            return result

        setattr(self, op, call)
        return call

    def _use(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Use:
        # Selection looks at no more than this of a call, so one question a kind is enough.
        kind = (op, *map(_kind, args), *((name, _kind(value)) for name, value in kwargs.items()))
        use = self._by_kind.get(kind)
        if use is None:
            chosen = hal.explain(op, *args, **kwargs).chosen
            # Where nobody may run it, the call itself says so, better than we could.
            who = (op, chosen.name, chosen.lane) if chosen else (op, "none", "")
            use = self._by_kind[kind] = self._uses.setdefault(who, Use(*who))
        return use

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def sync(device: torch.device) -> None:
    """Waits for what an accelerator was given to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        place = (value.dtype, value.device, value.data_ptr() % 16)
        return (*place, value.shape[1:], value.stride(), value.is_contiguous())
    return value.key if isinstance(value, KVPool) else value
