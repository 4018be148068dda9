"""A backend on a lane and a device, through a seam of a few questions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any, Protocol

import torch

import hal
from hal._errors import BackendError, NoBackendError, SelectionError
from hal._remote.watch import code_of
from hal.ops import get_spec as spec_of
from hal.ops.spec import Signature
from hal.registry import Impl, current
from hal.registry._discover import Entry, resolve
from hal.registry._dispatch import dispatcher
from hal.registry._select import impls_named


@dataclass(frozen=True)
class Bound:
    """A backend's own launcher of one op, and what its manifest says of it."""

    fn: Callable[..., Any]
    supports: Callable[[Signature], str | None]
    impl: str
    graph_safe: bool = True
    deterministic: bool = True


class Target(Protocol):
    """A backend to make calls of. `RegistryTarget` is the real one, `DirectTarget` a lone function."""

    backend: str
    lane: str
    device: torch.device
    limits: tuple[str, ...] | None
    """The names with which a refusal may start; None: there is no manifest to ask."""
    takes: tuple[str, ...] | None
    """The device types whose tensors the lane takes; None: there is no manifest to ask."""

    def ready(self, op: str) -> str | None:
        """None, or why the backend has no such op or can't run."""

    def bound(self, op: str, arguments: Mapping[str, Any] | None = None) -> Bound:
        """The launcher that `hal.bind` hands out for such arguments; NoBackendError where it refuses them."""

    def implementations(self, op: str) -> tuple[Bound, ...]:
        """All launchers of the op on this backend, whatever they support."""

    def dispatch(self, op: str, arguments: Mapping[str, Any]) -> Any:
        """The public function, with this backend named."""

    def foreign(self, op: str) -> dict[CodeType, str]:
        """Code that must not run while this backend does: code -> whose it is."""


@dataclass
class DirectTarget:
    """A function that nobody registered: for tests."""

    fns: Mapping[str, Bound]
    backend: str = "direct"
    lane: str = "device"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    limits: tuple[str, ...] | None = None
    takes: tuple[str, ...] | None = None

    @classmethod
    def of(cls, op: str, fn: Callable[..., Any], device: str = "cpu") -> DirectTarget:
        """A function that supports everything."""
        return cls({op: Bound(fn, always, "direct")}, device=torch.device(device))

    def ready(self, op: str) -> str | None:
        return None if op in self.fns else "unimplemented"

    def bound(self, op: str, arguments: Mapping[str, Any] | None = None) -> Bound:
        found = self.fns[op]
        if arguments is not None:
            why = found.supports(spec_of(op).sign(arguments))
            if why is not None:
                raise NoBackendError(why)
        return found

    def implementations(self, op: str) -> tuple[Bound, ...]:
        return (self.fns[op],)

    def dispatch(self, op: str, arguments: Mapping[str, Any]) -> Any:
        spec_of(op).check_call(arguments)
        return self.bound(op, arguments).fn(**arguments)

    def foreign(self, op: str) -> dict[CodeType, str]:
        return {spec_of(op).reference.__code__: "hal's reference"}


def always(signature: Signature) -> str | None:
    """Supports everything that the contract allows."""
    return None


