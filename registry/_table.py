"""The dispatch table: an immutable snapshot of plugins, choices and settings, swapped whole.

Readers take no lock: they read one reference. Writers build a new table under a lock.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hal import _env, _trace
from hal import ops as _ops
from hal._errors import SelectionError
from hal.registry import _config, _scope
from hal.registry._config import Choice
from hal.registry._discover import Entry, Found, Observers, discover
from hal.registry._isolate import READY, State
from hal.registry._manifest import Backend, Impl

if TYPE_CHECKING:
    from hal.ops.spec import OpSpec

CHECKS = {"off": 0, "args": 1, "full": 2}


class Table:
    """One snapshot. Its caches are filled as calls of new kinds come; everything else never changes."""

    def __init__(
        self,
        found: Found,
        settings: Mapping[str, Any],
        environment: _env.Environment,
        warned: set[tuple[str, ...]] | None = None,
    ) -> None:
        self.found = found
        self.entries = found.entries
        self.observers = Observers(found.managers)
        self.settings = dict(settings)
        self.environment = environment
        self.lane = environment["HAL_LANE"]
        if self.lane == "interpreter":
            _enter_interpreter()
        self.fallback = settings.get("fallback") or environment["HAL_FALLBACK"]
        self.checks_name = settings.get("checks") or environment["HAL_CHECKS"]
        self.checks = CHECKS[self.checks_name]
        self.trace = _trace.setting(settings.get("trace"))
        _env.get_list("HAL_ENGINES")  # a wrong name is an error wherever it is read first
        self.op_names = (*_ops.BUILTIN, *(n for n in found.specs if n not in _ops.BUILTIN))
        self._names = {
            n: {e.title(i) for op in (e.manifest.ops if e.manifest else ()) for i in e.impls(op)}
            for n, e in self.entries.items()
        }
        self._parsed: dict[tuple[str, str], Choice] = {}
        named = (
            (settings.get("backend"), "hal.configure(backend={!r})"),
            (environment["HAL_BACKEND"], "HAL_BACKEND={}"),
        )
        self.choices = tuple(self.parse(text, shown) for text, shown in named if text)
        self.caches: dict[str, dict[Any, tuple[Callable[..., Any], Callable[..., Any] | None]]] = {
            op: {} for op in self.op_names
        }
        """By the kind of call: the backend's function, and what takes over a call that was read, if it does."""
        self.warned = set() if warned is None else warned

    def parse(self, text: str, shown: str) -> Choice:
        """A choice whose names are in this table; what was parsed once is remembered."""
        known = self._parsed.get((text, shown)) if isinstance(text, str) else None
        if known is None:
            known = _config.parse(text, shown.format)
            _config.verify(known, self._names, self.op_names, self.found.blocked)
            if len(self._parsed) >= 1000:
                self._parsed.clear()
            self._parsed[text, shown] = known
        return known

    def spec(self, op: str) -> OpSpec:
        """The contract of an op; a `SelectionError` with did-you-mean for an unknown one."""
        if op not in self.op_names:
            raise SelectionError(
                f"hal: unknown op {op}{_env.did_you_mean(op, self.op_names)}; known: {', '.join(self.op_names)}"
            )
        return self.found.specs[op] if op in self.found.specs else _ops.get_spec(op)

    def levels(self, backend: str | None, scope: tuple[str, ...]) -> list[Choice]:
        """Every level that made a choice, the strongest first."""
        first = [self.parse(backend, "backend={!r}")] if backend is not None else []
        return [*first, *(self.parse(text, "hal.use({!r})") for text in scope), *self.choices]


