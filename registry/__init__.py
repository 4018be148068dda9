"""hal.registry: manifests, discovery, selection, the dispatch table.

A plugin's manifest needs `Backend`, `Impl` and `hookimpl` from here; importing them imports no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hal.registry._manifest import API, Backend, Impl, hookimpl

if TYPE_CHECKING:
    from hal.registry._select import Explanation, Verdict
    from hal.registry._table import register, reload, table, unregister

__all__ = [
    "API", "Backend", "Explanation", "Impl", "Verdict", "hookimpl", "register", "reload", "table", "unregister",
]  # fmt: skip

_LAZY = {
    "Explanation": "_select", "Verdict": "_select", "register": "_table", "reload": "_table", "table": "_table",
    "unregister": "_table",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hal.registry' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"hal.registry.{_LAZY[name]}"), name)
