"""Messages between two links, by TCP: JSON, each after its length. That a peer is gone is seen here first."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

LONGEST = 1 << 26
"""Bytes of a message: what claims to be longer comes from no link."""


class Channel:
    """One connection. Nothing here blocks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanishes sends no end: three unanswered probes, two seconds apart, are one.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.sock = sock
        self._in, self._out = bytearray(), bytearray()

    def send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        self._out += struct.pack("!I", len(body)) + body
        self.flush()

    def flush(self) -> None:
        try:
            while self._out:
                del self._out[: self.sock.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()  # the next read says that it is closed

    def read(self) -> tuple[list[dict[str, Any]], str]:
        """(the messages that are there, why there will be no more: empty while there may be)."""
        why = ""
        self.flush()
        try:
            while data := self.sock.recv(1 << 16):
                self._in += data
            why = "it closed the connection, or its process ended"
        except BlockingIOError:
            pass
        except OSError as e:
            why = f"the connection broke: {e.strerror or e}"
        found: list[dict[str, Any]] = []
        try:
            while len(self._in) >= 4:
                (size,) = struct.unpack("!I", self._in[:4])
                if size > LONGEST:
                    raise ValueError
                if len(self._in) < 4 + size:
                    break
                message = json.loads(bytes(self._in[4 : 4 + size]))
                del self._in[: 4 + size]
                if not isinstance(message, dict):
                    raise ValueError
                found.append(message)
        except ValueError:
            why = "what it sends are no messages of a link"
        return found, why

    def close(self) -> None:
        self.flush()
        self.sock.close()