def _enter_interpreter() -> None:
    """Triton reads TRITON_INTERPRET once, when a kernel is decorated."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    if "triton" in sys.modules:
        raise SelectionError(
            "hal: HAL_LANE=interpreter: triton is imported already without it; "
            "set TRITON_INTERPRET=1 before Python starts"
        )
    os.environ["TRITON_INTERPRET"] = "1"


class Live:
    """The process's state: the current table, and what was set from Python."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.settings: dict[str, Any] = {}
        self.registered: dict[str, Entry] = {}
        self.environment: _env.Environment | None = None
        """As it was read at the first need, or by the last `reload`: always before plugins were loaded."""
        self.table: Any = None
        self.loading = False

    def current(self) -> Table:
        """The table; built at the first need."""
        table = self.table
        if table is None:
            with self.lock:
                table = self.table
                if table is None:
                    table = self._discover(self.registered, self.environment or _env.Environment.read())
        return table  # type: ignore[no-any-return]

    def rediscover(self, registered: Mapping[str, Entry], environment: _env.Environment | None = None) -> None:
        """A new table of the plugins and of what was registered; on an error the old one stays.

        Args:
            environment: None: as it was read last.
        """
        with self.lock:
            self._discover(registered, environment or self.current().environment)

    def _discover(self, registered: Mapping[str, Entry], environment: _env.Environment) -> Table:
        settings, before = dict(self.settings), self.loading
        self.loading = True
        try:
            table = Table(discover(registered, environment.plugins), settings, environment)
        finally:
            self.loading = before
        self.environment, self.registered, self.table = environment, dict(registered), table
        return table

    def configure(self, settings: Mapping[str, Any]) -> None:
        """A new table of the same plugins; on an error the old one stays."""
        with self.lock:
            old = self.current()
            # Other settings make no new warnings; other plugins and another environment do.
            self.table = Table(old.found, settings, old.environment, old.warned)
            self.settings = dict(settings)


live = Live()
os.register_at_fork(after_in_child=lambda: setattr(live, "lock", threading.RLock()))


def current() -> Table:
    """The table in force: plugins, choices and settings, as they were when it was made; built at the first need.

    Raises:
        SelectionError: the environment names what does not exist.
    """
    return live.current()


def reload() -> None:
    """Reads the environment and the plugins again. What `hal.configure` set and `hal.register` added stays."""
    with live.lock:
        live.rediscover(live.registered, _env.Environment.read())


def configure(
    *, backend: str | None = None, fallback: str | None = None, checks: str | None = None, trace: str | None = None
) -> None:
    """Process-wide settings, for an engine's flags; stronger than the environment.

    None leaves a setting as it is, ``""`` unsets it.

    Args:
        backend: the grammar of ``HAL_BACKEND``.
        fallback: ``warn`` or ``error``.
        checks: ``args``, ``full`` or ``off``.
        trace: the grammar of ``HAL_TRACE``; functions that were bound before are not counted.

    Raises:
        SelectionError: an unknown name or value; nothing is changed.

    Example:
        >>> import hal
        >>> hal.configure(checks="full")
        >>> hal.configure(checks="")
    """
    for name, value, allowed in (
        ("backend", backend, ()),
        ("fallback", fallback, _env.CHOICES["HAL_FALLBACK"]),
        ("checks", checks, _env.CHOICES["HAL_CHECKS"]),
    ):
        if value is not None and not isinstance(value, str):
            raise SelectionError(f"hal: configure({name}={value!r}): expected a text, or None")
        if allowed and value and value not in allowed:
            near = _env.did_you_mean(value, allowed)
            raise SelectionError(f"hal: configure({name}={value!r}): expected one of {', '.join(allowed)}{near}")
    given = {"backend": backend, "fallback": fallback, "checks": checks, "trace": trace}
    with live.lock:
        if live.loading:
            raise SelectionError("hal: configure() by a plugin that is being loaded: settings are the user's")
        live.configure({**live.settings, **{k: v for k, v in given.items() if v is not None}})


def use(backend: str) -> AbstractContextManager[None]:
    """Chooses backends for a block of code, in this thread or task alone.

    In the code of a generator the block holds while the generator runs, not while it is paused: what it yields to goes
    on as it was. A generator that is a context manager (`contextlib`) or a fixture of pytest's yields to the very code
    that is meant, and there it does hold.

    Args:
        backend: the grammar of ``HAL_BACKEND``. In nested blocks, per op, the innermost that says anything decides.

    Example:
        >>> import torch, hal
        >>> with hal.use("reference"):
        ...     hal.get_last_loc(torch.zeros(1, 4, dtype=torch.int32), torch.tensor([0]), torch.tensor([1]))
        tensor([0])
    """
    return _Use(backend)


