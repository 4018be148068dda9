"""The dispatched functions (``hal.rope_kv_write``), `bind`, `explain` and `warmup`.

A dispatched function is generated from the op's contract: it builds the lean key of the call, finds
the bound function that was selected for that key, and calls it positionally. Only a call of a new
kind goes the long way, through checks and selection.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from hal import _env
from hal._devices import parse_device
from hal._errors import ArgumentError, NoBackendError, SelectionError
from hal.ops.spec import KEY_NAMES, OpSpec, Signature, shape_name
from hal.registry import _config, _scope, _select
from hal.registry._discover import Entry, resolve
from hal.registry._isolate import State, demand
from hal.registry._manifest import Impl
from hal.registry._select import Verdict
from hal.registry._table import CHECKS, Table, live

if TYPE_CHECKING:
    from hal._bound import Ops
    from hal.registry._select import Explanation
else:
    Ops = object

# Names with an underscore are ours: no parameter of an op has one.
_TEMPLATE = """
def {name}({lenient}backend=None, **_unknown):
    try:
        _table = _live.table
        _run = _table.caches[{name!r}][backend, _scope(), {key}]
    except Exception:
        # Of a new kind, the first call of all, or of what has no key.
        _run = None
    if _run is None or _unknown:
        return _first({arguments}, backend, _unknown)
    if _table.checks:
        if {sizes} or _table.checks == 2:
            _again(_table.checks == 2, {arguments})
        {own_sizes}
    return _run({call})
"""
_CHECKED = """
def {name}({params}):
    try:
        _known = (_kind := ({key})) in _seen
    except Exception:
        _kind = _known = None
    if not _known:
        _first(_kind, {arguments})
    elif {full} or {sizes}:
        _again({full}, {arguments})
    {own_sizes}
    return _run({call})
"""
_KEY = """
def _key({params}backend=None):
    return backend, _texts(), {key}
