"""hal.registry: manifests, discovery, selection, the dispatch table.

A plugin's manifest needs `Backend`, `Impl` and `hookimpl` from here; importing them imports no framework.

What is global, who writes it, and under which lock:

====================================  =========================================================  ===================
object                                written by                                                 lock
====================================  =========================================================  ===================
`_table.live`: the table in force,    `configure`, `register`, `unregister`, `reload`, and       `live.lock`; a
settings, registered backends,        whoever needs a table first; a forked child makes the      reader takes none:
environment                           lock anew                                                  one reference
`Table.caches`: op -> key ->          `_dispatch`, at the first call of a kind                   none: two threads
the function that runs                                                                           write the same
`Table.warned`: what was warned of    `_select`, at a downgrade                                  none
`Table` 's parsed choices             `Table.parse`; at most 1000                                none
`Entry` 's states and functions       `_discover`: the first probe, the first import             none: both agree
`_scope.scope`: blocks of `hal.use`   `hal.use`                                                  none: a context's
`_config.asker`: an engine's layer    `hal.engines.layer`                                        none: a context's
`_dispatch._dispatchers`: op ->       `hal.<op>`, when its name is first used                    none: two threads
the dispatched function                                                                          write the same
====================================  =========================================================  ===================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hal.registry._manifest import API, Backend, Impl, hookimpl

if TYPE_CHECKING:
    from hal.registry._select import Explanation, Verdict
    from hal.registry._table import Table, current, register, reload, table, unregister

__all__ = [
    "API",
    "Backend",
    "Explanation",
    "Impl",
    "Table",
    "Verdict",
    "current",
    "hookimpl",
    "register",
    "reload",
    "table",
    "unregister",
]

_LAZY = {
    **dict.fromkeys(("Explanation", "Verdict"), "_select"),
    **dict.fromkeys(("Table", "current", "register", "reload", "table", "unregister"), "_table"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hal.registry' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"hal.registry.{_LAZY[name]}"), name)
