"""Finding plugins and saying what state each backend is in. One bad plugin never takes another with it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import Any

import pluggy

from hal._env import did_you_mean
from hal._errors import BackendError, SelectionError
from hal._version import __version__
from hal.registry._isolate import READY, State, ask, attempt, note, same_environment, watch
from hal.registry._manifest import API, Backend, Hooks, Impl
from hal.registry._points import BUILTIN, GROUP, RESERVED, Point, entry_points
from hal.registry._requirements import DISTRIBUTION, excludes_hal, missing


@dataclass(eq=False)
class Entry:
    """A backend in the table: its manifest, where it came from, and its state per lane."""

    name: str
    manifest: Backend | None
    origin: str
    """``built-in``, ``plugin`` or ``registered``."""
    distribution: str = ""
    fault: State | None = None
    """Why the manifest itself is of no use, if so."""
    _states: dict[str, State] = field(default_factory=dict)
    _impl_states: dict[tuple[Impl, str], State] = field(default_factory=dict)
    _bound: dict[Impl, Callable[..., Any] | State] = field(default_factory=dict)

    @property
    def lanes(self) -> tuple[str, ...]:
        return tuple(self.manifest.lanes) if self.manifest else ()

    @property
    def third_party(self) -> bool:
        return self.origin != "built-in"

    def impls(self, op: str) -> tuple[Impl, ...]:
        return self.manifest.impls(op) if self.manifest else ()

    def usual(self, op: str) -> tuple[Impl, ...]:
        """Those that may run without being named in full, highest priority first."""
        return tuple(i for i in self.impls(op) if not i.named)

    def title(self, impl: Impl) -> str:
        return f"{self.name}/{impl.name}" if impl.name else self.name

    def state(self, lane: str = "device") -> State:
        """The state on a lane; probed once."""
        if self.fault or not self.manifest:
            return self.fault or State("broken", "no manifest")
        if lane not in self.manifest.lanes:
            return State(
                "unavailable", f"it has no lane {lane}; it has {', '.join(self.lanes)}", "set HAL_LANE to one of those"
            )
        if lane not in self._states:
            self._states[lane] = self._examine(lane)
        return self._states[lane]

    def _examine(self, lane: str) -> State:
        manifest = self.manifest
        assert manifest is not None
        requires = manifest.requires
        if isinstance(requires, Mapping):
            requires = requires.get(lane, ())
        extra = f'pip install "{self.distribution or DISTRIBUTION}[{manifest.extra}]"' if manifest.extra else ""
        probe = manifest.probe
        if isinstance(probe, Mapping):
            probe = probe.get(lane)
        elif lane != "device":
            probe = None
        return examine(requires, extra, probe, self.name)

    def impl_state(self, impl: Impl, lane: str = "device") -> State:
        """The state of one implementation on a lane: the backend's, unless it needs more than that."""
        state = self.state(lane)
        if not state.ready or not (impl.lanes or impl.requires or impl.probe):
            return state
        if impl.lanes and lane not in impl.lanes:
            return State("unavailable", f"it has no lane {lane}; it has {', '.join(impl.lanes)}")
        if (impl, lane) not in self._impl_states:
            found = examine(impl.requires, impl.install, impl.probe, self.title(impl))
            self._impl_states[impl, lane] = found
        return self._impl_states[impl, lane]

    def bind(self, impl: Impl, signature: inspect.Signature) -> Callable[..., Any] | State:
        """The function of `impl`, imported and compared with the contract; or why it can't be had."""
        found = self._bound.get(impl)
        if found is None:
            found = self._bound[impl] = self._import(impl, signature)
        return found

    def _import(self, impl: Impl, signature: inspect.Signature) -> Callable[..., Any] | State:
        def imported() -> Callable[..., Any] | State:
            fn = resolve(impl.fn)
            got = inspect.signature(fn)
            if not alike(got, signature):
                said = f"{impl.fn} has the signature {plain(got)}; the contract's is {plain(signature)}"
                return State("broken", said)
            return fn

        with watch(f"importing {impl.fn}, of the backend {self.title(impl)}"):
            return attempt(f"importing {impl.fn}", imported)

    def failure(self, impl: Impl) -> State | None:
        """Why an implementation that was asked for could not be had, if so."""
        found = self._bound.get(impl)
        return found if isinstance(found, State) else None

    def op_state(self, op: str, lane: str = "device", which: str = "") -> State:
        """The state of an op here, or of the implementation named `which` alone."""
        found = [i for i in self.impls(op) if i.name == which] if which else self.usual(op)
        if self.manifest and not found:
            named = ", ".join(self.title(i) for i in self.impls(op) if i.named)
            but = f" but {named}, taken where it is named" if named and not which else ""
            return State("unimplemented", f"{self.name} has no {op}{f' named {which}' if which else ''}{but}")
        return self.state(lane)


