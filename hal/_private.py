"""What a report must not tell: names of the user and the machine, addresses, where files lie. Standard library."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

_PUBLIC = {"root", "localhost", "localdomain", "linux", "ubuntu", "runner"}
_PATH = re.compile(r"(?<![\w.:/~])(?:~|\.{1,2})?(?:/[^\s/:,;'\"()<>|\[\]{}]+)+/?")
_URL = re.compile(r"\b\w+://\S+")
# Versions have four numbers too.
_V4 = r"(?<!ersion[=: ])(?<!ersion: )(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])"
_IP = re.compile(rf"{_V4}|(?<![\w:])(?:[0-9a-f]{{1,4}}:){{3,7}}[0-9a-f:]*(?!\w)", re.I)
_MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_KEPT = re.compile(r".*/(?:site-packages|dist-packages|python3\.\d+)/(.+)$")
_FILES = (".py", ".c", ".cpp", ".h", ".so", ".sh", ".mlir", ".ttir", ".ll", ".info", ".cfg", ".json")


@cache
def names() -> tuple[str, ...]:
    """The user's and the machine's, longest first; those that everybody has are none."""
    found = {os.environ.get(n, "") for n in ("USER", "LOGNAME", "USERNAME", "SUDO_USER", "HOSTNAME", "HOST")}
    found |= {Path.home().name, socket.gethostname(), os.uname().nodename}
    with suppress(KeyError, OSError):
        found.add(getpass.getuser())
    found |= {n.partition(".")[0] for n in found}
    return tuple(sorted((n for n in found if len(n) > 1 and n.lower() not in _PUBLIC), key=len, reverse=True))


def redact(value: Any, words: Iterable[str] | None = None) -> Any:
    """`value`, of dicts, lists and plain values, with every text in it redacted; keys stay.

    A path keeps what follows ``site-packages``, or a source file's own name. Names are looked for as whole words.
    """
    words = names() if words is None else tuple(words)
    if isinstance(value, dict):
        return {k: redact(v, words) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact(v, words) for v in value]
    return _text(value, words) if isinstance(value, str) else value


def _text(text: str, words: Iterable[str]) -> str:
    home = str(Path.home())
    if len(home) > 1:
        # A home with a blank in its name would end a path for the pattern.
        text = text.replace(home, "~")
    text = _URL.sub("[url]", text)
    text = _MAIL.sub("[mail]", text)
    text = _PATH.sub(lambda m: _path(m.group()), text)
    text = _IP.sub("[address]", text)
    for word in words:
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", "[name]", text, flags=re.I)
    return text


def _path(path: str) -> str:
    kept = _KEPT.match(path)
    if kept:
        return f"…/{kept.group(1)}"
    last = path.rpartition("/")[2]
    return f"…/{last}" if last.endswith(_FILES) else "…"