class _Use(ContextDecorator):
    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.blocks: list[_scope.Block] = []

    def _recreate_cm(self) -> _Use:
        return _Use(self.backend)

    def __enter__(self) -> None:
        live.current().parse(self.backend, "hal.use({!r})")
        self.blocks.append(_scope.enter(self.backend, _scope.caller()))

    def __exit__(self, *error: object) -> None:
        _scope.leave(self.blocks.pop())


def register(
    op: str,
    *,
    backend: str,
    devices: Sequence[str] = ("cpu",),
    supports: Callable[..., Any] | None = None,
    name: str = "",
    priority: int = 0,
    graph_safe: bool = False,
    deterministic: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as `backend`'s implementation of `op`, for notebooks and tests. Returns a decorator.

    Args:
        op: an op's name.
        backend: a name that no installed backend has.
        devices: the device types it takes.
        supports: `Signature` -> None, or the reason why not.
        name, priority, graph_safe, deterministic: as in `hal.registry.Impl`.

    Raises:
        SelectionError: an unknown op, a taken name, or another implementation of the same (op, backend).

    Example:
        >>> import torch, hal
        >>> @hal.register("get_last_loc", backend="mine")
        ... def get_last_loc(req_to_token, req_pool_indices, prefix_lens):
        ...     return torch.full_like(prefix_lens, 7)
        >>> hal.get_last_loc(torch.zeros(1, 4, dtype=torch.int32), torch.tensor([0]), torch.tensor([1]), backend="mine")
        tensor([7])
    """

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        with live.lock:
            table = live.current()
            table.spec(op)
            impl = Impl(fn, supports, name, priority, graph_safe, deterministic)
            entry = live.registered.get(backend)
            if entry is None and (backend in table.entries or backend in ("auto", "reference")):
                raise SelectionError(f"hal: register({op!r}): the name {backend} is taken; choose another")
            ops: dict[str, Any] = dict(entry.manifest.ops) if entry and entry.manifest else {}
            # A lone string goes on as it is, for `Backend` to refuse.
            lanes = {"device": devices if isinstance(devices, str) else tuple(devices)}
            known = entry.impls(op) if entry else ()
            if impl in known:
                return fn
            if any(i.name == name for i in known):
                raise SelectionError(
                    f"hal: register({op!r}, backend={backend!r}): there is another implementation already; give it a "
                    f"name, or hal.unregister({backend!r}) first"
                )
            if entry and entry.manifest and entry.manifest.lanes != lanes:
                raise SelectionError(
                    f"hal: register({op!r}, backend={backend!r}): devices {tuple(devices)}; "
                    f"expected those of the backend, {entry.manifest.lanes['device']}"
                )
            ops[op] = (*known, impl)
            try:
                manifest = Backend(backend, lanes, ops)
            except (TypeError, ValueError) as e:
                raise SelectionError(f"hal: register({op!r}): {e}") from None
            entry = Entry(backend, manifest, "registered", "hal.register")
            live.rediscover({**live.registered, backend: entry})
        return fn

    return add


def unregister(backend: str) -> None:
    """Takes back everything that `hal.register` added under this name."""
    with live.lock:
        live.rediscover({n: e for n, e in live.registered.items() if n != backend})


def table() -> Mapping[str, Mapping[str, tuple[tuple[Impl, State], ...]]]:
    """The read-only map op -> backend -> its implementations, highest priority first, each with its state.

    The state is that of the current lane, or of ``device`` where a backend has no such lane.

    ``reference`` is in every row. A backend without the op has an empty tuple.
    """
    current = live.current()
    rows: dict[str, Mapping[str, tuple[tuple[Impl, State], ...]]] = {}
    for op in current.op_names:
        row: dict[str, tuple[tuple[Impl, State], ...]] = {
            "reference": ((Impl(current.spec(op).reference, deterministic=True), READY),)
        }
        for name, entry in current.entries.items():
            lane = current.lane if current.lane in entry.lanes else "device"
            row[name] = tuple((impl, entry.impl_state(impl, lane)) for impl in entry.impls(op))
        rows[op] = MappingProxyType(row)
    return MappingProxyType(rows)
