"""Finding plugins and saying what state each backend is in. One bad plugin never takes another with it."""

from __future__ import annotations

import contextlib
import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module, metadata
from typing import Any

import pluggy

from hal import _env
from hal._errors import BackendError
from hal._version import __version__
from hal.registry._manifest import API, Backend, Hooks, Impl

GROUP = "hal.backends"
DISTRIBUTION = "hal-kernels"
# A checkout that is not installed has no entry points; its own backends are found all the same.
BUILTIN = {"cpu": "hal.backends.cpu", "cuda": "hal.backends.cuda", "ascend": "hal.backends.ascend"}
RESERVED = frozenset({*BUILTIN, "auto", "reference"})
STATES = ("ready", "absent", "incompatible", "unavailable", "broken")


@dataclass(frozen=True)
class State:
    """``state`` is one of `STATES` (of an op: also ``unimplemented``); the rest says why, and what would help."""

    state: str
    reason: str = ""
    remedy: str = ""
    detail: str = ""
    """A traceback, for `hal info --json`."""

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def __str__(self) -> str:
        return (
            self.state
            + (f": {self.reason}" if self.reason else "")
            + (f" — {self.remedy}" if self.remedy else "")
        )


READY = State("ready")
# A plugin that calls sys.exit() is broken as well. KeyboardInterrupt is the user's.
FAULTS = (Exception, SystemExit)


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
                "unavailable",
                f"it has no lane {lane}; it has {', '.join(self.lanes)}",
                "set HAL_LANE to one of those",
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
        extra = (
            f'pip install "{self.distribution or DISTRIBUTION}[{manifest.extra}]"' if manifest.extra else ""
        )
        probe = manifest.probe
        if isinstance(probe, Mapping):
            probe = probe.get(lane)
        elif lane != "device":
            probe = None
        return examined(requires, extra, probe)

    def impl_state(self, impl: Impl, lane: str = "device") -> State:
        """The state of one implementation on a lane: the backend's, unless it needs more than that."""
        state = self.state(lane)
        if not state.ready or not (impl.lanes or impl.requires or impl.probe):
            return state
        if impl.lanes and lane not in impl.lanes:
            return State("unavailable", f"it has no lane {lane}; it has {', '.join(impl.lanes)}")
        if (impl, lane) not in self._impl_states:
            self._impl_states[impl, lane] = examined(impl.requires, impl.install, impl.probe)
        return self._impl_states[impl, lane]

    def bind(self, impl: Impl, signature: inspect.Signature) -> Callable[..., Any] | State:
        """The function of `impl`, imported and compared with the contract; or why it can't be had."""
        found = self._bound.get(impl)
        if found is None:
            found = self._bound[impl] = self._import(impl, signature)
        return found

    def _import(self, impl: Impl, signature: inspect.Signature) -> Callable[..., Any] | State:
        try:
            fn = resolve(impl.fn)
            got = inspect.signature(fn)
        except FAULTS as e:
            return broken(f"importing {impl.fn}", e)
        if shape(got) != shape(signature):
            return State(
                "broken", f"{impl.fn} has the signature {plain(got)}; the contract's is {plain(signature)}"
            )
        return fn

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
    manager: pluggy.PluginManager
    blocked: tuple[str, ...]
    """Entry points that HAL_PLUGINS kept from loading."""


def discover(registered: Mapping[str, Entry]) -> Found:
    """Loads every allowed entry point, one by one."""
    manager = pluggy.PluginManager("hal")
    manager.add_hookspecs(Hooks)
    allowed = {p.strip() for p in _env.get("HAL_PLUGINS").split(",") if p.strip()}
    entries: dict[str, Entry] = {}
    specs: dict[str, Any] = {}
    blocked: list[str] = []
    for name, value, dist in _entry_points():
        if allowed and name not in allowed:
            blocked.append(name)
            continue
        found, ops = _load(manager, name, value, dist)
        for entry in found:
            entries[entry.name] = _merge(entries.get(entry.name), entry)
        for spec in ops:
            if spec.name in specs:
                fault = State("broken", f"its op {spec.name} is another plugin's already", "uninstall one")
                entries[name] = Entry(name, None, "plugin", dist.name if dist else "", fault)
            specs.setdefault(spec.name, spec)
    for name, entry in registered.items():
        entries[name] = _merge(entries.get(name), entry)
    order = sorted(
        entries.values(),
        key=lambda e: (e.third_party, list(BUILTIN).index(e.name) if e.name in BUILTIN else 9, e.name),
    )
    return Found({e.name: e for e in order}, specs, manager, tuple(blocked))


