"""The process that a backend runs in, as the judge sees it: started, asked, timed, and started again when it dies.

What it says is plain data, and what it wrote is bytes in the shared memory; none of its code runs here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hal._devices import EMULATED
from hal._remote import wire
from hal.conformance._arena import Arena
from hal.conformance._hands import Died

SILENCE = {"device": 120.0, "interpreter": 900.0, "lowered": 900.0}
"""Seconds in which a call has to end, by lane."""
START = 120.0
"""Seconds that a worker may take to import torch and the backend, on a machine that is busy."""
WATCHED = 0.3
"""Seconds for which a process that says nothing is watched before it is ended."""
SLOW = 4
"""A case whose calls end may last so many times as long as a single one."""


@dataclass(frozen=True)
class Job:
    """What is judged, and how.

    Args:
        plugins: the entry points that may load in the backend's process.
        ops: None for all.
        silence: seconds in which a call has to end; None: the lane's.
        fixed, seed: as `hal.conformance.proofs.run.Run` has them.
    """

    backend: str
    lane: str
    device: str | None = None
    imports: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    ops: tuple[str, ...] | None = None
    silence: float | None = None
    fixed: bool = True
    seed: int = 0

    @property
    def limit(self) -> float:
        return SILENCE.get(self.lane, 120.0) if self.silence is None else self.silence

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Job:
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**fields)


class Worker:
    """A backend in a process of its own. A `Caller`: `do` raises `Died` when the process does; the next starts anew.

    Attributes:
        about: what the process says of the backend, or ``fatal``, ``unknown`` or ``not_here``: why there is none.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.arena = Arena()
        self.deaths = 0
        self.about: dict[str, Any] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="run-")
        self._buffer = b""
        self._begun = time.monotonic()
        self._calls, self._calling = 0, 0.0
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def backend(self) -> str:
        return self.job.backend

    @property
    def lane(self) -> str:
        """As the report names it."""
        # All that is believed of what the process says is that there was no device.
        return EMULATED if self.about.get("lane") == EMULATED else self.job.lane

    @property
    def device(self) -> str:
        return str(self.about["type"])

    @property
    def limits(self) -> tuple[str, ...] | None:
        return _words(self.about["limits"])

    @property
    def takes(self) -> tuple[str, ...] | None:
        return _words(self.about["takes"])

    @property
    def failed(self) -> str | None:
        """Why there is no backend to call."""
        return next((str(self.about[k]) for k in ("fatal", "unknown", "not_here") if k in self.about), None)

    def begin(self) -> None:
        """A case begins: it may last `SLOW` times as long as a single call."""
        self._begun = time.monotonic()
        self._calls, self._calling = 0, 0.0

    def ready(self, op: str) -> str | None:
        states = self.about["states"]
        why = states[op] if op in states else self._ask(op)["why"]
        return None if why is None else str(why)

    def do(self, task: wire.Task) -> Mapping[str, Any]:
        return self._ask(task)

    def close(self) -> None:
        self._end()
        self._folder.cleanup()

    # --- the process ---

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        # Outside of the child's working directory, so that that one is empty.
        work = Path(self._folder.name, "work")
        work.mkdir(exist_ok=True)
        self._errors = open(Path(self._folder.name, f"stderr-{self.deaths}"), "w+b")  # noqa: SIM115
        fds = (theirs.fileno(), self.arena.fd)
        self._child = subprocess.Popen(
            [sys.executable, "-c", f"from hal._remote.serve import main; main({fds[0]})"],
            cwd=work,
            env=environment(self.job.lane, self.job.imports, self.job.plugins),
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
        )
        theirs.close()
        self._sock, self._buffer = ours, b""
        order = {
            "backend": self.job.backend,
            "lane": self.job.lane,
            "device": self.job.device,
            "ops": self.job.ops,
            "imports": self.job.imports,
            "memory": self.arena.fd,
            "size": self.arena.size,
        }
        self.begin()
        try:
            self.about = dict(self._ask(order, max(self.job.limit, START)))
        except Died as e:
            self.about = {"fatal": f"the worker {e} before any case"}

    def _end(self, gently: bool = False) -> int:
        """Ends the process and whatever it started, as it leads a session of its own; its exit status."""
        child, self._child = self._child, None
        if child is None:
            return 0
        if child.poll() is None and gently:
            # It says where it is.
            child.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        self._sock.close()
        return child.wait()

    def _ask(self, question: Any, limit: float | None = None) -> Mapping[str, Any]:
        if self._child is None:
            self._start()
            if self.failed:
                raise Died(f"could not be started again: {self.failed}", False)
        limit = self.job.limit if limit is None else limit
        began = time.monotonic()
        try:
            wire.ask(self._sock, question)
            heard = time.monotonic()
            while True:
                said = self._hear(heard + limit)
                heard = time.monotonic()
                if "answer" in said:
                    self._calls += max(int(said.get("calls", 0)), 1)
                    self._calling += heard - began
                    return dict(said["answer"])
                self._calls += int(said["calls"])
                if heard - self._begun > SLOW * limit:
                    self._calling += heard - began
                    raise TimeoutError
        except EOFError:
            raise self._died(True, limit) from None
        except TimeoutError:
            raise self._died(False, limit) from None
        except (OSError, ValueError, KeyError, TypeError) as e:
            self._end()
            self.deaths += 1
            gone = isinstance(e, OSError)
            raise Died(f"the process {'died' if gone else 'answered what can not be read'} ({e})", gone) from None

    def _hear(self, until: float) -> dict[str, Any]:
        """One message; EOFError where the process has gone, TimeoutError where it says nothing."""
        head = struct.calcsize("<Q")
        while True:
            size = struct.unpack("<Q", self._buffer[:head])[0] if len(self._buffer) >= head else None
            if size is not None and size > wire.LONGEST:
                raise ValueError(f"a message of {size} bytes")
            if size is not None and len(self._buffer) >= head + size:
                body, self._buffer = self._buffer[head : head + size], self._buffer[head + size :]
                said = json.loads(body)
                if not isinstance(said, dict):
                    raise ValueError(f"a {type(said).__name__}")
                return said
            if select.select([self._sock], [], [], 0.2)[0]:
                part = self._sock.recv(1 << 20)
                if not part:
                    raise EOFError
                self._buffer += part
            elif self._child is not None and self._child.poll() is not None:
                raise EOFError
            elif time.monotonic() > until:
                raise TimeoutError

    def _died(self, crashed: bool, limit: float) -> Died:
        if crashed and self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(5)
        busy = None if crashed else self._busy()
        code = self._end(gently=not crashed)
        self.deaths += 1
        with self._errors as f:
            f.seek(0)
            said = f.read().decode(errors="replace").strip().splitlines()
        where, told = last_line(said), "\n".join(_tail(said))
        if crashed:
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Died(f"the process died ({name}){where}\n{told}".rstrip(), True)
        if self._calls and time.monotonic() - self._begun > SLOW * limit:
            each = self._calling / self._calls
            return Died(
                f"slow: not done after {SLOW * limit:.0f} s, though its calls end: {self._calls} took {each:.2f} s "
                f"each; --timeout gives them longer{where}",
                False,
            )
        return Died(f"hung: no call ended for {limit:.0f} s{where}\n{_doing(busy)}{told}".rstrip(), False)

    def _busy(self) -> float | None:
        """How much of a processor the process uses just now; None where the system does not say."""
        pid = self._child.pid if self._child is not None else 0
        before, began = _ticks(pid), time.monotonic()
        time.sleep(WATCHED)
        after = _ticks(pid)
        if before is None or after is None:
            return None
        return (after - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)


