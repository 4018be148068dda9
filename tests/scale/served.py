"""Engines that do what they are told, each in a process that is forked from one that has imported it.

An engine's import takes longer than a small engine's start. `Served` is the test's side; `main` is what the
worker runs: a line of JSON each way on stdin and stdout. What engines say besides goes to stderr, a file.

Engines that wait for each other may do so for ever: who is not answered within `LIMIT` ends them all, and says which
was asked what, and where each of their processes was.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import multiprocessing
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engines import workers

UCX = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
"""TCP on the loopback."""

LIMIT = 300
"""Seconds that an engine may take for one answer, its start among them. On two cores with three busy processes beside,
and nothing compiled yet, 82 were seen."""

_held: list[socket.socket] = []


def free_port() -> int:
    """A port of the loopback that nobody gets by chance for as long as this process lives.

    Who is to listen there does so when its engine has started. By then engines have opened a hundred sockets at ports
    that the kernel chose, from the same range; vLLM's thread that finds its port taken ends, and its engine waits for
    that thread for ever. So it stays bound. As nobody listens here, who asks for it by its number and SO_REUSEADDR has
    it: ZeroMQ and asyncio do.
    """
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("127.0.0.1", 0))
    _held.append(s)
    port: int = s.getsockname()[1]
    return port


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether it holds by then."""
    end = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < end:
        time.sleep(0.01)
    return held


def members(group: int) -> dict[int, str]:
    """The processes of a group, the youngest first, and the states of their threads (proc(5))."""
    found = {}
    for pid in sorted((int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()), reverse=True):
        try:
            if os.getpgid(pid) == group:
                tasks = [(t / "stat").read_text() for t in Path(f"/proc/{pid}/task").iterdir()]
                found[pid] = "".join(t.rpartition(")")[2].split()[0] for t in tasks)
        except OSError:  # it has ended
            continue
    return found


# --- in the worker ------------------------------------------------------------------------------------


def _engine(pipe: Connection, make: Any, answer: Any, settings: dict[str, Any], env: dict[str, str]) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # it ends with the worker: PR_SET_PDEATHSIG
    os.environ.update(env)
    import hal

    hal.reload()
    try:
        engine = make(settings)
        pipe.send({"ready": True})
        while True:
            pipe.send(answer(engine, pipe.recv()))
    except EOFError:
        return
    except BaseException as e:
        pipe.send({"error": f"{type(e).__name__}: {e}", "traceback": traceback.format_exc()})