"""

_MISSING = object()
"""What a dispatched function takes for an argument that was not given: its own error would not say what was meant."""

_made: dict[str, tuple[OpSpec, Callable[..., Any]]] = {}


def dispatcher(op: str) -> Callable[..., Any]:
    """The dispatched function of an op: the contract's signature, and ``backend=``.

    Raises:
        SelectionError: there is no such op.
    """
    spec = live.current().spec(op)
    if op in _made and _made[op][0] is spec:
        return _made[op][1]
    names = list(spec.args)
    source = _sources(spec)
    namespace: dict[str, Any] = {
        "__name__": "hal",
        "_live": live,
        "_scope": _scope.scope.get,
        "_texts": _scope.texts,
        "_missing": _MISSING,
        **KEY_NAMES,
    }
    # Two steps: `_first` needs the key function, and the dispatched function needs `_first`.
    exec(_KEY.format_map(source), namespace)
    key = namespace["_key"]

    def first(*args: Any) -> Any:
        *values, backend, unknown = args
        given = {n: v for n, v in zip(names, values, strict=True) if v is not _MISSING}
        if unknown or len(given) < len(names):
            spec.bind(**given, **unknown)  # raises, and says what was meant
        return _first(spec, given, backend, key)

    namespace.update(_first=first, _again=_again(spec), _check_sizes=spec.check_sizes)
    exec(compile(_TEMPLATE.format_map(source), f"<hal dispatch of {spec.name}>", "exec"), namespace)
    fn: Callable[..., Any] = namespace[spec.name]
    fn.__doc__ = spec.doc
    fn.__module__ = "hal"
    extra = inspect.Parameter(
        "backend", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | None"
    )
    fn.__signature__ = spec.signature.replace(parameters=[*spec.signature.parameters.values(), extra])  # type: ignore[attr-defined]
    _made[op] = spec, fn
    return fn


def _sources(spec: OpSpec) -> dict[str, str]:
    """What the templates are filled with. ``sizes``: whether a call of a known kind must be checked again."""
    # A key looks at most shapes: what it has found, the sizes need not ask for again.
    shaped: list[str] = []
    sizes = spec.sizes_source(lambda name: shaped.append(name) or shape_name(name))  # type: ignore[func-returns-value]
    return {
        "name": spec.name,
        "params": parameters(spec),
        "lenient": parameters(spec, "=_missing"),
        "key": spec.key_source(shaped)[1:-1],
        "arguments": ", ".join(spec.args),
        "sizes": sizes,
        "own_sizes": f"else: _check_sizes({', '.join(spec.args)})" if spec.check_sizes else "",
        "call": ", ".join(
            f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name
            for p in spec.signature.parameters.values()
        ),
    }


def _again(spec: OpSpec) -> Callable[..., None]:
    """The checks that the key of a call does not settle: ``again(full, *values)``."""
    names = list(spec.args)
    namespace: dict[str, Any] = {}
    exec(f"def _sizes_differ({', '.join(names)}): return {spec.sizes_source()}", namespace)
    sizes_differ = namespace["_sizes_differ"]

    def again(full: bool, *values: Any) -> None:
        if sizes_differ(*values):
            spec.check_call(dict(zip(names, values, strict=True)))
        elif spec.check_sizes is not None:
            spec.check_sizes(*values)
        if full:
            _check_values(spec, dict(zip(names, values, strict=True)))

    return again


def parameters(spec: OpSpec, required: str = "") -> str:
    """The signature's parameters as source, ending in the star that makes ``backend`` keyword-only.

    Args:
        required: what follows the name of one without a default.
    """
    out = []
    star = False
    for p in spec.signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not star:
            out.append("*")
            star = True
        if p.default is p.empty:
            out.append(p.name + required)
        elif p.default is None or isinstance(p.default, bool | int | float | str):
            out.append(f"{p.name}={p.default!r}")
        else:
            raise TypeError(f"{spec.name}: the default of {p.name} is {p.default!r}; expected a plain value")
    return ", ".join([*out, *([] if star else ["*"]), ""])


def _first(spec: OpSpec, values: dict[str, Any], backend: Any, key: Callable[..., Any]) -> Any:
    """A call of a new kind: check, select, remember, run."""
    if backend is not None and not isinstance(backend, str):
        raise ArgumentError(spec.name, "backend", "a backend's name, e.g. 'cpu', or None", repr(backend))
    table = live.current()
    table.spec(spec.name)  # a plugin's op may be gone since the function was made
    if table.checks:
        spec.check_call(values)
        if table.checks == 2:
            _check_values(spec, values)
    sig = spec.sign(values)
    run = _select.select(table, spec, sig, table.levels(backend, _scope.texts())).run
    # Unchecked, an argument may be what no key can be made of.
    with contextlib.suppress(Exception):
        table.caches[spec.name][key(**values, backend=backend)] = run
    return run(**values)


def _check_values(spec: OpSpec, values: Mapping[str, Any]) -> None:
    """Index values, unless a graph is being captured: reading one would sync."""
    if spec.check_values is not None and not _select.capturing(spec.sign(values).device):
        spec.check_values(values)


class _SeveralReadyError(SelectionError):
    """An op without an example has several ready implementations."""


class Bound(Ops):
    """A frozen namespace of functions, by op: ``hal.bind``'s result.

    Type checkers know hal's own ops; a plugin's is ``getattr(ops, "its_name")`` to them.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], lacking: Mapping[str, Exception]) -> None:
        self.__dict__.update(functions)
        object.__setattr__(self, "_lacking", dict(lacking))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a bound namespace is frozen")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]:
            lacking = self.__dict__.get("_lacking", {})
            if name in lacking:
                raise lacking[name].with_traceback(None)
            raise AttributeError(f"no op {name}{_env.did_you_mean(name, [*self, *lacking])}")

    def __iter__(self) -> Iterator[str]:
        return (n for n in self.__dict__ if n != "_lacking")

    def __repr__(self) -> str:
        return f"hal.Bound({', '.join(self)})"


