"""The process that a backend runs in: it makes the calls that it is asked for over a socket, until that closes."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

BEAT = 0.5
"""Seconds between two signs of life while one task makes many calls."""


def main(fd: int) -> None:
    end_with_parent()
    faulthandler.enable(file=sys.stderr, all_threads=False)
    sock = socket.socket(fileno=fd)
    from hal._remote.wire import answer, read_question

    try:
        order = read_question(sock)
        about, hands = open_target(order)
        beats = Beats(sock)
        if hands is not None:
            hands.beat = beats.one
        answer(sock, {"answer": about})
        while hands is not None:
            question = read_question(sock)
            reply = {"why": hands.target.ready(question)} if isinstance(question, str) else hands.do(question)
            with beats.lock:
                answer(sock, {"answer": reply, "calls": beats.take_beats()})
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


class Beats:
    """Tells that calls go on ending."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.lock = threading.Lock()
        self.count = 0
        self.told = time.monotonic()

    def one(self) -> None:
        with self.lock:
            self.count += 1
            if time.monotonic() - self.told > BEAT:
                from hal._remote.wire import answer

                answer(self.sock, {"calls": self.take_beats()})

    def take_beats(self) -> int:
        count, self.count = self.count, 0
        self.told = time.monotonic()
        return count


def end_with_parent() -> None:
    """A parent that is killed can't end its children, and a call may run for ever: a child without one ends itself."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        # Linux; also where the interpreter's lock is held for ever.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def open_target(order: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """(what there is to know of the backend, the hands that call it; None where it can't be had)."""
    from hal._devices import lane_on
    from hal._errors import HalError
    from hal._remote.memory import Memory
    from hal._remote.perform import Hands
    from hal._remote.target import RegistryTarget
    from hal.registry import current

    for module in order["imports"]:
        importlib.import_module(module)
    backend, lane = order["backend"], order["lane"]
    try:
        table = current()
        if backend != "reference":
            table.parse(backend, "{!r}")
            state = table.entries[backend.partition("/")[0]].state(lane)
            if state.state in ("absent", "unavailable"):
                return {"not_here": f"{backend}: {state}"}, None
        for op in order["ops"] or ():
            table.spec(op)
    except HalError as e:
        return {"unknown": str(e)}, None
    try:
        target = RegistryTarget.of(backend, lane, order["device"])
    except HalError as e:
        return {"fatal": str(e)}, None
    ops = list(order["ops"] or _ops(table, backend))
    states = {op: target.ready(op) for op in ops}
    entry = table.entries.get(backend.partition("/")[0])
    manifest = entry.manifest if entry else None
    about = {
        "device": _device_name(target.device),
        "type": target.device.type,
        "limits": target.limits,
        "lane": lane_on(lane, target.device),
        "takes": target.takes,
        "lanes": {name: list(types) for name, types in manifest.lanes.items()} if manifest else None,
        "ops": ops,
        "own_ops": list(table.found.specs),
        "states": states,
        "declared": {op: _declarations(target, op) for op in ops if states[op] is None},
        "waivers": _waivers(manifest.waivers) if manifest and manifest.waivers else [],
        "distribution": entry.distribution if entry else "",
    }
    return about, Hands(target, Memory.of_file(order["memory"], order["size"]))


def _ops(table: Any, backend: str) -> list[str]:
    """All ops; of one implementation that is named (``cuda/flashinfer``), those that it has."""
    name, _, which = backend.partition("/")
    if not which:
        return list(table.op_names)
    return [op for op in table.op_names if any(i.name == which for i in table.entries[name].impls(op))]


def _declarations(target: Any, op: str) -> list[dict[str, Any]]:
    """What the manifest says of each implementation."""
    return [
        {"impl": b.impl, "graph_safe": bool(b.graph_safe), "deterministic": bool(b.deterministic)}
        for b in target.implementations(op)
    ]


def _waivers(where: str) -> Any:
    """The declared deviations as plain data; a text where they can't be read."""
    module, _, name = where.partition(":")
    try:
        return json.loads(json.dumps(getattr(importlib.import_module(module), name)))
    except Exception as e:
        return f"{where}: {type(e).__name__}: {e}"


def _device_name(device: Any) -> str:
    import torch

    if device.type in ("cuda", "npu"):
        return f"{torch.get_device_module(device).get_device_name(device)} ({device})"
    return f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)"
