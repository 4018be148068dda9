"""The entry points of ``hal.backends``, distribution by distribution: damaged metadata is its owner's fault alone.

`importlib.metadata.entry_points` reads every distribution's and fails with the first that can't be read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import PurePath
from typing import Any

from packaging.utils import canonicalize_name

from hal.registry._isolate import State, attempt, note
from hal.registry._requirements import DISTRIBUTION

GROUP = "hal.backends"
# A checkout that is not installed has no entry points; its own backends are found all the same.
BUILTIN = {"cpu": "hal.backends.cpu", "cuda": "hal.backends.cuda", "ascend": "hal.backends.ascend"}
RESERVED = frozenset({*BUILTIN, "auto", "reference", "none"})


@dataclass(frozen=True)
class Point:
    """One entry point, or what stands in the place of those that could not be read."""

    name: str
    value: str
    distribution: str
    dist: metadata.Distribution | None = None
    builtin: bool = False
    fault: State | None = None

    @property
    def title(self) -> str:
        """Its backend's name where nothing better is known; never that of a built-in."""
        if self.builtin or self.name not in RESERVED:
            return self.name
        return f"{self.name} ({self.distribution})"


def entry_points() -> list[Point]:
    """Each once, ours first. Nothing is imported."""
    found = [Point(name, value, DISTRIBUTION, builtin=True) for name, value in BUILTIN.items()]
    seen: set[str] = set()
    for dist in _distributions():
        where = _stem(dist)
        # The first on the path is the one that is installed; a checkout that is installed too lists itself twice.
        if where not in seen:
            seen.add(where)
            found += [p for p in _points_of(dist, where) if not _is_builtin(p)]
    return found


def _is_builtin(point: Point) -> bool:
    return point.distribution == DISTRIBUTION and BUILTIN.get(point.name) == point.value


def _distributions() -> Iterator[metadata.Distribution]:
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_distributions", None)
        if find is None:
            continue
        found = attempt("find_distributions", partial(_list, find))
        if isinstance(found, State):
            note(f"hal: {type(finder).__name__} finds no plugins: {found.reason}")
        else:
            yield from found


def _list(find: Callable[..., Any]) -> list[metadata.Distribution]:
    return list(find(metadata.DistributionFinder.Context()))


def _stem(dist: metadata.Distribution) -> str:
    """A distribution's name as its folder has it: reading it costs nothing and can't fail."""
    path = getattr(dist, "_path", None)
    if path is not None:
        return canonicalize_name(PurePath(str(path)).stem.partition("-")[0])
    name = attempt("its name", lambda: canonicalize_name(dist.metadata["Name"]))
    return str(id(dist)) if isinstance(name, State) else name


def _points_of(dist: metadata.Distribution, where: str) -> list[Point]:
    text = attempt("its entry_points.txt", lambda: _text(dist))
    if isinstance(text, State) or GROUP not in text:
        return []
    found = attempt("its entry_points.txt", lambda: list(dist.entry_points.select(group=GROUP)))
    if isinstance(found, State):
        return [Point(where, "", where, dist, fault=found)]
    name = attempt("its METADATA", lambda: _name(dist))
    if not isinstance(name, State):
        return [Point(p.name, p.value, name, dist) for p in found]
    reason = f"its distribution has no METADATA that can be read: {getattr(dist, '_path', where)}"
    fault = State("broken", reason, f"pip install --force-reinstall {where}", name.detail)
    return [Point(p.name, p.value, where, dist, fault=fault) for p in found]


def _text(dist: metadata.Distribution) -> str:
    try:
        return dist.read_text("entry_points.txt") or ""
    except UnicodeDecodeError as e:
        # Enough to see whether it is a plugin's.
        return e.object.decode("latin-1")


def _name(dist: metadata.Distribution) -> str:
    name, version = dist.metadata["Name"], dist.version
    if not isinstance(name, str) or not isinstance(version, str):
        raise ValueError(f"name {name!r}, version {version!r}")
    return DISTRIBUTION if canonicalize_name(name) == DISTRIBUTION else name