def main(make: Callable[[dict[str, Any]], Any], answer: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> None:
    """`make` makes an engine of settings, `answer` is what it says when it is asked; both in a process of their own."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines write to stdout too
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what ends by SIGABRT has said all
    fork = multiprocessing.get_context("fork")
    pipes: dict[str, Connection] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        name, found = asked.pop("to"), {}
        if "settings" in asked:
            pipes[name], theirs = fork.Pipe()
            child = fork.Process(target=_engine, args=(theirs, make, answer, asked["settings"], asked["env"]))
            child.start()
            theirs.close()
            found = {"pid": child.pid}
        elif "heard" in asked:
            found = {"heard": pipes[name].poll(asked["heard"])}
        elif "hear" in asked:
            try:
                found = pipes[name].recv()
            except EOFError:
                found = {"error": "it has ended", "traceback": ""}
        else:
            pipes[name].send(asked)
        print(json.dumps(found), file=out, flush=True)
    os._exit(0)  # waits for no engine


# --- in the test --------------------------------------------------------------------------------------


class Served:
    """The worker `script`, with a folder for its log."""

    def __init__(self, script: str, folder: Path, environment: dict[str, str]) -> None:
        self.log, self.limit, self.engines, self.ended = folder / "log.txt", float(LIMIT), list[Engine](), ""
        # Python says on SIGABRT where it is, in each process that an engine starts too.
        environment = {**environment, "PYTHONFAULTHANDLER": "1"}
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        with self.log.open("a") as log:  # several write to it
            self.run = subprocess.Popen(
                [sys.executable, Path(__file__).with_name(script)],
                env=workers.environment(**{**environment, "PYTHONPATH": path}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        atexit.register(self.run.kill)

    def tell(self, to: str, asked: str = "", **what: Any) -> dict[str, Any]:
        """What the worker says to that. `asked`: what its engine is to answer, if not this."""
        assert self.run.stdin is not None
        assert self.run.stdout is not None
        if self.ended:
            raise TimeoutError(self.ended)
        line = json.dumps({"to": to, **what}) + "\n"
        self.run.stdin.write(line)
        self.run.stdin.flush()
        # A line is asked for when the last is read: nothing is left in the buffer.
        seconds = self.limit + what.get("heard", 0)
        if not select.select([self.run.stdout], [], [], seconds)[0]:
            self._end(f"{to!r} did not answer within {seconds:.0f} s. It was asked: {(asked or line.strip())[:600]}")
        line = self.run.stdout.readline()
        assert line, self.log.read_text()[-4000:]
        found: dict[str, Any] = json.loads(line)
        return found

    def start(self, name: str, settings: dict[str, Any], **env: str) -> Engine:
        asked = f"to start with {json.dumps(settings)}"
        engine = Engine(self, name, self.tell(name, settings=settings, env=env)["pid"], asked)
        self.engines.append(engine)
        return engine

    def _end(self, why: str) -> None:
        """Ends all of it; an error with what engines said before, and where their processes were."""
        said = len(self.log.read_text(errors="replace"))
        for engine in self.engines:
            engine.abort()
        self.run.send_signal(signal.SIGABRT)
        within(10, lambda: self.run.poll() is not None)
        self.run.kill()
        log = self.log.read_text(errors="replace")
        before = "\n".join(log[:said].splitlines()[-60:])
        stacks = "\n".join(line for line in log[said:].splitlines() if not line.startswith("Extension modules: "))
        names = ", ".join(f"{e.name!r} in the process group {e.pid}" for e in self.engines)
        self.ended = f"{why}\n--- the end of what all said ({names})\n{before}\n--- where they were\n{stacks}"
        raise TimeoutError(self.ended)


class Engine:
    """One of a worker's, all its processes in a group of their own."""

    def __init__(self, served: Served, name: str, pid: int, asked: str) -> None:
        self.served, self.name, self.pid, self.asked, self.ready = served, name, pid, asked, False
        atexit.register(self.kill)

    def hear(self) -> dict[str, Any]:
        found = self.served.tell(self.name, self.asked, hear=True)
        assert "error" not in found, found["traceback"] + self.served.log.read_text()[-4000:]
        return found

    def heard(self, seconds: float) -> bool:
        """Whether an answer comes within them."""
        found: bool = self.served.tell(self.name, heard=seconds)["heard"]
        return found

    def tell(self, **what: Any) -> None:
        if not self.ready:
            self.ready = self.hear()["ready"]
        self.asked = json.dumps(what)
        self.served.tell(self.name, **what)

    def ask(self, **what: Any) -> dict[str, Any]:
        self.tell(**what)
        return self.hear()

    def stop(self) -> None:
        """All its threads. A process goes on until one of them takes the signal, which may be one that sleeps."""
        os.killpg(self.pid, signal.SIGSTOP)
        stopped = within(60, lambda: all(set(states) <= set("TtZX") for states in members(self.pid).values()))
        assert stopped, members(self.pid)

    def abort(self) -> None:
        """All of it, one process after the other, so that each says undisturbed where it was."""
        with contextlib.suppress(ProcessLookupError, AssertionError):
            self.stop()
        for pid in members(self.pid):
            with self.served.log.open("a") as log:
                log.write(f"\n--- {self.name}, process {pid}\n")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
                os.kill(pid, signal.SIGCONT)
            within(10, lambda pid=pid: set(members(self.pid).get(pid, "Z")) <= set("ZX"))  # type: ignore[misc]
        self.kill()

    def kill(self) -> None:
        """All of it, at once."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
