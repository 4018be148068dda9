"""The environment variables of hal: their names, their values, and typos in them. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from hal._errors import SelectionError

VARIABLES: dict[str, str] = {
    "HAL_BACKEND": "backend for every op, or per op: cpu, or ascend,rope_kv_write=reference",
    "HAL_FALLBACK": "warn (default): say once when auto passes over a backend; error: raise instead",
    "HAL_CHECKS": "args (default): check metadata; full: index values too (syncs); off: none",
    "HAL_PLUGINS": "entry points that may be loaded at all, comma-separated; empty: all",
    "HAL_LANE": "how a named backend runs: device (default), interpreter, lowered",
    "HAL_CACHE_DIR": "where compiled code and measured tables are kept; default ~/.cache/hal-kernels",
}
CHOICES = {
    "HAL_FALLBACK": ("warn", "error"),
    "HAL_CHECKS": ("args", "full", "off"),
    "HAL_LANE": ("device", "interpreter", "lowered"),
}


def get(name: str) -> str:
    """The value of one of ours; the default where it is empty or unset."""
    value = os.environ.get(name, "").strip()
    allowed = CHOICES.get(name)
    if not value:
        return allowed[0] if allowed else ""
    if allowed and value not in allowed:
        raise SelectionError(
            f"hal: {name}={value}: expected one of {', '.join(allowed)}{did_you_mean(value, allowed)}"
        )
    return value


def check_names(environ: Mapping[str, str] = os.environ) -> list[str]:
    """HAL_* variables that are not ours.

    Raises:
        SelectionError: one of them is within two edits of one of ours: a typo, which would else do nothing.
    """
    foreign = []
    for name in environ:
        if name.startswith("HAL_") and name not in VARIABLES:
            near = nearest(name, VARIABLES)
            if near:
                raise SelectionError(f"hal: unknown environment variable {name}; did you mean {near}?")
            foreign.append(name)
    return sorted(foreign)


def cache_dir() -> str:
    """The folder for compiled code and measured tables; not made here."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return get("HAL_CACHE_DIR") or os.path.join(base, "hal-kernels")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The closest of `known` within two edits, whatever the case."""
    distance, found = min(((_edits(word.lower(), k.lower()), k) for k in known), default=(3, ""))
    return found if distance <= 2 else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    near = nearest(word, known)
    return f" (did you mean {near}?)" if near else ""


def _edits(a: str, b: str) -> int:
    """Levenshtein's distance, in which two neighbours that changed places are one edit."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a):
        before, previous, row = row, before, [i + 1]
        for j, y in enumerate(b):
            row.append(min(before[j + 1] + 1, row[j] + 1, before[j] + (x != y)))
            if i and j and x == b[j - 1] and a[i - 1] == y:
                row[-1] = min(row[-1], previous[j - 1] + 1)
    return row[-1]
