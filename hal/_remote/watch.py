"""Whose code runs during a call: how a secret fallback is seen."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any


def code_of(fn: Callable[..., Any]) -> CodeType | None:
    """The code of a Python function, unwrapped; None for what is not Python."""
    seen = 0
    while hasattr(fn, "__wrapped__") and seen < 10:
        fn, seen = fn.__wrapped__, seen + 1
    code = getattr(fn, "__code__", None)
    return code if isinstance(code, CodeType) else None


@contextmanager
def watch(
    foreign: Mapping[CodeType, str], own: CodeType | None = None, taker: Callable[..., Any] | None = None
) -> Iterator[set[str]]:
    """Collects the owners of `foreign` code that runs inside, in any thread started there.

    The set also gets ``"own"`` once `own` has run, or the `taker` of its calls, which is C's.
    """
    seen: set[str] = set()
    whose = {id(code): owner for code, owner in foreign.items()}
    if own is not None:
        whose[id(own)] = "own"

    def hook(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            owner = whose.get(id(frame.f_code))
            if owner is not None:
                seen.add(owner)
        elif event == "c_call" and taker is not None and arg == taker:
            seen.add("own")

    before, before_threads = sys.getprofile(), threading.getprofile()
    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        yield seen
    finally:
        sys.setprofile(before)
        threading.setprofile(before_threads)