def bind(
    device: str | torch.device,
    backend: str | None = None,
    like: Mapping[str, Any] | None = None,
    checks: Literal["off", "args", "full"] = "off",
) -> Bound:
    """The backend's own functions, with no wrapper around them: ``ops = hal.bind("cuda"); ops.rope_kv_write(...)``.

    Bound functions are unchecked by contract: a wrong dtype, shape or stride is undefined, and so is a tensor without
    memory (fake, meta, a wrapper); a wrong device raises, and any index value is safe. Autograd is told nothing: what
    requires grad is read and written as it is, and its version is not counted up.

    Args:
        device: whose tensors the functions will get.
        backend: the grammar of ``HAL_BACKEND``; None: as a dispatched call would choose.
        like: op -> an example call: a tuple of positional arguments, or a dict of arguments by name. Chooses by
            what the example needs. Without one, an op with several ready implementations raises: at once, or
            where other ops have examples, when it is asked for.
        checks: ``off``; ``args`` or ``full`` wrap each function in the contract's checks.

    Raises:
        NoBackendError: nothing may run an op of `like`. An op without an example that nothing can run raises when
            it is asked for.
        SelectionError: an unknown name, several ready implementations and no example, an example elsewhere, or a
            device that this machine does not have.
        ArgumentError: an example that breaks the contract, or no such device.

    Example:
        >>> import torch, hal
        >>> ops = hal.bind("cpu", backend="reference")
        >>> ops.get_last_loc(torch.tensor([[7, 8]], dtype=torch.int32), torch.tensor([0]), torch.tensor([2]))
        tensor([8])
    """
    if checks not in CHECKS:
        raise SelectionError(
            f"hal: bind(checks={checks!r}): expected one of {', '.join(CHECKS)}{_env.did_you_mean(checks, CHECKS)}"
        )
    table = live.current()
    examples = dict(like or {})
    for op in examples:
        table.spec(op)
    where = parse_device("bind", "device", device)
    if table.lane == "device":
        _need(where, f"bind({str(device)!r})")
    kind = where.type
    levels = table.levels(backend, _scope.texts())
    functions: dict[str, Callable[..., Any]] = {}
    lacking: dict[str, Exception] = {}
    for op in table.op_names:
        spec = table.spec(op)
        if op in examples:
            example = examples[op]
            values = spec.bind(**example) if isinstance(example, Mapping) else spec.bind(*example)
            spec.check_call(values)
            sig = spec.sign(values)
            if sig.device != kind:
                raise SelectionError(f"hal: bind({str(device)!r}): the example of {op} is on {sig.device}")
            run = _select.select(table, spec, sig, levels).run
        else:
            try:
                found = _bind_by_device(table, spec, kind, levels)
            except _SeveralReadyError as e:
                if not examples:
                    raise SelectionError(str(e)) from None
                lacking[op] = SelectionError(str(e))
                continue
            if isinstance(found, str):
                lacking[op] = NoBackendError(found)
                continue
            run = found
        functions[op] = run if checks == "off" else _checked(spec, run, checks)
    return Bound(functions, lacking)


def _need(device: str | torch.device, what: str) -> None:
    """Raises where this machine lacks a device: what would run elsewhere is no answer to what was asked."""
    kind, _, index = str(device).partition(":")
    if kind in ("cpu", "meta"):
        return
    module = getattr(torch, kind, None)
    available = getattr(module, "is_available", None)
    if available is None or not available():
        raise SelectionError(
            f"hal: {what}: this machine has no {kind} device (torch {torch.__version__}); expected cpu, or "
            "one whose driver and build of torch are installed"
        )
    if index and int(index) >= module.device_count():  # type: ignore[union-attr]
        raise SelectionError(
            f"hal: {what}: this machine has {module.device_count()} {kind} devices"  # type: ignore[union-attr]
        )


def _bind_by_device(
    table: Table, spec: OpSpec, device: str, levels: list[_config.Choice]
) -> Callable[..., Any] | str:
    """The one ready implementation for a device type, or the message that there is none."""
    name, source = _select.decide(levels, spec.name)
    refused: list[Verdict] = []
    said: list[str] = []
    for link in name.split(">"):
        found = _bind_one(table, spec, device, link, source)
        if isinstance(found, str):
            said.append(found)
        elif isinstance(found, _select.Explanation):
            said.append(str(found))
            refused += found.verdicts
        else:
            if refused:
                chosen = Verdict(link, table.lane, "chosen")
                _select.downgrades(
                    table,
                    _select.Explanation(spec.name, spec.name, chosen, (*refused, chosen), source, True),
                )
            return found
    return "\n".join(said)


