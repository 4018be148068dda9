"""What a plugin declares: `Backend` and `Impl`, and the hooks it may implement. Imports no framework."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from hal.ops.spec import OpSpec

API = 1
"""The version of this interface. A backend of another is `incompatible`; see docs/compatibility.md."""

LANES = ("device", "interpreter", "lowered")
NAME = re.compile(r"[a-z0-9_][a-z0-9_-]*")
IMPL_NAME = re.compile(r"[A-Za-z0-9_-]+")

hookspec = pluggy.HookspecMarker("hal")
hookimpl = pluggy.HookimplMarker("hal")


@dataclass(frozen=True)
class Impl:
    """One implementation of one op.

    Args:
        fn: ``"pkg.module:function"``, imported when bound. Its signature is the op's.
        supports: ``"pkg.module:function"``: `hal.ops` `Signature` -> None (yes) or the reason why not.
            Without it: everything the contract allows.
        name: needed where a backend has several for one op: ``cuda/flashinfer``.
        priority: among several that support a call, the highest is taken.
        graph_safe: can be captured into a graph and replayed with new values.
        deterministic: the same input gives the same bits.
        named: taken only where it is named in full, ``decode_attention=cuda/flashinfer``; never by ``auto`` or by the
            backend's bare name.
        lanes: those of the backend's that it has; empty: all.
        requires: distributions that it needs beside the backend's.
        install: the command that brings them, for messages; without it ``pip install`` and the requirement.
        probe: ``"pkg.module:function"``: () -> None, or why it can't run here.
        note: what a reader of the support table must know of it.
    """

    fn: str | Callable[..., Any]
    supports: str | Callable[..., Any] | None = None
    name: str = ""
    priority: int = 0
    graph_safe: bool = False
    deterministic: bool = False
    named: bool = False
    lanes: Sequence[str] = ()
    requires: Sequence[str] = ()
    install: str = ""
    probe: str | Callable[[], str | None] | None = None
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("lanes", "requires"):
            _words(f"an Impl's {name}", getattr(self, name))
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _target("an Impl's fn", self.fn, none=False)
        for name in ("supports", "probe"):
            _target(f"an Impl's {name}", getattr(self, name))
        for name in ("name", "install", "note"):
            _kind(f"an Impl's {name}", getattr(self, name), str)
        _kind("an Impl's priority", self.priority, int)
        for name in ("graph_safe", "deterministic", "named"):
            _kind(f"an Impl's {name}", getattr(self, name), bool)
        if self.named and not self.name:
            raise ValueError(f"an Impl that is taken where it is named needs a name: {self.fn!r}")


@dataclass(frozen=True)
class Backend:
    """A manifest: what a plugin offers, as data.

    Args:
        name: as in ``HAL_BACKEND``: lower case letters, digits, ``_`` and ``-``.
        lanes: lane -> the device types whose tensors it takes, e.g. ``{"device": ("npu",), "lowered": ("cpu",)}``.
        ops: op -> one `Impl` or several.
        api: the version of this interface that the manifest was written for.
        requires: distributions, with versions, e.g. ``("triton>=3.6",)``; or lane -> distributions.
        extra: the extra of its distribution that brings them, for the remedy in messages.
        probe: ``"pkg.module:function"``: () -> None, or why the lane ``device`` can't run here; or lane -> such.
        limits: what `supports` may refuse, by name -> a sentence. A refusal starts with one of these names.
        warmup: ``"pkg.module:function"``: (ops, device, **options) -> None; compiles and allocates ahead of time. If it
            has a parameter ``progress``, it gets a function to call with how much is done, 0 to 1, and what begins now.
        inspect: ``"pkg.module:function"``: (kernel: str | None) -> rows for ``hal inspect``.
        tune: ``"pkg.module:function"``: () -> rows; measures this machine for ``hal tune``.
        status: ``"pkg.module:function"``: () -> mapping of what an operator should know where the backend is ready
            (how kernels are launched, what memory is held), for ``hal info``.
        waivers: ``"pkg.module:NAME"``: the backend's declared deviations from the conformance suite.
    """

    name: str
    lanes: Mapping[str, Sequence[str]]
    ops: Mapping[str, Impl | Sequence[Impl]]
    api: int = API
    requires: Sequence[str] | Mapping[str, Sequence[str]] = ()
    extra: str = ""
    probe: str | Callable[[], str | None] | Mapping[str, str | Callable[[], str | None]] | None = None
    limits: Mapping[str, str] = field(default_factory=dict)
    warmup: str | Callable[..., Any] | None = None
    inspect: str | Callable[..., Any] | None = None
    tune: str | Callable[..., Any] | None = None
    status: str | Callable[..., Any] | None = None
    waivers: str | None = None

    def __post_init__(self) -> None:
        """Raises a `TypeError` or `ValueError` where the manifest is not what it should be: one word for a list of one
        is the commonest slip, and would be read letter by letter."""
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise ValueError(f"the backend's name {self.name!r}: expected lower case letters, digits, _ and -")
        if not isinstance(self.lanes, Mapping) or not self.lanes:
            raise TypeError(f"{self.name}: lanes: expected lane -> device types; got {self.lanes!r}")
        for lane, devices in self.lanes.items():
            if lane not in LANES:
                raise ValueError(f"{self.name}: unknown lane {lane!r}; known: {', '.join(LANES)}")
            _words(f"{self.name}: lanes[{lane!r}]", devices)
        several = self.requires.values() if isinstance(self.requires, Mapping) else [self.requires]
        for requires in several:
            _words(f"{self.name}: requires", requires)
        _kind(f"{self.name}: extra", self.extra, str)
        for lane, probe in self.probe.items() if isinstance(self.probe, Mapping) else [("", self.probe)]:
            _target(f"{self.name}: probe{f'[{lane!r}]' if lane else ''}", probe)
        for name in ("warmup", "inspect", "tune", "status"):
            _target(f"{self.name}: {name}", getattr(self, name))
        if self.waivers is not None:
            _kind(f"{self.name}: waivers", self.waivers, str)
        if not isinstance(self.limits, Mapping) or not all(
            isinstance(word, str) for pair in self.limits.items() for word in pair
        ):
            raise TypeError(f"{self.name}: limits: expected name -> a sentence; got {self.limits!r}")
        if not isinstance(self.ops, Mapping):
            raise TypeError(f"{self.name}: ops: expected op -> Impl; got {self.ops!r}")
        for op, found in self.ops.items():
            _kind(f"{self.name}: the name of an op", op, str)
            impls = [found] if not isinstance(found, Sequence) or isinstance(found, str) else list(found)
            for impl in impls:
                if not isinstance(impl, Impl):
                    raise TypeError(f"{self.name}: ops[{op!r}]: expected an Impl or several; got {impl!r}")
                if impl.name and not IMPL_NAME.fullmatch(impl.name):
                    raise ValueError(f"{self.name}: the name {impl.name!r} of an implementation of {op}")
                unknown = [lane for lane in impl.lanes if lane not in self.lanes]
                if unknown:
                    raise ValueError(
                        f"{self.name}: {op} has an Impl on the lane {unknown[0]!r}, which {self.name} has not"
                    )
            names = [i.name for i in impls]
            if len(set(names)) != len(names):
                raise ValueError(f"{self.name}: two implementations of {op} have one name: {names}")
        # Copies: what a plugin does to its own dictionaries afterwards was never looked at.
        ops = {op: f if isinstance(f, Impl) else tuple(f) for op, f in self.ops.items()}
        lanes = {lane: tuple(devices) for lane, devices in self.lanes.items()}
        for name, copy in (("lanes", lanes), ("ops", ops), ("limits", dict(self.limits))):
            object.__setattr__(self, name, copy)

    def impls(self, op: str) -> tuple[Impl, ...]:
        """The implementations of `op`, highest priority first."""
        found = self.ops.get(op, ())
        several = (found,) if isinstance(found, Impl) else tuple(found)
        return tuple(sorted(several, key=lambda i: -i.priority))


def _words(what: str, words: object) -> None:
    if isinstance(words, str) or not isinstance(words, Sequence) or not all(isinstance(w, str) for w in words):
        raise TypeError(f"{what}: expected a sequence of strings; got {words!r}")


def _kind(what: str, value: object, kind: type) -> None:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{what}: expected {_KINDS[kind]}; got {value!r}")


_KINDS = {str: "a string", int: "an integer", bool: "True or False"}


def _target(what: str, value: object, none: bool = True) -> None:
    if isinstance(value, str) or (none and value is None):
        return
    if not callable(value) or type(value).__hash__ is None:
        # Implementations are keys of the registry's tables.
        raise TypeError(f"{what}: expected 'pkg.module:function', or a function; got {value!r}")


class Hooks:
    """The hooks of a plugin. Each plugin's are called alone, and what it raises stays with it."""

    @hookspec
    def hal_backend(self) -> Backend | Sequence[Backend]:  # type: ignore[empty-body]
        """The plugin's manifest, or several."""

    @hookspec
    def hal_ops(self) -> Sequence[OpSpec]:  # type: ignore[empty-body]
        """Ops of the plugin's own: dispatched as ``hal.ops.<name>``, proven by the same suite."""

    @hookspec
    def hal_on_bind(self, op: str, backend: str, lane: str) -> None:
        """Observer: an implementation was chosen for the first call of its kind."""

    @hookspec
    def hal_on_reject(self, op: str, backend: str, reason: str) -> None:
        """Observer: a ready backend refused a call."""

    @hookspec
    def hal_on_fallback(self, op: str, backend: str, reason: str) -> None:
        """Observer: `auto` passed over `backend`, which should have run the op."""
