"""Functions that are written as source, here alone: the dispatched ones, and those of `hal.torch_ops`.

What that saves: a dispatched call of get_last_loc on the CPU takes 1.2 us more than the backend's own function. One
function for all ops would read the contract at each call: 2.6 us for `OpSpec.bind`, 13 us for `OpSpec.sign`. A plain
call is read in C (`hal.ops._native`), once: what a backend has for it finds its plan by what was read.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

from hal.ops._key import KEY_NAMES, key_sources, shape_name
from hal.ops._native import readable, signer
from hal.ops.spec import OpSpec

# Names with an underscore are ours: no parameter of an op has one.
_DISPATCHED = """
def {name}({lenient}backend=None, **_unknown):
    _table = _live.table
    _kind = _run = _call = None
    try:
        _kind = backend, _scope(), (_call := _read({read})) or {key}{unread}
        _run, _taker = _table.caches[{name!r}][_kind]
    except Exception:
        # Of a new kind, the first call of all, or of what has no key.
        pass
    if _run is None or _unknown:
        return _first(_kind, {arguments}, backend, _unknown)
    if _table.checks:
        if {sizes}:
            _check_call({arguments})
        {own_sizes}
        if _table.checks == 2:
            _check_values({arguments})
    if _taker is not None:
        return _taker(_call, {arguments})
    return _run({call})
"""
_CHECKED = """
def {name}({params}):
    try:
        _known = (_kind := ((_call := _read({read})) or {key}{unread},)) in _seen
    except Exception:
        _kind = _known = _call = None
    if not _known:
        _first(_kind, {arguments})
    else:
        if {sizes}:
            _check_call({arguments})
        {own_sizes}
        if _full:
            _check_values({arguments})
    if _taker is not None:
        return _taker(_call, {arguments})
    return _run({call})
"""


def define(source: str, name: str, what: str, **names: Any) -> Callable[..., Any]:
    """The function `name` of `source`.

    Args:
        what: it is, in tracebacks.
        names: stand around it as a closure: dynamo takes the globals of all functions of a module for one and the same.
    """
    code = f"def around({', '.join(names)}):\n{textwrap.indent(source, '    ')}\n    return {name}\n"
    namespace: dict[str, Any] = {"__name__": "hal"}
    exec(compile(code, f"<hal {what}: {name}>", "exec"), namespace)
    fn: Callable[..., Any] = namespace["around"](**names)
    fn.__qualname__ = name
    return fn


def write_dispatcher(spec: OpSpec, **names: Any) -> Callable[..., Any]:
    """The dispatched function of an op: the lean key of the call, a lookup, the checks that the key leaves."""
    return define(_DISPATCHED.format_map(_parts(spec)), spec.name, "dispatch", **names, **_checks(spec))


def write_checked(spec: OpSpec, **names: Any) -> Callable[..., Any]:
    """A function of one backend behind the same checks."""
    return define(_CHECKED.format_map(_parts(spec)), spec.name, "checks", **names, **_checks(spec))


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


def _parts(spec: OpSpec) -> dict[str, str]:
    """What the templates are filled with. ``sizes``: whether a call of a known kind must be checked again."""
    # A key looks at most shapes: what it has found, the sizes need not ask for again.
    shaped: list[str] = []
    sizes = spec.sizes_source(lambda name: shaped.append(name) or shape_name(name))  # type: ignore[func-returns-value]
    key = spec.key_source(shaped)
    unread = {n: a for n, a in spec.args.items() if not readable(a)}
    others = key_sources(unread, spec.static)[1] if unread else ""
    return {
        "name": spec.name,
        # Without `backend` nothing may follow the star.
        "params": parameters(spec).removesuffix("*, "),
        "lenient": parameters(spec, "=_missing"),
        "read": ", ".join(n for n, a in spec.args.items() if readable(a)),
        "key": key,
        "unread": f", {others}" if others else "",
        "arguments": ", ".join(spec.args),
        # What was read agrees in its sizes.
        "sizes": sizes if sizes in ("True", "False") else f"_call is None and ({sizes})",
        "own_sizes": f"else: _check_sizes({', '.join(spec.args)})" if spec.check_sizes else "",
        "call": ", ".join(
            f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in spec.signature.parameters.values()
        ),
    }


def _checks(spec: OpSpec) -> dict[str, Any]:
    """The names of the checks that both templates repeat, and of what keys are made with."""

    def check_call(*values: Any) -> None:
        spec.check_call(dict(zip(spec.args, values, strict=True)))

    return {
        "_check_call": check_call,
        "_check_sizes": spec.check_sizes,
        "_read": signer(spec.args, spec.static),
        **KEY_NAMES,
    }
