"""What crosses between two processes: where arguments lie, which calls to make of them, what came back.

Questions are pickled, since who asks is trusted; answers are JSON, since who answers is not.
"""

from __future__ import annotations

import json
import pickle
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

_HEAD = struct.Struct("<Q")
LONGEST = 1 << 28
"""Bytes of a message; what is longer is none."""


@dataclass(frozen=True)
class View:
    """A tensor: `offset` bytes from the beginning of block `block`."""

    block: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Pool:
    """A `hal.KVPool` of such tensors."""

    k: View | tuple[View, ...]
    v: View | tuple[View, ...] | None
    layout: str
    page_size: int


@dataclass(frozen=True)
class Span:
    """A block of the shared memory.

    Args:
        start, stop: in bytes from the memory's beginning.
        windows: the parts that hold something, relative to `start`: all, or the rows of a very large block.
        where: ``device``: the call gets a copy there; ``pinned``: one in pinned memory; ``host``: the memory itself.
        guarded: the page before it and the page behind it may not be touched while the call runs.
    """

    start: int
    stop: int
    windows: tuple[tuple[int, int], ...]
    where: str = "device"
    guarded: bool = False


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call, and the place for a new tensor that it returns.

    Args:
        values: by name: a `View`, a `Pool`, or the value itself.
        result: (offset in the memory, bytes).
    """

    values: Mapping[str, Any]
    blocks: tuple[Span, ...]
    result: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Task:
    """What to do with an op.

    Args:
        kind: a key of `hal._remote.perform.KINDS`.
        arguments: of one call, or of each.
        options: what the kind takes.
    """

    kind: str
    op: str
    arguments: tuple[Arguments, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def send(sock: socket.socket, payload: bytes) -> None:
    sock.sendall(_HEAD.pack(len(payload)) + payload)


def receive(sock: socket.socket) -> bytes:
    """One message; EOFError where the other end has gone."""
    (size,) = _HEAD.unpack(_exactly(sock, _HEAD.size))
    if size > LONGEST:
        raise ValueError(f"a message of {size} bytes")
    return _exactly(sock, size)


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = sock.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def ask(sock: socket.socket, question: Any) -> None:
    send(sock, pickle.dumps(question, protocol=pickle.HIGHEST_PROTOCOL))


def read_question(sock: socket.socket) -> Any:
    return pickle.loads(receive(sock))


def answer(sock: socket.socket, reply: Mapping[str, Any]) -> None:
    send(sock, json.dumps(reply).encode())