def _bind_one(
    table: Table, spec: OpSpec, device: str, name: str, source: str
) -> Callable[..., Any] | _select.Explanation | str:
    """What one name of a chain, or ``auto``, has for a device type; or why it has nothing."""
    if name == "reference":
        verdict = Verdict("reference", "device", "chosen")
        told = _select.Explanation(spec.name, spec.name, verdict, (verdict,), source, True)
        return _select.traced(table, spec.reference, told, device) if table.trace else spec.reference
    auto = name == "auto"
    lane, which = table.lane, ""
    pairs: list[tuple[Entry, Impl | None]]
    if auto:
        if lane != "device":
            return f"hal: {spec.name}: lane {lane} needs a named backend — set HAL_BACKEND"
        pairs = _select.candidates(table, spec.name, device)
    else:
        backend, _, which = name.partition("/")
        entry = table.entries[backend]
        pairs = [(entry, i) for i in _select.wanted(entry, spec.name, which)] or [(entry, None)]
        devices = entry.manifest.lanes.get(lane, ()) if entry.manifest else ()
        if devices and device not in devices:
            takes = ", ".join(devices)
            return f"hal: {spec.name}: {name} takes {takes} in lane {lane}; got {device} (by {source})"
    ready: list[tuple[str, Callable[..., Any]]] = []
    verdicts: list[Verdict] = []
    for entry, impl in pairs:
        title = entry.title(impl) if impl else entry.name
        state = entry.op_state(spec.name, lane, which) if impl is None else entry.impl_state(impl, lane)
        run = entry.bind(impl, spec.signature) if impl and state.ready else state
        if isinstance(run, State):
            verdicts.append(Verdict(title, lane, run.state, run.reason, run.remedy))
        else:
            verdicts.append(Verdict(title, lane, "chosen"))
            ready.append((title, run))
    if len(ready) > 1:
        raise _SeveralReadyError(
            f"hal: bind: {spec.name} has several ready implementations: {', '.join(n for n, _ in ready)}; give an "
            f"example, like={{{spec.name!r}: (...)}}, or name one: backend='{spec.name}={ready[0][0]}'"
        )
    if not ready and not auto:
        return _select.Explanation(spec.name, spec.name, None, tuple(verdicts), source, True)
    if not ready:
        verdicts.append(Verdict("reference", lane, "chosen"))
        ready.append(("reference", spec.reference))
    chosen = next(v for v in verdicts if v.state == "chosen")
    told = _select.Explanation(spec.name, spec.name, chosen, tuple(verdicts), source, not auto)
    if auto:
        _select.downgrades(table, told)
    table.observers.tell("hal_on_bind", op=spec.name, backend=chosen.name, lane=lane)
    run = ready[0][1]
    return _select.traced(table, run, told, device) if table.trace else run


def _checked(spec: OpSpec, run: Callable[..., Any], checks: str) -> Callable[..., Any]:
    """`run` behind the contract's checks: whole for a call of a new kind, else those that the dispatcher repeats."""
    names, full = list(spec.args), checks == "full"
    seen: set[Any] = set()

    def first(kind: Any, *args: Any) -> None:
        values = dict(zip(names, args, strict=True))
        spec.check_call(values)
        if full:
            _check_values(spec, values)
        if kind is not None:
            seen.add(kind)

    source = _sources(spec)
    # Without `backend` nothing may follow the star.
    source.update(params=source["params"].removesuffix("*, "), full=str(full))
    namespace: dict[str, Any] = {
        "__name__": "hal",
        "_seen": seen,
        "_first": first,
        "_again": _again(spec),
        "_check_sizes": spec.check_sizes,
        "_run": run,
        **KEY_NAMES,
    }
    exec(compile(_CHECKED.format_map(source), f"<hal checks of {spec.name}>", "exec"), namespace)
    fn: Callable[..., Any] = namespace[spec.name]
    fn.__doc__ = spec.doc
    fn.__signature__ = spec.signature  # type: ignore[attr-defined]
    return fn


