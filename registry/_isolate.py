"""Plugin code is run here: whatever it raises becomes its own state, and whoever takes long is named.

An exception that a signal brought (Ctrl-C, a server's SIGTERM) while plugin code happened to run is the user's, and
goes on.
"""

from __future__ import annotations

import functools
import opcode
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, TypeVar

from hal._errors import BackendError, HalError

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds after which `watch` says who is still at work."""
_RAISE = opcode.opmap["RAISE_VARARGS"]
_OURS = str(Path(__file__).resolve().parent)


@dataclass(frozen=True)
class State:
    """``state``: ``ready``, ``absent``, ``incompatible``, ``unavailable`` or ``broken``, of an op also
    ``unimplemented``; the rest says why, and what would help."""

    state: str
    reason: str = ""
    remedy: str = ""
    detail: str = ""
    """A traceback, for `hal info --json`."""

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def __str__(self) -> str:
        return self.state + (f": {self.reason}" if self.reason else "") + (f" — {self.remedy}" if self.remedy else "")


READY = State("ready")


def attempt(where: str, call: Callable[[], T]) -> T | State:
    """What plugin code returns; whatever it raises, as the state ``broken``.

    Args:
        where: begins the reason: ``its probe``, ``importing acme``.

    Raises:
        BaseException: one that a signal handler raised, which is nobody's fault.
    """
    got, error = _catch(call)
    return got if error is None else broken(where, error)


def demand(what: str, call: Callable[[], T]) -> T:
    """What a plugin's tool returns, where its failure is the caller's too.

    Args:
        what: begins the message: ``warmup: acme``.

    Raises:
        BackendError: whatever it raised that is no error of hal's.
        BaseException: one that a signal handler raised.
    """
    got, error = _catch(call)
    if error is None:
        return got
    if isinstance(error, HalError):
        raise error
    raise BackendError(f"hal: {broken(what, error).reason}") from error


def _catch(call: Callable[[], T]) -> tuple[T, None] | tuple[Any, BaseException]:
    outer, handlers = sys.exception(), _handlers()
    try:
        return call(), None
    except BaseException as error:
        brought = _by_signal(error, outer, handlers)
        if brought is error:
            raise
        if brought is not None:
            raise brought from None
        return None, error


def ask(what: str, call: Callable[[], Any]) -> str | State | None:
    """A plugin's answer of None (yes) or the reason why not; anything else is the state ``broken``.

    Args:
        what: begins the reason, after "its": ``probe``, ``supports``.
    """

    def asked() -> str | State | None:
        said = call()
        if said is None or isinstance(said, str):
            return said
        return State("broken", f"its {what} returned {said!r}; expected None or the reason why not")

    return attempt(f"its {what}", asked)


def note(text: str) -> None:
    """Warns of a plugin. Where warnings are errors it says so on stderr: the caller of an op has no part in it."""
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        print(text, file=sys.stderr)


def broken(where: str, error: BaseException) -> State:
    """The state of a plugin whose code raised, with the line that did."""
    text = "".join(traceback.format_exception(error))
    line = _line(error)
    at = f" (at {line})" if line else ""
    return State("broken", f"{where} raised {type(error).__name__}: {_text(error)}{at}", "", text)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as e:
        return f"<its text raised {type(e).__name__}>"


def _line(error: BaseException) -> str:
    """``file:line`` of the innermost code that is neither the import system's nor this package's; empty for none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    found = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        module = frame.f_globals.get("__name__", "")
        if not name.startswith("<") and module.partition(".")[0] != "importlib" and not _is_ours(name):
            found = f"{name}:{number}"
    return found


@functools.cache
def _is_ours(file: str) -> bool:
    return os.path.dirname(os.path.realpath(file)) == _OURS


# --- signals ----------------------------------------------------------------------------------------


def _handlers() -> frozenset[CodeType]:
    """The code of the process's signal handlers that are written in Python."""
    found = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler):
            code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
            if isinstance(code, CodeType):
                found.add(code)
    return frozenset(found)


def _by_signal(
    error: BaseException, outer: BaseException | None, handlers: frozenset[CodeType]
) -> BaseException | None:
    """The exception that a signal brought: `error`, or what it was raised in the handling of; None for neither.

    Python's own handler of SIGINT leaves no frame in a traceback: its KeyboardInterrupt stands at any instruction, one
    that code raises stands at a ``raise``. Where that can't be told (compiled code), it is the user's.
    """
    stack, seen = [error], {id(outer)}
    while stack:
        link = stack.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        frames = list(_frames(link.__traceback__))
        if any(tb.tb_frame.f_code in handlers for tb in frames):
            return link
        if isinstance(link, KeyboardInterrupt) and frames and not _raises(frames[-1]):
            return link
        stack += [e for e in (link.__cause__, link.__context__) if e is not None]
        if isinstance(link, BaseExceptionGroup):
            stack += link.exceptions
    return None


def _frames(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next


def _raises(tb: TracebackType) -> bool:
    code = tb.tb_frame.f_code.co_code
    return 0 <= tb.tb_lasti < len(code) and code[tb.tb_lasti] == _RAISE


# --- time, and the environment ----------------------------------------------------------------------


@contextmanager
def watch(what: str, remedy: str = "") -> Iterator[None]:
    """Says on stderr, after `PATIENCE` seconds, who is still at work: a plugin that hangs must not do so in silence.

    Args:
        what: ``importing acme (hal-acme)``.
        remedy: what would leave it out.
    """

    def tell() -> None:
        advice = f" — {remedy}" if remedy else ""
        print(f"hal: still {what}, after {PATIENCE:g} s{advice}", file=sys.stderr, flush=True)

    timer = threading.Timer(PATIENCE, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def same_environment(who: str) -> Iterator[None]:
    """Puts back the HAL_* variables that a plugin changes while it is loaded, and warns: they are the user's."""
    before = _ours()
    try:
        yield
    finally:
        after = _ours()
        changed = sorted({n for n in before.keys() | after.keys() if before.get(n) != after.get(n)})
        for name in changed:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)
        if changed:
            names = ", ".join(changed)
            note(f"hal: {who} changed {names} while it was loaded: put back, the environment is the user's")


def _ours() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("HAL_")}
