"""What the shell completes: ops, backends, lanes, devices. Imports no contract, no plugin and no framework."""

from __future__ import annotations

from collections.abc import Iterable

OTHER_TABLES = (
    "dispatch",
    "launcher",
    "programmatic_launch",
    "host_calls",
    "hicache",
    "mla_decode_attention",
    "mla_extend_attention",
    "extend_attention_hopper",
    "decode_by_block_table",
)
"""Of ``hal bench``, beside those of ops."""


def ops(incomplete: str) -> list[str]:
    from hal.ops import BUILTIN

    return _starting(BUILTIN, incomplete)


def tables(incomplete: str) -> list[str]:
    """Of ``hal bench``, on one device or the other."""
    return [*ops(incomplete), *_starting(OTHER_TABLES, incomplete)]


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
