"""What hal's commands print: data that nothing else mixes with, on any terminal, to where it can be written."""

from __future__ import annotations

import codecs
import io
import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TextIO

from hal._errors import ArgumentError

_PLAIN = dict(zip("—–…µ·×≤≥→½━╸╺•’‘“”✓✗", "--.u.x<>>/---*''\"\"+x", strict=True))


def plain(error: UnicodeError) -> tuple[str | bytes, int]:
    """A codec's error handler: what the encoding lacks becomes one similar ASCII character, so that columns stay."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    return "".join(map(_similar, lost)), error.end


def _similar(character: str) -> str:
    if character in _PLAIN:
        return _PLAIN[character]
    first = unicodedata.normalize("NFKD", character)[0]
    return first if first.isascii() else "?"


codecs.register_error("hal.plain", plain)


def fit_terminal() -> None:
    """Lets stdout and stderr print any text in the encoding they have. Handling of errors that was asked for stays."""
    for stream, usual in ((sys.stdout, "strict"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == usual:
            stream.reconfigure(errors="hal.plain")


@contextmanager
def data_output() -> Iterator[TextIO]:
    """A command's stdout for its data alone. What plugins print, they and the processes they start, goes to stderr.

    In a process whose stdout is its own (a shell's, a pipe) that holds to its end: plugins print on leaving too.
    """
    ours = sys.stdout
    try:
        own = ours.fileno() == 1
    except (OSError, ValueError, AttributeError):
        own = False
    if own:
        ours.flush()
        ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
    with redirect_stdout(sys.stderr):
        yield ours
    ours.flush()


def check_folder(command: str, option: str, folder: Path) -> None:
    """Makes a folder in which a command will write when it is done.

    Raises:
        ArgumentError: it can't be made or written, said before hours of work and not after.
    """
    expected = "a folder that can be written"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".hal-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise ArgumentError(command, option, expected, f"{folder}: {e.strerror}") from None