def _entry_points() -> Iterator[tuple[str, str, Any]]:
    """(name, value, distribution or None), each once, ours first."""
    seen: set[tuple[str, str, str]] = set()
    for name, value in BUILTIN.items():
        seen.add((name, value, DISTRIBUTION))
        yield name, value, None
    for point in metadata.entry_points(group=GROUP):
        dist = point.dist
        # A checkout that is also installed lists its metadata twice.
        key = (point.name, point.value, _canonical(dist.name) if dist else "")
        if key not in seen:
            seen.add(key)
            yield point.name, point.value, dist


def _load(manager: pluggy.PluginManager, name: str, value: str, dist: Any) -> tuple[list[Entry], list[Any]]:
    builtin = BUILTIN.get(name) == value and (dist is None or _canonical(dist.name) == DISTRIBUTION)
    origin = "built-in" if builtin else "plugin"
    dist_name = dist.name if dist else DISTRIBUTION

    def fault(state: State) -> tuple[list[Entry], list[Any]]:
        # Under its own name it would take a built-in backend down with it.
        shown = name if builtin or name not in RESERVED else f"{name} ({dist_name})"
        return [Entry(shown, None, origin, dist_name, state)], []

    if not builtin and name in RESERVED:
        return fault(State("broken", f"the name {name} is reserved for hal itself", "rename the entry point"))
    try:
        plugin = import_module(value.partition(":")[0])
        for attribute in filter(None, value.partition(":")[2].split(".")):
            plugin = getattr(plugin, attribute)
    except FAULTS as e:
        excluded = _excludes_us(dist)
        if excluded:
            both = f"{dist_name} {dist.version} needs {excluded}; this is {DISTRIBUTION} {__version__}"
            return fault(State("incompatible", both, f"install a {dist_name} for it"))
        return fault(broken(f"importing {value}", e))
    try:
        manager.register(plugin, name=f"{name} ({dist_name})")
    except Exception as e:
        return fault(broken("its hooks", e))
    found: list[Entry] = []
    specs: list[Any] = []
    try:
        for backend in _call_alone(manager, "hal_backend", plugin):
            found.append(_examined(backend, origin, dist_name))
    except FAULTS as e:
        return fault(broken("its hook hal_backend", e))
    try:
        for spec in _call_alone(manager, "hal_ops", plugin):
            specs.append(_op(spec))
    except FAULTS as e:
        return fault(broken("its hook hal_ops", e))
    if not manager.get_hookcallers(plugin):
        return fault(
            State("broken", f"{value} has no hook hal_backend", "decorate it with hal.registry.hookimpl")
        )
    return found, specs


def _op(spec: Any) -> Any:
    """An `OpSpec` of a plugin, under a name that is free."""
    from hal import ops
    from hal.ops._spec import OpSpec

    if not isinstance(spec, OpSpec):
        raise TypeError(f"it returned {spec!r}; expected OpSpecs")
    if spec.name in ops.BUILTIN or spec.name in vars(ops) or spec.name.startswith("_"):
        raise ValueError(f"the name {spec.name} is hal's own")
    return spec


def _call_alone(manager: pluggy.PluginManager, hook: str, plugin: object) -> list[Any]:
    """What one plugin's hook returns, as a list."""
    for impl in getattr(manager.hook, hook).get_hookimpls():
        if impl.plugin is plugin:
            got = impl.function()
            return list(got) if isinstance(got, list | tuple) else [got]
    return []


def _examined(backend: Any, origin: str, dist_name: str) -> Entry:
    if not isinstance(backend, Backend):
        raise TypeError(f"it returned {backend!r}; expected a hal.registry.Backend")
    if origin == "plugin" and backend.name in RESERVED:
        raise ValueError(f"the name {backend.name} is reserved for hal itself")
    if backend.api != API:
        state = State(
            "incompatible",
            f"it was written for api {backend.api!r}; this hal has {API}",
            f"install a {dist_name} for it",
        )
        return Entry(backend.name, backend, origin, dist_name, state)
    return Entry(backend.name, backend, origin, dist_name)


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