@dataclass(frozen=True)
class Found:
    """What discovery brought."""

    entries: Mapping[str, Entry]
    specs: Mapping[str, Any]
    managers: tuple[pluggy.PluginManager, ...]
    """One for each plugin: what a plugin is can't disturb another's registration."""
    blocked: tuple[str, ...]
    """Entry points that HAL_PLUGINS kept from loading."""


def discover(registered: Mapping[str, Entry], allowed: Collection[str] | None = None) -> Found:
    """Loads every allowed entry point, one by one.

    Args:
        registered: the backends that `hal.register` added.
        allowed: the names in HAL_PLUGINS; None: all.

    Raises:
        SelectionError: `allowed` names what does not exist.
    """
    points = entry_points()
    names = list(dict.fromkeys(p.name for p in points))
    for name in allowed or ():
        if name not in names:
            raise SelectionError(
                f"hal: HAL_PLUGINS: there is no entry point {name}{did_you_mean(name, names)}; there are: "
                f"{', '.join(names)}, or none"
            )
    entries: dict[str, Entry] = {}
    specs: dict[str, Any] = {}
    managers: list[pluggy.PluginManager] = []
    for point in points:
        if allowed is not None and point.name not in allowed:
            continue
        others = ",".join(n for n in allowed or names if n != point.name) or "none"
        found, ops = _load(point, managers, others)
        for entry in found:
            entries[entry.name] = _merge(entries.get(entry.name), entry)
        for spec in ops:
            if spec.name in specs:
                fault = State("broken", f"its op {spec.name} is another plugin's already", "uninstall one")
                entries[point.title] = Entry(point.title, None, "plugin", point.distribution, fault)
            specs.setdefault(spec.name, spec)
    for name, entry in registered.items():
        entries[name] = _merge(entries.get(name), entry)
    order = sorted(
        entries.values(), key=lambda e: (e.third_party, list(BUILTIN).index(e.name) if e.name in BUILTIN else 9, e.name)
    )
    blocked = () if allowed is None else tuple(p.name for p in points if p.name not in allowed)
    return Found({e.name: e for e in order}, specs, tuple(managers), blocked)


def _load(point: Point, managers: list[pluggy.PluginManager], others: str) -> tuple[list[Entry], list[Any]]:
    """The backends and ops of one entry point; its manager is added to `managers` where it has any."""
    origin = "built-in" if point.builtin else "plugin"
    who = f"{point.name} ({point.distribution})"

    def load() -> tuple[list[Entry], list[Any]] | State:
        if point.fault:
            return point.fault
        if not point.builtin and point.name in RESERVED:
            return State("broken", f"the name {point.name} is reserved for hal itself", "rename the entry point")
        plugin = attempt(f"importing {point.value}", EntryPoint(point.name, point.value, GROUP).load)
        if isinstance(plugin, State):
            needs = excludes_hal(point.dist)
            if not needs:
                return plugin
            version = point.dist.version if point.dist else ""
            both = f"{point.distribution} {version} needs {needs}; this is {DISTRIBUTION} {__version__}"
            return State("incompatible", both, f"install a {point.distribution} for it")
        if any(known is plugin for m in managers for _, known in m.list_name_plugin()):
            return State("broken", f"{point.value} is another entry point's plugin already", "remove one")
        manager = pluggy.PluginManager("hal")
        manager.add_hookspecs(Hooks)
        for where, step in (
            ("its hooks", lambda: manager.register(plugin, name=who)),
            ("its hook hal_backend", lambda: backends.extend(_call_alone(manager, "hal_backend"))),
            ("its hook hal_backend", lambda: entries.extend(_make_entry(b, origin, point) for b in backends)),
            ("its hook hal_ops", lambda: specs.extend(map(_op, _call_alone(manager, "hal_ops")))),
        ):
            failed = attempt(where, step)
            if isinstance(failed, State):
                return failed
        hooks = attempt("its hooks", lambda: manager.get_hookcallers(plugin))
        if not hooks:
            said = f"{point.value} has no hook hal_backend"
            return State("broken", said, "decorate it with hal.registry.hookimpl")
        if isinstance(hooks, State):
            return hooks
        managers.append(manager)
        return entries, specs

    backends: list[Any] = []
    entries: list[Entry] = []
    specs: list[Any] = []
    remedy = f"HAL_PLUGINS={others} leaves it out"
    with watch(f"loading the plugin {who}", remedy), same_environment(f"the plugin {who}"):
        found = load()
    if isinstance(found, State):
        # Under its own name it would take a built-in backend down with it.
        return [Entry(point.title, None, origin, point.distribution, found)], []
    return found


