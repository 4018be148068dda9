"""Parts of hal that need more than it: an extra, or a backend's own tools (``hal inspect``, ``hal tune``)."""

from __future__ import annotations

import importlib
import json
from typing import Any, TextIO

from hal._errors import HalError, NoBackendError, SelectionError


def run_part(module: str, function: str, what: str, extra: str, *args: Any, **kwargs: Any) -> int:
    """Calls a part of hal that needs an extra; without it, says which one."""
    try:
        fn = getattr(importlib.import_module(module), function)
        return int(fn(*args, **kwargs))
    except ModuleNotFoundError as e:
        if e.name and e.name.split(".")[0] == "hal":
            raise
        raise HalError(f"hal: {what} needs {e.name} — pip install 'hal-kernels[{extra}]'") from None


def manifest_rows(backend: str, what: str, *args: Any) -> list[dict[str, Any]]:
    """The rows of a backend's own tool, which its manifest names."""
    from hal.registry import current
    from hal.registry._discover import resolve
    from hal.registry._isolate import demand

    table = current()
    table.parse(backend, "BACKEND={}")
    entry = table.entries.get(backend)
    tool = getattr(entry.manifest, what, None) if entry else None
    if entry is None or tool is None:
        have = [n for n, e in table.entries.items() if getattr(e.manifest, what, None)]
        raise SelectionError(f"hal: {what}: {backend} has no such tool; these have: {', '.join(have) or 'none'}")
    states = [entry.state(lane) for lane in entry.lanes]
    # A compiler needs no device: unavailable is no obstacle to looking at what it makes.
    if (what == "tune" and not entry.state().ready) or all(
        s.state in ("absent", "broken", "incompatible") for s in states
    ):
        raise NoBackendError(f"hal: {what}: {backend} is {entry.state()}")
    return demand(f"{what}: {backend}", lambda: list(resolve(tool)(*args)))


def show_rows(rows: list[dict[str, Any]], as_json: bool, out: TextIO) -> None:
    """A line a row, or all as JSON."""
    if as_json:
        print(json.dumps(rows, indent=1, default=str), file=out)
        return
    for row in rows:
        print("  ".join(f"{k}={v}" for k, v in row.items()), file=out)
