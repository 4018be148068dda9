"""What the shell completes: ops, backends, lanes, devices. Imports no contract, no plugin and no framework."""

from __future__ import annotations

from collections.abc import Iterable


def ops(incomplete: str) -> list[str]:
    from hal.ops import BUILTIN

    return _starting(BUILTIN, incomplete)


def tables(incomplete: str) -> list[str]:
    """Of ``hal bench``."""
    return [*ops(incomplete), *_starting(("dispatch", "engine", "launcher"), incomplete)]


def backends(incomplete: str) -> list[str]:
    """By the entry points of what is installed; after ``>``, the next of a chain."""
    from hal.registry._points import entry_points

    before, sign, word = incomplete.rpartition(">")
    names = dict.fromkeys((*(p.name for p in entry_points()), "reference"))
    return [before + sign + n for n in _starting(names, word) if n not in before.split(">")]


def lanes(incomplete: str) -> list[str]:
    from hal.registry._manifest import LANES

    return _starting(LANES, incomplete)


def devices(incomplete: str) -> list[str]:
    return _starting(("cpu", "cuda", "npu"), incomplete)


def _starting(words: Iterable[str], incomplete: str) -> list[str]:
    return [w for w in words if w.startswith(incomplete)]