def _op(spec: Any) -> Any:
    """An `OpSpec` of a plugin, under a name that is free."""
    from hal import ops
    from hal.ops.spec import OpSpec

    if not isinstance(spec, OpSpec):
        raise TypeError(f"it returned {spec!r}; expected OpSpecs")
    if spec.name in ops.BUILTIN or spec.name in vars(ops) or spec.name.startswith("_"):
        raise ValueError(f"the name {spec.name} is hal's own")
    return spec


def _call_alone(manager: pluggy.PluginManager, hook: str) -> list[Any]:
    """What a plugin's hook returns, as a list."""
    for impl in getattr(manager.hook, hook).get_hookimpls():
        got = impl.function()
        return list(got) if isinstance(got, list | tuple) else [got]
    return []


def _make_entry(backend: Any, origin: str, point: Point) -> Entry:
    if not isinstance(backend, Backend):
        raise TypeError(f"it returned {backend!r}; expected a hal.registry.Backend")
    # A copy: what the plugin does to its object afterwards changes nothing, nor does what a subclass overrides.
    backend = Backend(**{f.name: getattr(backend, f.name) for f in fields(Backend)})
    if origin == "plugin" and backend.name in RESERVED:
        raise ValueError(f"the name {backend.name} is reserved for hal itself")
    fault = None
    if backend.api != API:
        said = f"it was written for api {backend.api!r}; this hal has {API}"
        fault = State("incompatible", said, f"install a {point.distribution} for it")
    return Entry(backend.name, backend, origin, point.distribution, fault)


def _merge(known: Entry | None, new: Entry) -> Entry:
    if known is None:
        return new
    reason = f"two distributions offer a backend {new.name}: {known.distribution} and {new.distribution}"
    return replace(
        known,
        fault=State("broken", reason, "uninstall one, or name one in HAL_PLUGINS"),
        _states={},
        _impl_states={},
        _bound={},
    )


# --- small things -----------------------------------------------------------------------------------


def resolve(target: str | Callable[..., Any]) -> Callable[..., Any]:
    """``"pkg.module:function"`` -> the function."""
    if callable(target):
        return target
    module, colon, path = target.partition(":")
    if not colon:
        raise BackendError(f"hal: {target!r}: expected pkg.module:function")
    found: Any = import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise BackendError(f"hal: {target} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def examine(requires: Iterable[str], install: str, probe: str | Callable[[], Any] | None, who: str = "") -> State:
    """The state that requirements and a probe say."""
    for need in requires:
        lacking = missing(need)
        if lacking:
            return State("absent", lacking, install or f'pip install "{need}"')
    if probe is None:
        return READY
    with watch(f"in the probe of {who}"):
        said = ask("probe", lambda: resolve(probe)())
    if isinstance(said, State):
        return said
    if said:
        reason, _, remedy = said.partition(" — ")
        return State("unavailable", reason, remedy)
    return READY


def alike(got: inspect.Signature, want: inspect.Signature) -> bool:
    """Have both the names, kinds and defaults that a caller can see? `got` is a plugin's: its defaults are anything."""
    return len(got.parameters) == len(want.parameters) and all(
        (g.name, g.kind) == (w.name, w.kind) and _same_default(g.default, w.default)
        for g, w in zip(got.parameters.values(), want.parameters.values(), strict=True)
    )


def _same_default(got: Any, want: Any) -> bool:
    # == of an array is an array.
    return got is want or (isinstance(got, bool | int | float | str) and bool(got == want))


def plain(signature: inspect.Signature) -> str:
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))


class Observers:
    """Calls the observer hooks, each alone. One that raises is warned about once and unregistered."""

    def __init__(self, managers: Sequence[pluggy.PluginManager]) -> None:
        self._managers = managers

    def tell(self, hook: str, **what: str) -> None:
        for manager in self._managers:
            for impl in list(getattr(manager.hook, hook).get_hookimpls()):
                failed = attempt(hook, lambda impl=impl: impl.function(*(what[n] for n in impl.argnames)))  # type: ignore[misc]
                if isinstance(failed, State):
                    with contextlib.suppress(Exception):
                        manager.unregister(impl.plugin)
                    note(f"hal: observer {impl.plugin_name}: {failed.reason}; it is not called again")