# --- requirements -----------------------------------------------------------------------------------

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*\(?((?:[<>=!~][^;)]*)?)\)?\s*(?:;.*)?")


def missing(requirement: str) -> str:
    """Why a requirement such as ``triton>=3.6,<4`` is not met by what is installed; empty if it is."""
    match = _REQUIREMENT.fullmatch(requirement)
    if not match:
        return f"its requirement {requirement!r} can't be read"
    name, wanted = match[1], match[2].strip()
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"needs {name}{wanted}"
    return "" if satisfies(version, wanted) else f"needs {name}{wanted}; {version} is installed"


def satisfies(version: str, wanted: str) -> bool:
    """Does `version` meet comma-separated comparisons? Numbers alone are compared: 3.6.0+git is 3.6.0."""
    for part in filter(None, (p.strip() for p in wanted.split(","))):
        match = re.fullmatch(r"(==|!=|>=|<=|~=|<|>)\s*(\S+)", part)
        if not match:
            return False
        sign, other = match[1], match[2]
        if other.endswith(".*"):
            prefix = _numbers(other[:-2])
            same = _numbers(version)[: len(prefix)] == prefix
            if same == (sign == "!="):
                return False
            continue
        a, b = _numbers(version), _numbers(other)
        length = max(len(a), len(b))
        a, b = a + (0,) * (length - len(a)), b + (0,) * (length - len(b))
        compatible = _numbers(other)[:-1]
        held = {
            "==": a == b, "!=": a != b, ">=": a >= b, "<=": a <= b, "<": a < b, ">": a > b,
            "~=": a >= b and a[: len(compatible)] == compatible,
        }  # fmt: skip
        if not held[sign]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", re.split(r"[^0-9.]", version.strip(), maxsplit=1)[0]))


def _excludes_us(dist: Any) -> str:
    """The requirement by which a distribution rules out this version of hal, if it does."""
    for need in (dist.requires or []) if dist else []:
        match = _REQUIREMENT.fullmatch(need)
        if match and _canonical(match[1]) == DISTRIBUTION and not satisfies(__version__, match[2].strip()):
            return f"{DISTRIBUTION}{match[2].strip()}"
    return ""


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


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


def broken(where: str, error: BaseException) -> State:
    text = "".join(traceback.format_exception(error))
    return State("broken", f"{where} raised {type(error).__name__}: {error}", "", text)


def examined(requires: Iterable[str], install: str, probe: str | Callable[[], Any] | None) -> State:
    """The state that requirements and a probe say."""
    for need in requires:
        lacking = missing(need)
        if lacking:
            return State("absent", lacking, install or f'pip install "{need}"')
    if probe is None:
        return READY
    try:
        said = resolve(probe)()
    except FAULTS as e:
        return broken("its probe", e)
    if said is not None and not isinstance(said, str):
        return State("broken", f"its probe returned {said!r}; expected None or the reason why not")
    if said:
        reason, _, remedy = said.partition(" — ")
        return State("unavailable", reason, remedy)
    return READY


def shape(signature: inspect.Signature) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults: what a caller can see of a signature."""
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


def plain(signature: inspect.Signature) -> str:
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))


class Observers:
    """Calls the observer hooks, each alone. One that raises is warned about once and unregistered."""

    def __init__(self, manager: pluggy.PluginManager) -> None:
        self._manager = manager

    def tell(self, hook: str, **what: str) -> None:
        for impl in self._hooks(hook):
            try:
                impl.function(*(what[name] for name in impl.argnames))
            except FAULTS as e:
                with contextlib.suppress(Exception):
                    self._manager.unregister(impl.plugin)
                said = f"raised {type(e).__name__}: {e} in {hook}; it is not called again"
                warnings.warn(f"hal: observer {impl.plugin_name} {said}", RuntimeWarning, stacklevel=2)

    def _hooks(self, hook: str) -> Iterable[Any]:
        found: Sequence[Any] = getattr(self._manager.hook, hook).get_hookimpls()
        return list(found)
