"""Who makes the calls: the process that a backend runs in, or, while developing, this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from hal._devices import lane_on
from hal._remote.perform import Hands
from hal._remote.target import Target
from hal._remote.wire import Task
from hal.conformance._arena import Arena


class Died(BaseException):
    """The process that made the calls is gone; the text says how. No `Exception`: nothing that tries again catches it.

    Attributes:
        crashed: by itself; else it fell silent and was ended.
    """

    def __init__(self, reason: str, crashed: bool) -> None:
        super().__init__(reason)
        self.crashed = crashed


class Caller(Protocol):
    """A backend as the proofs see it: memory to put arguments in, and calls that can be asked for."""

    @property
    def backend(self) -> str: ...

    @property
    def lane(self) -> str: ...

    @property
    def device(self) -> str:
        """The type of the device."""

    @property
    def limits(self) -> tuple[str, ...] | None:
        """The names with which a refusal may start; None: there is no manifest to ask."""

    @property
    def takes(self) -> tuple[str, ...] | None:
        """The device types whose tensors the lane takes; None: there is no manifest to ask."""

    @property
    def arena(self) -> Arena: ...

    def ready(self, op: str) -> str | None:
        """None, or why the backend has no such op or can't run."""

    def do(self, task: Task) -> Mapping[str, Any]:
        """What came of a task; raises `Died`."""


class Local:
    """A backend in this process: for the suite's own tests, pytest and replays. It certifies nothing."""

    _arena: Arena | None = None

    def __init__(self, target: Target) -> None:
        self.target = target
        self.backend, self.limits = target.backend, target.limits
        self.lane = lane_on(target.lane, target.device)
        self.takes = target.takes
        self.device = target.device.type
        if Local._arena is None:
            Local._arena = Arena()
        self.arena = Local._arena
        self.hands = Hands(target, self.arena.memory)
        self.threads = torch.get_num_threads()

    def ready(self, op: str) -> str | None:
        return self.target.ready(op)

    def do(self, task: Task) -> Mapping[str, Any]:
        # As many threads as the backend would have outside of the suite.
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            return self.hands.do(task)
        finally:
            torch.set_num_threads(before)


def caller_of(target: Target | Caller) -> Caller:
    return target if hasattr(target, "do") else Local(target)  # type: ignore[return-value]