def _ticks(pid: int) -> int | None:
    """Clock ticks that a process has run, in the kernel and out of it."""
    try:
        # The name in brackets may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return None


def _doing(busy: float | None) -> str:
    """A loop without an end and a single call that is slow can't be told apart; one that waits for something can."""
    if busy is None:
        return ""
    if busy < 0.05:
        return "it waits, using no processor: for a lock, a device, a file or a sleep\n"
    return (
        f"it computes, using {busy:.0%} of a processor: in a loop without an end, or in one call that takes longer, "
        "which --timeout allows\n"
    )


def _words(value: Any) -> tuple[str, ...] | None:
    return None if value is None else tuple(str(v) for v in value)


_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')
_HERE = str(Path(__file__).parent.parent)


def last_line(said: Sequence[str]) -> str:
    """`` at file:line in function``: the innermost line that is the author's, from what faulthandler wrote.

    What hal called first is the author's; what that called in turn (numpy, a compiler) may be another's.
    """
    frames = [m for m in map(_FRAME.match, said) if m]
    theirs = [m for m in frames if not _ours(m["file"])]
    theirs = [m for m in theirs if _package(m["file"]) == _package(theirs[-1]["file"])]
    for m in theirs[:1] or frames[:1]:
        return f" at {m['file']}:{m['line']} in {m['name']}"
    return ""


def _package(file: str) -> Path:
    """The outermost package that a file is in; of a module by itself its folder."""
    folder = Path(file).parent
    while (folder.parent / "__init__.py").exists():
        folder = folder.parent
    return folder


def _ours(file: str) -> bool:
    if _of_hal(file) or file.startswith("<"):
        return True
    torch = f"{os.sep}site-packages{os.sep}torch{os.sep}"
    return (file.startswith(sysconfig.get_paths()["stdlib"]) and "site-packages" not in file) or torch in file


def _of_hal(file: str) -> bool:
    # <string> is how the process was started.
    return file == "<string>" or (file.startswith(_HERE) and not file.startswith(os.path.join(_HERE, "backends")))


def _tail(said: Sequence[str]) -> list[str]:
    """The last lines, or a fatal error's first, without hal's own frames and the modules that it lists."""
    frames = {i: m["file"] for i, m in enumerate(map(_FRAME.match, said)) if m}
    if all(map(_of_hal, frames.values())):
        frames = {}
    lines = [
        s
        for i, s in enumerate(said)
        if not s.startswith("Extension modules:") and not (i in frames and _of_hal(frames[i]))
    ]
    fatal = next((i for i, s in enumerate(lines) if s.startswith("Fatal Python error")), None)
    return lines[-6:] if fatal is None else lines[fatal : fatal + 12]


def environment(lane: str, imports: Sequence[str] = (), plugins: Sequence[str] = ()) -> dict[str, str]:
    """The child's: this one without what could decide a verdict, and with `plugins` alone to load."""
    dropped = ("PYTEST_", "PYTHONWARNINGS", "PYTHONSTARTUP", "PYTHONOPTIMIZE", "PYTHONHOME", "HYPOTHESIS_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    for name in ("HAL_BACKEND", "HAL_FALLBACK", "HAL_CHECKS", "TRITON_INTERPRET", "_"):
        env.pop(name, None)
    env["HAL_LANE"] = lane
    env["HAL_PLUGINS"] = ",".join(plugins)
    if lane == "interpreter":
        env["TRITON_INTERPRET"] = "1"
    here = [os.getcwd()] if imports else []
    path = [os.path.abspath(p) for p in sys.path if p] + here
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    return env