@dataclass
class RegistryTarget:
    """A backend as the registry knows it, on one lane of it."""

    backend: str
    lane: str
    device: torch.device
    limits: tuple[str, ...] | None = None
    takes: tuple[str, ...] | None = None

    @classmethod
    def of(cls, backend: str, lane: str, device: str | None = None) -> RegistryTarget:
        """The backend on the lane that the process is in (``HAL_LANE``).

        Raises:
            SelectionError: no such backend, or no such lane of it.
        """
        table = current()
        if backend == "reference":
            return cls(backend, lane, torch.device(device or "cpu"))
        table.parse(backend, "backend={!r}")
        entry = table.entries[backend.partition("/")[0]]
        manifest = entry.manifest
        if manifest is None:
            raise SelectionError(f"hal: {backend} is {entry.state(lane)}")
        if lane not in manifest.lanes:
            raise SelectionError(f"hal: {backend} has no lane {lane}; it has {', '.join(manifest.lanes)}")
        where = torch.device(device or manifest.lanes[lane][0])
        if where.type not in manifest.lanes[lane]:
            raise SelectionError(f"hal: {backend} takes {', '.join(manifest.lanes[lane])} in lane {lane}, not {where}")
        return cls(backend, lane, where, tuple(manifest.limits), tuple(manifest.lanes[lane]))

    @property
    def entry(self) -> Entry:
        return current().entries[self.backend.partition("/")[0]]

    def impls(self, op: str) -> tuple[Impl, ...]:
        """What is called: what the backend's name may take, or the one implementation that is named."""
        return impls_named(self.entry, op, self.backend.partition("/")[2])

    def ready(self, op: str) -> str | None:
        if self.backend == "reference":
            return None
        states = [self.entry.impl_state(i, self.lane) for i in self.impls(op)]
        if not states:
            return str(self.entry.op_state(op, self.lane)) if "/" not in self.backend else "unimplemented"
        return None if any(s.ready for s in states) else str(states[0])

    def bound(self, op: str, arguments: Mapping[str, Any] | None = None) -> Bound:
        if arguments is None:
            return self.implementations(op)[0]
        told = hal.explain(op, backend=self.backend, **arguments)
        if told.chosen is None:
            mine = [v for v in told.verdicts if v.name.partition("/")[0] == self.entry.name]
            if all(v.state == "rejected" for v in mine):
                raise NoBackendError("; ".join(v.reason for v in mine))
            raise BackendError("; ".join(f"{v.name} is {v.state}: {v.reason}" for v in mine))
        space = hal.bind(self.device, backend=self.backend, like={op: arguments})
        fn = getattr(space, op)
        if self.backend == "reference":
            return Bound(fn, always, "reference", graph_safe=op != "kv_transfer")
        impl = next(i for i in self.impls(op) if self.entry.title(i) == told.chosen.name)
        return self._make_bound(impl, told.chosen.name, fn)

    def implementations(self, op: str) -> tuple[Bound, ...]:
        table = current()
        spec = table.spec(op)
        if self.backend == "reference":
            return (Bound(spec.reference, always, "reference", graph_safe=op != "kv_transfer"),)
        entry = self.entry
        out = []
        for impl in self.impls(op):
            fn = entry.bind(impl, spec.signature) if entry.impl_state(impl, self.lane).ready else None
            if callable(fn):
                out.append(self._make_bound(impl, entry.title(impl), fn))
        return tuple(out)

    @staticmethod
    def _make_bound(impl: Impl, title: str, fn: Callable[..., Any]) -> Bound:
        supports = always if impl.supports is None else resolve(impl.supports)
        return Bound(fn, supports, title, impl.graph_safe, impl.deterministic)

    def dispatch(self, op: str, arguments: Mapping[str, Any]) -> Any:
        return _dispatcher(op)(**arguments, backend=self.backend)

    def foreign(self, op: str) -> dict[CodeType, str]:
        out: dict[CodeType, str] = {}
        if self.backend != "reference":
            reference = code_of(current().spec(op).reference)
            if reference is not None:
                out[reference] = "hal's reference"
        mine = () if self.backend == "reference" else self.impls(op)
        for entry in current().entries.values():
            for impl in entry.impls(op):
                if impl in mine:
                    continue
                fn = impl.fn
                if isinstance(fn, str):
                    # Only what is imported can run; nothing is imported to look at it.
                    module, _, attribute = fn.partition(":")
                    fn = getattr(sys.modules.get(module), attribute, None)  # type: ignore[assignment]
                code = code_of(fn) if callable(fn) else None
                if code is not None:
                    out[code] = entry.title(impl)
        return out


@cache
def _dispatcher(op: str) -> Callable[..., Any]:
    return dispatcher(op)
