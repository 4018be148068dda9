"""Engines that do what they are told, each in a process that is forked from one that has imported it.

An engine's import takes longer than a small engine's start. `Served` is the test's side; `main` is what the
worker runs: a line of JSON each way on stdin and stdout. What engines say besides goes to stderr, a file.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engines import workers

UCX = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
"""TCP on the loopback."""

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
        self.log = folder / "log.txt"
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        with self.log.open("w") as log:
            self.run = subprocess.Popen(
                [sys.executable, Path(__file__).with_name(script)],
                env=workers.environment(**{**environment, "PYTHONPATH": path}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        atexit.register(self.run.kill)

    def tell(self, to: str, **what: Any) -> dict[str, Any]:
        assert self.run.stdin is not None
        assert self.run.stdout is not None
        self.run.stdin.write(json.dumps({"to": to, **what}) + "\n")
        self.run.stdin.flush()
        line = self.run.stdout.readline()
        assert line, self.log.read_text()[-4000:]
        found: dict[str, Any] = json.loads(line)
        return found

    def start(self, name: str, settings: dict[str, Any], **env: str) -> Engine:
        return Engine(self, name, self.tell(name, settings=settings, env=env)["pid"])


class Engine:
    """One of a worker's, all its processes in a group of their own."""

    def __init__(self, served: Served, name: str, pid: int) -> None:
        self.served, self.name, self.pid, self.ready = served, name, pid, False
        atexit.register(self.kill)

    def hear(self) -> dict[str, Any]:
        found = self.served.tell(self.name, hear=True)
        assert "error" not in found, found["traceback"] + self.served.log.read_text()[-4000:]
        return found

    def heard(self, seconds: float) -> bool:
        """Whether an answer comes within them."""
        found: bool = self.served.tell(self.name, heard=seconds)["heard"]
        return found

    def tell(self, **what: Any) -> None:
        if not self.ready:
            self.ready = self.hear()["ready"]
        self.served.tell(self.name, **what)

    def ask(self, **what: Any) -> dict[str, Any]:
        self.tell(**what)
        return self.hear()

    def kill(self) -> None:
        """All of it, at once."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
