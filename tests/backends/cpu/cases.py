"""What the tests of the CPU backend share: its launchers, called without selection and judged by the suite."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from hal._remote.target import DirectTarget
from hal.backends.cpu import _again
from hal.conformance.execute import execute
from hal.ops import get_spec

OPS = ("get_last_loc", "assign_extend_cache_locs", "rope_kv_write", "kv_transfer")


def ours(op: str) -> Callable[..., Any]:
    """The op, as if it had never been called: what a test changes in its module, no call remembers otherwise."""
    _again.forget()
    return getattr(importlib.import_module(f"hal.backends.cpu.{op}"), op)


def params(op: str, sample: str) -> dict[str, Any]:
    return next(dict(s.params) for s in get_spec(op).samples if s.name == sample)


def judge(op: str, side: str = "", **params: Any) -> None:
    """One call of `ours`; `side` as in `execute`."""
    execute(get_spec(op), get_spec(op).make(**params), DirectTarget.of(op, ours(op)), side=side)
