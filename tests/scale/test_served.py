"""What drives the engines of other tests here."""

from __future__ import annotations

import socket

import pytest
from scale import served


def test_a_free_port_stays_free_for_who_knows_it() -> None:
    port = served.free_port()
    # As one that the kernel looks for.
    with socket.socket() as s, pytest.raises(OSError, match="already in use"):
        s.bind(("127.0.0.1", port))
    with socket.socket() as s, pytest.raises(ConnectionRefusedError):
        s.connect(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)) as s:
        assert s.getpeername() == server.getsockname()
