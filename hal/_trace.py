"""Calls per op and backend: what ran, and how often the reference did. Off, it costs nothing: nothing is wrapped.

A function is wrapped when it is selected or bound. Standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hal import _env
from hal._errors import SelectionError

_HEADS = ("op", "backend", "device", "calls", "captured")
EVERY = 1.0
"""Seconds between two lines of a process in the file: what a process that is killed may lose."""


@dataclass(frozen=True)
class Calls:
    """One row: calls of an op that one backend's implementation got.

    Attributes:
        op: the op's name.
        backend: as in error texts: ``cpu``, ``cuda/flashinfer``, ``ascend (lowered)``, ``reference``.
        device: the device type of the tensors.
        calls: how many ran.
        captured: how many were recorded into a graph instead. Each replay of that graph runs them again, and no
            replay is counted: it passes no Python.
    """

    op: str
    backend: str
    device: str
    calls: int
    captured: int = 0


@dataclass(frozen=True)
class Trace:
    """What `hal.trace` returns: `rows`, most calls first; ``str()`` is a table."""

    rows: tuple[Calls, ...]
    processes: int = 1

    def count(self, op: str | None = None, backend: str | None = None) -> int:
        """Calls, captured ones included, of one op or all, on one backend (any of its implementations) or all."""
        return sum(
            r.calls + r.captured
            for r in self.rows
            if op in (None, r.op) and (backend is None or r.backend.split("/")[0].split(" ")[0] == backend)
        )

    def _repr_html_(self) -> str:
        from hal._show import Grid, page

        rows = [(r.op, r.backend, r.device, str(r.calls), str(r.captured or "")) for r in self.rows]
        return page(self._summary(), [Grid("", _HEADS, rows)] if rows else [])

    def _summary(self) -> str:
        if not self.rows:
            return "no op was called"
        return f"reference ran {self.count(backend='reference')} of {self.count()} calls"

    def __str__(self) -> str:
        if not self.rows:
            return self._summary()
        cells = [_HEADS]
        cells += [(r.op, r.backend, r.device, str(r.calls), str(r.captured or "")) for r in self.rows]
        wide = [max(len(row[i]) for row in cells) for i in range(5)]
        lines = [
            "  ".join(c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(row, wide, strict=True)))
            for row in cells
        ]
        return "\n".join(["  " + line.rstrip() for line in lines] + [f"  {self._summary()}"])


def trace(path: str | os.PathLike[str] | None = None, *, reset: bool = False) -> Trace:
    """Calls per op and backend since tracing was switched on, by ``HAL_TRACE`` or ``hal.configure(trace=...)``.

    Counted are calls of ``hal.<op>`` and of functions from `hal.bind`, if they were selected or bound while tracing
    was on. A call that is recorded into a CUDA graph is counted as captured, once; replays are not counted.

    Args:
        path: a file that ``HAL_TRACE=path`` made: the sum over all processes that wrote to it. None: this process.
        reset: this process counts from nothing again, after this.

    Raises:
        SelectionError: no such file, or a line of it is none of ours.

    Example:
        >>> import torch, hal
        >>> hal.configure(trace="1")
        >>> last = hal.get_last_loc(torch.zeros(1, 4, dtype=torch.int32), torch.tensor([0]), torch.tensor([1]))
        >>> hal.trace(reset=True).count("get_last_loc", "reference")
        1
        >>> hal.configure(trace="0")
    """
    if path is not None:
        return _read(os.fspath(path))
    with _counts.lock:
        found = _snapshot()
        if reset:
            _counts.reset()
    return found


def target(value: str) -> str:
    """Where to: empty for off, ``-`` for the table on stderr, else a file.

    Raises:
        SelectionError: a word that is no path.
    """
    if value in ("", "0"):
        return ""
    if value == "1":
        return "-"
    if os.sep not in value and "." not in value:
        raise SelectionError(
            f"hal: HAL_TRACE={value}: expected 1, 0 or the path of a file, e.g. ./{value} or {value}.jsonl"
        )
    return os.path.abspath(value)


def count_calls(fn: Callable[..., Any], op: str, backend: str, device: str, where: str) -> Callable[..., Any]:
    """`fn`, counting its calls; `where` is what `target` returned."""
    key = op, backend, device
    counts, capturing = _counts, _capturing(device)

    @functools.wraps(fn)
    def count(*args: Any, **kwargs: Any) -> Any:
        counts.add(key, capturing(), where)
        return fn(*args, **kwargs)

    return count


class _Counts:
    """The counts of this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.started = time.time()
        self.reset()
        self.armed = False

    def reset(self) -> None:
        self.rows: dict[tuple[str, str, str], list[int]] = {}
        self.where = ""
        self.told: Any = None
        self.due = 0.0

    def add(self, key: tuple[str, str, str], captured: bool, where: str) -> None:
        with self.lock:
            self.rows.setdefault(key, [0, 0])[captured] += 1
            self.where = where
            if not self.armed:
                self._arm()
            if where != "-" and time.monotonic() >= self.due:
                self.due = time.monotonic() + EVERY
                self.tell()

    def _arm(self) -> None:
        self.armed = True
        atexit.register(self.tell)
        # A forked worker of multiprocessing leaves without atexit, but not without its finalizers.
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.Finalize(None, self.tell, exitpriority=0)

    def tell(self) -> None:
        """Writes what was counted, unless it was written already."""
        with self.lock:
            found = _snapshot()
            if not found.rows or found == self.told or not self.where:
                return
            self.told = found
            if self.where == "-":
                who = f"process {os.getpid()} ({_process()})"
                with contextlib.suppress(OSError, ValueError):
                    print(f"hal: calls of {who}\n{found}", file=sys.stderr, flush=True)
                return
            line = {
                "pid": os.getpid(),
                "started": self.started,
                "process": _process(),
                "time": time.time(),
                "calls": [asdict(r) for r in found.rows],
            }
            # One write to a file opened for appending: lines of several processes do not mix.
            with open(self.where, "a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")


