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
from hal.ops._native import taker_of
from hal.ops.spec import OpSpec, Signature
from hal.registry import _generate, _scope, _select
from hal.registry._discover import resolve
from hal.registry._isolate import demand
from hal.registry._table import CHECKS, live

if TYPE_CHECKING:
    from hal._bound import Ops
    from hal.registry._select import Explanation
else:
    Ops = object

_MISSING = object()
"""What a dispatched function takes for an argument that was not given: its own error would not say what was meant."""

_dispatchers: dict[str, tuple[OpSpec, Callable[..., Any]]] = {}


def dispatcher(op: str) -> Callable[..., Any]:
    """The dispatched function of an op: the contract's signature, and ``backend=``.

    Raises:
        SelectionError: there is no such op.
    """
    spec = live.current().spec(op)
    if op in _dispatchers and _dispatchers[op][0] is spec:
        return _dispatchers[op][1]

    def first(kind: tuple[Any, ...] | None, *args: Any) -> Any:
        *values, backend, unknown = args
        given = {n: v for n, v in zip(spec.args, values, strict=True) if v is not _MISSING}
        if unknown or len(given) < len(spec.args):
            spec.bind(**given, **unknown)  # raises, and says what was meant
        return _first(spec, given, backend, kind)

    fn = _generate.write_dispatcher(
        spec, _live=live, _scope=_scope.scope.get, _missing=_MISSING, _first=first, _check_values=_value_check(spec)
    )
    fn.__doc__ = spec.doc
    extra = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | None")
    fn.__signature__ = spec.signature.replace(parameters=[*spec.signature.parameters.values(), extra])  # type: ignore[attr-defined]
    _dispatchers[op] = spec, fn
    return fn


def _first(spec: OpSpec, values: dict[str, Any], backend: Any, kind: tuple[Any, ...] | None) -> Any:
    """A call of a new kind: check, select, remember, run."""
    if backend is not None and not isinstance(backend, str):
        raise ArgumentError(spec.name, "backend", "a backend's name, e.g. 'cpu', or None", repr(backend))
    table = live.current()
    table.spec(spec.name)  # a plugin's op may be gone since the function was made
    sig = spec.check_call(values) if table.checks else spec.sign(values)
    if table.checks == 2:
        _check_values(spec, values, sig.device)
    scope = _scope.texts()
    run = _select.select(table, spec, sig, table.levels(backend, scope)).run
    taker = taker_of(run)
    if kind is not None:
        # Unchecked, an argument may be what no key can be made of.
        with contextlib.suppress(Exception):
            table.caches[spec.name][backend, scope, *kind[2:]] = run, taker
        if taker is not None:
            return taker(kind[2], *values.values())
    return run(**values)


def _check_values(spec: OpSpec, values: Mapping[str, Any], device: str) -> None:
    """Index values, unless a graph is being captured: reading one would sync."""
    if spec.check_values is not None and not _select.capturing(device):
        spec.check_values(values)


def _value_check(spec: OpSpec) -> Callable[..., None]:
    def check(*args: Any) -> None:
        values = dict(zip(spec.args, args, strict=True))
        _check_values(spec, values, spec.sign(values).device)

    return check


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
    levels = table.levels(backend, _scope.texts())
    functions: dict[str, Callable[..., Any]] = {}
    lacking: dict[str, Exception] = {}
    for op in table.op_names:
        spec = table.spec(op)
        asked: Signature | str = where.type
        if op in examples:
            example = examples[op]
            values = spec.bind(**example) if isinstance(example, Mapping) else spec.bind(*example)
            asked = spec.check_call(values)
            if asked.device != where.type:
                raise SelectionError(f"hal: bind({str(device)!r}): the example of {op} is on {asked.device}")
        try:
            explanation, found = _select.explain(table, spec, asked, levels, others=False)
        except SelectionError as several:
            if not examples:
                raise
            lacking[op] = several
            continue
        if found is None and op not in examples:
            lacking[op] = NoBackendError(str(explanation))
            continue
        run = _select.settle(table, explanation, found, where.type).run
        functions[op] = run if checks == "off" else _check_calls(spec, run, checks)
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


def _check_calls(spec: OpSpec, run: Callable[..., Any], checks: str) -> Callable[..., Any]:
    """`run` behind the contract's checks: whole for a call of a new kind, else those that the dispatcher repeats."""
    full = checks == "full"
    seen: set[Any] = set()

    def first(kind: Any, *args: Any) -> None:
        values = dict(zip(spec.args, args, strict=True))
        device = spec.check_call(values).device
        if full:
            _check_values(spec, values, device)
        if kind is not None:
            seen.add(kind)

    fn = _generate.write_checked(
        spec, _run=run, _taker=taker_of(run), _seen=seen, _first=first, _full=full, _check_values=_value_check(spec)
    )
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
        sig = spec.check_call(spec.bind(*args, **kwargs))
    explanation = _select.explain(table, spec, sig, table.levels(backend, _scope.texts()))[0]
    if explanation.chosen is not None and table.lane == "device":
        _need(sig.device, f"explain({op!r})")
    return explanation


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
        raise SelectionError(f"hal: warmup: unknown backend {backend}{near}; known: {', '.join(table.entries)}")
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