def explain(op: str, *args: Any, backend: str | None = None, **kwargs: Any) -> Explanation:
    """Who would run this call, who would not, and why; as objects whose ``str()`` is the text of hal's errors.

    Args:
        op: an op's name.
        args, kwargs: the call's arguments, or one `Signature`.
        backend: as in the call.

    Raises:
        SelectionError: an unknown op or backend, or something would run a `Signature` of a device that this machine
            does not have.
        ArgumentError: the arguments break the contract.

    Example:
        >>> import torch, hal
        >>> table, one = torch.zeros(1, 4, dtype=torch.int32), torch.tensor([0])
        >>> hal.explain("get_last_loc", table, one, one, backend="reference").chosen.name
        'reference'
    """
    table = live.current()
    spec = table.spec(op)
    if len(args) == 1 and isinstance(args[0], Signature):
        sig = args[0]
    else:
        values = spec.bind(*args, **kwargs)
        spec.check_call(values)
        sig = spec.sign(values)
    told = _select.explain(table, spec, sig, table.levels(backend, _scope.texts()))[0]
    if told.chosen is not None and table.lane == "device":
        _need(sig.device, f"explain({op!r})")
    return told


def warmup(
    device: str | torch.device = "cpu",
    *,
    ops: list[str] | None = None,
    backend: str | None = None,
    progress: Callable[[float, str], None] | None = None,
    **options: Any,
) -> dict[str, float]:
    """Compiles and allocates ahead of the first request.

    Calls the warm-up of every backend that `device`'s calls may reach.

    Args:
        device: as in `bind`.
        ops: those to prepare; None for all.
        backend: one backend; None for all that are ready for the device.
        progress: called with how much of the whole is done, 0 to 1, and what begins now.
        options: handed to the backend's warm-up, e.g. shapes (see its documentation).

    Returns:
        Seconds by backend.

    Raises:
        SelectionError: an unknown op or backend.
        NoBackendError: the named backend is not ready.
        BackendError: a warm-up raised.
    """
    table = live.current()
    for op in ops or ():
        table.spec(op)
    where = parse_device("warmup", "device", device)
    kind = where.type
    if backend is not None and backend not in table.entries:
        near = _env.did_you_mean(backend, table.entries)
        raise SelectionError(
            f"hal: warmup: unknown backend {backend}{near}; known: {', '.join(table.entries)}"
        )
    ready: list[tuple[str, str | Callable[..., Any]]] = []
    for name, entry in table.entries.items():
        if backend is not None and name != backend:
            continue
        lane = table.lane if table.lane in entry.lanes else "device"
        state = entry.state(lane)
        manifest = entry.manifest
        if not state.ready or manifest is None or kind not in manifest.lanes[lane]:
            if backend is not None:
                raise NoBackendError(f"hal: warmup: {name} is {state} for {kind} in lane {lane}")
            continue
        if manifest.warmup is not None:
            ready.append((name, manifest.warmup))
    seconds: dict[str, float] = {}
    for i, (name, target) in enumerate(ready):

        def tell(done: float, what: str, i: int = i, name: str = name) -> None:
            if progress is not None:
                progress((i + done) / len(ready), f"{name}: {what}" if what else name)

        tell(0.0, "")
        begin = time.perf_counter()
        warm = partial(_warm, target, list(ops or table.op_names), torch.device(device), options, tell)
        demand(f"warmup: {name}", warm)
        seconds[name] = time.perf_counter() - begin
    return seconds


def _warm(
    target: str | Callable[..., Any],
    ops: list[str],
    device: torch.device,
    options: Mapping[str, Any],
    tell: Callable[[float, str], None],
) -> None:
    """Calls a backend's warm-up; `tell` is for those that have a parameter `progress`."""
    fn = resolve(target)
    more = {"progress": tell} if "progress" in inspect.signature(fn).parameters else {}
    fn(ops, device, **options, **more)
