"""Refuses a subinterpreter: importing torch or numba there ends or hangs the process. Standard library only."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def refuse() -> None:
    """Raises in any interpreter of this process but the first.

    Raises:
        ImportError: what to do instead.
    """
    if _number("get_current") != _number("get_main"):
        raise ImportError(
            "hal: this is a subinterpreter, where torch can't be used; import hal in the process's main interpreter, "
            "or in a process of its own (mod_wsgi: WSGIApplicationGroup %{GLOBAL})"
        )


def _number(which: str) -> int:
    for name in ("_interpreters", "_xxsubinterpreters"):  # Python 3.13 and later, and before
        try:
            found: Any = getattr(import_module(name), which)()
        except ImportError:
            continue
        return int(found[0] if isinstance(found, tuple) else found)
    return 0  # an interpreter without others
