"""The environment variables of hal: their names, their values, and typos in them. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hal._errors import SelectionError

VARIABLES: dict[str, str] = {
    "HAL_BACKEND": "backend for every op, or per op: cpu; ascend,rope_kv_write=reference; acme>cpu (acme, else cpu)",
    "HAL_FALLBACK": "warn (default): say once when auto passes over a backend; error: raise instead",
    "HAL_CHECKS": "args (default): check metadata; full: index values too (syncs); off: none",
    "HAL_PLUGINS": "entry points that may be loaded at all, comma-separated; empty: all; none: none",
    "HAL_LANE": "how a named backend runs: device (default), interpreter, lowered",
    "HAL_ENGINES": "engines whose whole adapter is switched on, comma-separated: vllm,transformers; default none",
    "HAL_TRACE": "1: calls per op and backend, on stderr at exit; a path: as JSON lines, of every process; 0: off",
    "HAL_CACHE_DIR": "where compiled code and measured tables are kept; default ~/.cache/hal-kernels",
}
CHOICES = {
    "HAL_FALLBACK": ("warn", "error"),
    "HAL_CHECKS": ("args", "full", "off"),
    "HAL_LANE": ("device", "interpreter", "lowered"),
}
LISTS = {"HAL_ENGINES": ("vllm", "transformers", "sglang")}
"""Variables that name several of a few known things."""


def get(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """The value of one of ours; the default where it is empty or unset."""
    value = environ.get(name, "").strip()
    allowed = CHOICES.get(name)
    if not value:
        return allowed[0] if allowed else ""
    if allowed and value not in allowed:
        raise SelectionError(f"hal: {name}={value}: expected one of {', '.join(allowed)}{did_you_mean(value, allowed)}")
    return value


def get_list(name: str) -> tuple[str, ...]:
    """What a variable of `LISTS` names, each once, in its order; empty where it is empty or unset.

    Raises:
        SelectionError: one of the names is not known.
    """
    known = LISTS[name]
    words = dict.fromkeys(w.strip() for w in get(name).split(",") if w.strip())
    for word in words:
        if word not in known:
            raise SelectionError(
                f"hal: {name}={get(name)}: no {word}; there are {', '.join(known)}{did_you_mean(word, known)}"
            )
    return tuple(words)


@dataclass(frozen=True)
class Environment:
    """The HAL_* variables as they were at one moment: before any plugin ran, which may set some."""

    given: Mapping[str, str]
    """Those of ours that are set and not blank."""
    foreign: tuple[str, ...]
    """HAL_* variables that are not ours."""
    plugins: tuple[str, ...] | None
    """The entry points that may be loaded, ``()`` where HAL_PLUGINS is ``none``; None: all."""

    @classmethod
    def read(cls) -> Environment:
        """The process's.

        Raises:
            SelectionError: an unknown value, a misspelt name, or an allow-list that names nothing.
        """
        environ = dict(os.environ)
        given = {n: environ[n] for n in VARIABLES if environ.get(n, "").strip()}
        found = cls(given, tuple(check_names(environ)), _plugins(given.get("HAL_PLUGINS", "")))
        for name in CHOICES:
            found[name]
        return found

    def __getitem__(self, name: str) -> str:
        return get(name, self.given)


def _plugins(text: str) -> tuple[str, ...] | None:
    names = tuple(dict.fromkeys(p.strip() for p in text.split(",") if p.strip()))
    if text.strip() and not names:
        raise SelectionError(
            f"hal: HAL_PLUGINS={text}: it names no entry point; unset it to load all, or set it to none"
        )
    if names == ("none",):
        return ()
    return names or None


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
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # to be ignored, says the specification
        base = os.path.join(os.path.expanduser("~"), ".cache")
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
