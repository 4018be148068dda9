"""``with hal.use(...)``: which blocks stand around the code that runs. Standard library only.

A ContextVar is a task's or a thread's own, but a generator shares its caller's: a block that a generator is in while it
is paused would decide its caller's calls. So a block that begins in a generator's own code counts only while that
generator runs. Not so where the generator is the body of a context manager or of a test's fixture, which is paused for
the very code that is meant. And blocks may end in any order, in any context.
"""

from __future__ import annotations

import inspect
import sys
from contextvars import ContextVar
from types import FrameType
from typing import Any

GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
LENDERS = ("contextlib", "_pytest", "pluggy")
"""Packages that run a generator up to its ``yield`` for the sake of the code that comes then."""


class Block(str):
    """The text of one block: equal to any other that says the same, and itself all the same."""

    __slots__ = ("frame",)
    frame: FrameType | None
    """Of the generator in whose code it stands, if it does."""


class Mixed:
    """Blocks of which some stand in generators. It equals, and hashes like, the texts of those that count now."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: tuple[Block, ...]) -> None:
        self.blocks = blocks

    def texts(self) -> tuple[str, ...]:
        # The frame of a generator that is paused, or over, has none before it.
        return tuple(str(b) for b in self.blocks if b.frame is None or b.frame.f_back is not None)

    def __eq__(self, other: object) -> bool:
        return self.texts() == (other.texts() if isinstance(other, Mixed) else other)

    def __hash__(self) -> int:
        return hash(self.texts())


scope: ContextVar[tuple[Block, ...] | Mixed] = ContextVar("hal.use", default=())
"""The blocks around the code that runs, innermost first: what a dispatched call looks itself up by, as it is.

Texts, not parsed choices: two blocks that say the same are one key of the dispatch caches, so that a block entered a
million times leaves one entry behind; and what they name is looked up again in a table that has changed since.
"""


def texts() -> tuple[str, ...]:
    """What the blocks around the code that runs say, innermost first: to keep."""
    found = scope.get()
    return found.texts() if isinstance(found, Mixed) else found


def enter(text: str, frame: FrameType | None) -> Block:
    """Begins a block; `frame` is that of the code it is in."""
    block = Block(text)
    while frame is not None and frame.f_globals.get("__name__") == "contextlib":  # an ExitStack, say
        frame = frame.f_back
    pauses = frame is not None and frame.f_code.co_flags & GENERATOR and _pauses(frame)
    block.frame = frame if pauses else None
    found = scope.get()
    if pauses or isinstance(found, Mixed):
        _set((block, *_blocks()))
    else:
        scope.set((block, *found))
    return block


def leave(block: Block) -> None:
    """Ends it, whichever blocks began after it. In another context than it began in there is nothing to end."""
    found = scope.get()
    if not isinstance(found, Mixed) and found and found[0] is block:
        scope.set(found[1:])
    else:
        _set(tuple(b for b in _blocks() if b is not block))


def caller(depth: int = 2) -> FrameType | None:
    """The frame of the code that called who calls this."""
    return sys._getframe(depth)


def _blocks() -> tuple[Block, ...]:
    found: Any = scope.get()
    return found.blocks if isinstance(found, Mixed) else found


def _set(blocks: tuple[Block, ...]) -> None:
    scope.set(Mixed(blocks) if any(b.frame is not None for b in blocks) else blocks)


def _pauses(frame: FrameType) -> bool:
    """Is it a generator's, which is paused for code that is none of its business?"""
    flags = frame.f_code.co_flags
    if not flags & GENERATOR or flags & inspect.CO_ITERABLE_COROUTINE:
        return False
    driver = frame.f_back
    while driver is not None and driver.f_code.co_flags & GENERATOR:  # yield from
        driver = driver.f_back
    name = "" if driver is None else driver.f_globals.get("__name__", "")
    return name.partition(".")[0] not in LENDERS
