"""`info`: what is here, as data: backends, states, the op x backend table, the environment."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from hal import _env
from hal._version import __version__
from hal.registry._discover import Entry, State, resolve
from hal.registry._manifest import Impl
from hal.registry._table import Table, live


def info() -> dict[str, Any]:
    """Everything that an operator asks: backends with states and reasons, the op x backend table, the environment.

    Returns:
        Plain data, as ``hal info --json`` prints it.
    """
    table = live.current()
    backends = []
    for name, entry in table.entries.items():
        lanes = {lane: _state(entry.state(lane)) for lane in entry.lanes} or {"device": _state(entry.state())}
        backends.append({"name": name, "origin": entry.origin, "distribution": entry.distribution, "lanes": lanes,
                         "limits": dict(entry.manifest.limits) if entry.manifest else {},
                         "status": _status(entry)})  # fmt: skip
    rows: dict[str, dict[str, Any]] = {}
    for op in table.op_names:
        rows[op] = {"reference": ["ready"]}
        for name, entry in table.entries.items():
            rows[op][name] = [_cell(entry, impl) for impl in entry.impls(op)] or ["unimplemented"]
    return {
        "hal": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lane": table.lane,
        "backends": backends,
        "ops": rows,
        "environment": [_variable(table, n) for n in _env.VARIABLES],
        "foreign_variables": table.foreign,
        "blocked_plugins": list(table.found.blocked),
    }


def _cell(entry: Entry, impl: Impl) -> str:
    lanes = [lane for lane in entry.lanes if entry.impl_state(impl, lane).ready]
    text = f"ready ({', '.join(lanes)})" if lanes and lanes != ["device"] else entry.impl_state(impl).state
    return f"{impl.name}: {text}{', when named' if impl.named else ''}" if impl.name else text


def _status(entry: Entry) -> dict[str, str]:
    """What a ready backend says of itself; an exception is what it says then."""
    told = entry.manifest.status if entry.manifest else None
    if told is None or not any(entry.state(lane).ready for lane in entry.lanes):
        return {}
    try:
        return {str(k): str(v) for k, v in resolve(told)().items()}
    except Exception as e:
        return {"status": f"{type(e).__name__}: {e}"}


def _variable(table: Table, name: str) -> dict[str, str]:
    """A variable's value in force and who set it."""
    setting = {"HAL_BACKEND": "backend", "HAL_FALLBACK": "fallback", "HAL_CHECKS": "checks"}.get(name, "")
    if table.settings.get(setting):
        return {"name": name, "value": str(table.settings[setting]), "source": "hal.configure"}
    if os.environ.get(name, "").strip():
        return {"name": name, "value": os.environ[name], "source": "environment"}
    default = _env.cache_dir() if name == "HAL_CACHE_DIR" else _env.get(name)
    return {
        "name": name,
        "value": default or {"HAL_BACKEND": "auto", "HAL_PLUGINS": "all"}.get(name, ""),
        "source": "default",
    }


def _state(state: State) -> dict[str, str]:
    return {"state": state.state, "reason": state.reason, "remedy": state.remedy, "detail": state.detail}
