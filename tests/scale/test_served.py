"""What drives the engines of other tests here: where one never answers, the test ends and says where it was."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from scale import served


def test_who_never_answers_ends_all_with_where_they_were(tmp_path: Path) -> None:
    worker = served.Served("mute_served.py", tmp_path, {})
    waiter, other = (worker.start(name, {"name": name}) for name in ("waiter", "other"))
    assert other.ask(number=3) == {"name": "other", "number": 3}
    waiter.tell(wait=True)
    assert served.within(60, lambda: worker.log.read_text().count("begins to wait") == 2)
    time.sleep(0.5)  # it says so just before
    worker.limit = 0.5
    groups = [waiter.pid, other.pid]
    with pytest.raises(TimeoutError) as found:
        waiter.hear()
    said = str(found.value)
    assert said.startswith("""'waiter' did not answer within 0 s. It was asked: {"wait": true}""")
    before, _, after = said.partition("--- where they were")
    assert "begins to wait" in before
    assert after.count("in waits_for_ever") == 2
    assert f"--- other, process {other.pid}" in after
    assert "in _engine" in after.partition("--- other")[2]
    assert not any(set(states) - set("ZX") for g in groups for states in served.members(g).values())
    assert worker.run.wait(10)
    with pytest.raises(TimeoutError, match="'waiter' did not answer"):
        other.ask(number=4)


def test_a_free_port_stays_free_for_who_knows_it() -> None:
    port = served.free_port()
    # As one that the kernel looks for.
    with socket.socket() as s, pytest.raises(OSError, match="already in use"):
        s.bind(("127.0.0.1", port))
    with socket.socket() as s, pytest.raises(ConnectionRefusedError):
        s.connect(("127.0.0.1", port))
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)) as s:
        assert s.getpeername() == server.getsockname()
