"""`info`: what is here, as data: backends, states, the op x backend table, the environment."""

from __future__ import annotations

import platform
from typing import Any

import torch

from hal import _env, engines
from hal._show import info_grids, info_head, info_notes, page
from hal._version import __version__
from hal.registry._discover import Entry, resolve
from hal.registry._isolate import State, attempt
from hal.registry._manifest import Impl
from hal.registry._table import Table, current


class Info(dict[str, Any]):
    """`info`'s result: plain data, which a notebook shows as tables."""

    def _repr_html_(self) -> str:
        return page(info_head(self), info_grids(self), info_notes(self))


def info(kernels: bool = False) -> Info:
    """Everything that an operator asks: backends with states and reasons, the op x backend table, the environment.

    Args:
        kernels: import the kernels of every ready backend, so that ``failures`` says which can't be, and where; else it
            tells of those that were asked for so far.

    Returns:
        Plain data, as ``hal info --json`` prints it; a notebook shows it as tables.
    """
    table = current()
    backends = []
    for name, entry in table.entries.items():
        lanes = {lane: _state(entry.state(lane)) for lane in entry.lanes} or {"device": _state(entry.state())}
        backends.append(
            {
                "name": name,
                "origin": entry.origin,
                "distribution": entry.distribution,
                "lanes": lanes,
                "limits": dict(entry.manifest.limits) if entry.manifest else {},
                "status": _status(entry),
            }
        )
    rows: dict[str, dict[str, Any]] = {}
    failures: list[dict[str, str]] = []
    for op in table.op_names:
        rows[op] = {"reference": ["ready"]}
        signature = table.spec(op).signature
        for name, entry in table.entries.items():
            cells = []
            for impl in entry.impls(op):
                if kernels and entry.impl_state(impl, table.lane).ready:
                    entry.bind(impl, signature)
                failed = entry.failure(impl)
                if failed:
                    failures.append({"op": op, "backend": entry.title(impl), **_state(failed)})
                cells.append(_cell(entry, impl, failed))
            rows[op][name] = cells or ["unimplemented"]
    return Info(
        hal=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        lane=table.lane,
        backends=backends,
        ops=rows,
        engines=engines.states(),
        failures=failures,
        environment=[_variable(table, n) for n in _env.VARIABLES],
        foreign_variables=list(table.environment.foreign),
        blocked_plugins=list(table.found.blocked),
    )


def _cell(entry: Entry, impl: Impl, failed: State | None) -> str:
    lanes = [lane for lane in entry.lanes if entry.impl_state(impl, lane).ready]
    text = f"ready ({', '.join(lanes)})" if lanes and lanes != ["device"] else entry.impl_state(impl).state
    if failed:
        text = failed.state
    return f"{impl.name}: {text}{', when named' if impl.named else ''}" if impl.name else text


def _status(entry: Entry) -> dict[str, str]:
    """What a ready backend says of itself; an exception is what it says then."""
    status = entry.manifest.status if entry.manifest else None
    if status is None or not any(entry.state(lane).ready for lane in entry.lanes):
        return {}
    said = attempt("asking for it", lambda: {str(k): str(v) for k, v in resolve(status)().items()})
    return {"status": said.reason} if isinstance(said, State) else said


def _variable(table: Table, name: str) -> dict[str, str]:
    """A variable's value in force and who set it."""
    setting = {"HAL_BACKEND": "backend", "HAL_FALLBACK": "fallback", "HAL_CHECKS": "checks", "HAL_TRACE": "trace"}.get(
        name, ""
    )
    if table.settings.get(setting):
        return {"name": name, "value": str(table.settings[setting]), "source": "hal.configure"}
    if name in table.environment.given:
        return {"name": name, "value": table.environment.given[name], "source": "environment"}
    default = _env.cache_dir() if name == "HAL_CACHE_DIR" else table.environment[name]
    return {
        "name": name,
        "value": default
        or {"HAL_BACKEND": "auto", "HAL_PLUGINS": "all", "HAL_ENGINES": "none", "HAL_TRACE": "0"}.get(name, ""),
        "source": "default",
    }


def _state(state: State) -> dict[str, str]:
    return {"state": state.state, "reason": state.reason, "remedy": state.remedy, "detail": state.detail}