def _snapshot() -> Trace:
    rows = [Calls(*key, *n) for key, n in _counts.rows.items()]
    return Trace(tuple(sorted(rows, key=lambda r: (-r.calls - r.captured, r.op, r.backend))))


def _read(path: str) -> Trace:
    try:
        with open(path, encoding="utf-8") as lines:
            # The counts of a line are those since its process began: the last says all.
            last = {(d["pid"], d["started"]): d["calls"] for d in map(json.loads, lines)}
        rows = _sum(Calls(**c) for calls in last.values() for c in calls)
    except FileNotFoundError:
        raise SelectionError(f"hal: trace: no file {path}: no process counted a call into it") from None
    except (ValueError, KeyError, TypeError) as e:
        raise SelectionError(f"hal: trace: {path} is not what HAL_TRACE writes: {e}") from None
    return Trace(rows, len(last))


def _sum(rows: Iterable[Calls]) -> tuple[Calls, ...]:
    sums: dict[tuple[str, str, str], list[int]] = {}
    for r in rows:
        n = sums.setdefault((r.op, r.backend, r.device), [0, 0])
        n[0], n[1] = n[0] + r.calls, n[1] + r.captured
    found = [Calls(*key, *n) for key, n in sums.items()]
    return tuple(sorted(found, key=lambda r: (-r.calls - r.captured, r.op, r.backend)))


def _capturing(device: str) -> Callable[[], bool]:
    """Is a graph being captured? Known without a look for a device that has none."""
    if device == "cpu":
        return lambda: False
    from hal.registry._select import capturing

    return lambda: capturing(device)


def _process() -> str:
    multiprocessing = sys.modules.get("multiprocessing")
    name = multiprocessing.current_process().name if multiprocessing is not None else "MainProcess"
    return os.path.basename(sys.argv[0] or "python") if name == "MainProcess" else name


def setting(value: str | None) -> str:
    """`target` of a setting from Python, or else of HAL_TRACE."""
    return target(value or _env.get("HAL_TRACE"))


_counts = _Counts()
# What the parent counted is the parent's to tell.
os.register_at_fork(after_in_child=lambda: _counts.__init__())  # type: ignore[misc]
