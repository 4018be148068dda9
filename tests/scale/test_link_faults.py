"""`Link`: every way to go wrong, with processes killed on purpose."""

from __future__ import annotations

import signal
import socket
from typing import Any

import pytest

pytest.importorskip("nixl_cu12", reason="NIXL is not installed here: the extra nixl")

import torch
from scale.link_peer import SLOTS, TO, make, meet, pool, remote_of, rows, until, untouched

import hal
from hal.engines.nixl import LinkError, LinkFull, agent, wait

pytestmark = pytest.mark.usefixtures("tcp")


# --- a process is killed ------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"piece": 1}], ids=["at once", "in pieces, the first complete"])
def test_the_sender_dies_while_it_sends(start: Any, given: dict[str, int]) -> None:
    here, there = start(grace=1.0), start(remote=True, seed=5, **given)
    remote_of(here, there)
    there.do("break", 3 * 8 * 4 + 20)  # a page is 384 bytes: within a page, and within a row
    received = here.receive("r", torch.tensor(TO))
    there.tell("begin", "send", "r", SLOTS)
    until(here, lambda: bool(here.wire.pool.tensors[0].any()))
    with pytest.raises(LinkError, match=r"the peer 127\S+ is gone: .*; request r, 11 tokens, was not complete"):
        wait(received)
    there.process.join(60)
    assert there.process.exitcode == -signal.SIGKILL
    assert here.wire.pool.tensors[0].any(), "half of it had come"
    assert untouched(here)
    # What may still be on its way hits nobody: that memory rests, and then is free.
    assert here.staging_free == 64 - 12
    until(here, lambda: here.staging_free == 64)
    assert here.peers == []
    # The same request from a peer that lives.
    other = start(remote=True, seed=6)
    remote_of(here, other)
    other.do("begin", "send", "r", SLOTS)
    wait(here.receive("r", torch.tensor(TO)))
    assert torch.equal(rows(here.pool, TO), rows(pool(seed=6), SLOTS))


def test_the_receiver_dies_while_it_is_sent_to(start: Any) -> None:
    here, there = start(seed=5), start(remote=True)
    peer = remote_of(here, there)
    there.do("begin", "receive", "r", TO)
    until(here, lambda: "r" in peer.wants)
    there.signal(signal.SIGSTOP)  # it takes nothing any more
    sent = here.send(peer, "r", torch.tensor(SLOTS))
    for _ in range(20):
        here.poll()
        assert not sent.ended
    there.kill()
    with pytest.raises(LinkError, match=r"the peer 127\S+ is gone: .*; request r was not acknowledged"):
        wait(sent)
    assert here.staging_free == 64
    with pytest.raises(LinkError, match="is gone"):
        here.send(peer, "r2", torch.tensor(SLOTS))
    assert here.staging_free == 64


def test_a_peer_dies_before_it_sends(start: Any) -> None:
    here, there = start(grace=0.2), start(remote=True, seed=5)
    remote_of(here, there)
    received = here.receive("r", torch.tensor(TO))
    there.kill()
    with pytest.raises(LinkError, match="is gone"):
        wait(received)
    until(here, lambda: here.staging_free == 64)
    assert untouched(here)


# --- other faults -------------------------------------------------------------------------------------


def test_the_connection_is_refused(start: Any) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        with pytest.raises(LinkError, match=rf"can't connect to 127.0.0.1:{port}: Connection refused"):
            start().connect(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"dtype": "bfloat16"}, "dtype is {} here and {} there"),
        ({"model": "another"}, "model is {} here and {} there"),
        ({"page_size": 16}, "page size on the wire is {} here and {} there"),
    ],
)
def test_what_differs_is_refused_on_both_sides(start: Any, changed: Any, why: str) -> None:
    a, b = start(), start(**changed)
    peer = a.connect(b.address)
    (theirs,), (mine,) = (changed.values(), [{"dtype": "float32", "model": "m", "page_size": 4}[n] for n in changed])
    with pytest.raises(LinkError, match="was refused: " + why.format(theirs, mine)):
        b.accept()
    with pytest.raises(LinkError, match="was refused: " + why.format(mine, theirs)):
        wait(peer)
    assert a.peers == b.peers == []


def test_another_version_is_refused_on_both_sides(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a = start()
    monkeypatch.setattr(agent, "version", lambda: "0.9.0")
    b = start()
    peer = a.connect(b.address)
    with pytest.raises(LinkError, match=r"nixl is 0.9.0 here and 1\.\S+ there"):
        b.accept()
    with pytest.raises(LinkError, match=r"nixl is 1\.\S+ here and 0.9.0 there"):
        wait(peer)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2[]", b'\0\0\0\x10{"kind":"offer"}'[:20]])
def test_who_is_no_link_is_dropped(start: Any, said: bytes) -> None:
    link = start()
    host, _, port = link.address.rpartition(":")
    with socket.create_connection((host, int(port))) as s:
        s.sendall(said)
        with pytest.raises(LinkError, match="could not be met: what it sends are no messages of a link"):
            link.accept()
    meet(start(), link)


def test_the_receivers_staging_is_full(start: Any) -> None:
    a, b = start(seed=1), start(staging=12)
    peer = meet(a, b)
    first = b.receive("r1", torch.tensor(TO))
    second = a.send(peer, "r2", torch.tensor(SLOTS))
    with pytest.raises(LinkFull, match="request r2: the staging memory is full: 11 tokens asked for, 0 of 12 free"):
        b.receive("r2", torch.tensor(TO))
    with pytest.raises(LinkError, match="request r2: the staging memory is full"):
        wait(second)
    assert a.staging_free == 64
    assert untouched(b)
    # The other goes on, and then there is room.
    wait(first, a.send(peer, "r1", torch.tensor(SLOTS)))
    wait(a.send(peer, "r2", torch.tensor(SLOTS)), b.receive("r2", torch.tensor(TO)))


def test_the_senders_staging_is_full(start: Any) -> None:
    a, b = start(seed=1, staging=8), start()
    peer = meet(a, b)
    received = b.receive("r", torch.tensor(TO))
    with pytest.raises(LinkFull, match="request r: the staging memory is full: 11 tokens asked for, 8 of 8 free"):
        a.send(peer, "r", torch.tensor(SLOTS))
    with pytest.raises(LinkError, match="request r: the staging memory is full"):
        wait(received)
    until(b, lambda: a.poll() == [] and b.staging_free == 64)
    wait(a.send(peer, "r", torch.tensor(SLOTS[:8])), b.receive("r", torch.tensor(TO[:8])))


def test_the_senders_slots_are_stale(start: Any) -> None:
    a, b = start(seed=1), start()
    peer = meet(a, b)
    received, listed = b.receive("r", torch.tensor(TO)), a.stamp(torch.tensor(SLOTS))
    a.freed(torch.tensor([41]))
    why = r"request r: a stale list of slots: \[40, 41, 42, 43\] have been freed"
    with pytest.raises(LinkError, match=why):
        a.send(peer, "r", listed)
    with pytest.raises(LinkError, match=why):
        wait(received)
    until(b, lambda: a.poll() == [] and b.staging_free == 64)
    assert untouched(b)
    assert a.staging_free == 64


def test_the_receivers_slots_are_stale_when_all_has_come(start: Any) -> None:
    a, b = start(seed=1), start()
    peer = meet(a, b)
    received = b.receive("r", torch.tensor(TO))
    sent = a.send(peer, "r", torch.tensor(SLOTS))
    b.freed(torch.tensor([2]))
    why = r"request r: a stale list of slots: \[2, 3\] have been freed"
    for move in (received, sent):
        with pytest.raises(LinkError, match=why):
            wait(move) if move is sent else until(b, lambda: bool(a.poll() and 0) or bool(raise_of(received)))
    assert untouched(b)
    assert (a.staging_free, b.staging_free) == (64, 64)


def raise_of(transfer: Any) -> None:
    if transfer.error is not None:
        raise transfer.error


def test_the_same_request_twice(start: Any) -> None:
    a, b = start(seed=1), start()
    peer = meet(a, b)
    moves = a.send(peer, "r", torch.tensor(SLOTS)), b.receive("r", torch.tensor(TO))
    for _ in range(2):  # while it is under way, and afterwards
        with pytest.raises(LinkError, match=r"request r was sent to Peer\(.*\) already: a request is moved once"):
            a.send(peer, "r", torch.tensor(SLOTS))
        with pytest.raises(LinkError, match="request r was received already: a request is moved once"):
            b.receive("r", torch.tensor(TO))
        wait(*moves)
    before = rows(b.pool, TO)
    # A sender that knows nothing of it.
    other = start(seed=2)
    again = other.send(meet(other, b), "r", torch.tensor(SLOTS))
    with pytest.raises(LinkError, match="request r was received already: a request is moved once"):
        until(b, lambda: bool(other.poll() and 0) or bool(raise_of(again)))
    assert other.staging_free == 64
    assert torch.equal(rows(b.pool, TO), before)


def test_lengths_differ(start: Any) -> None:
    a, b = start(seed=1), start()
    peer = meet(a, b)
    sent, received = a.send(peer, "r", torch.tensor(SLOTS)), b.receive("r", torch.tensor(TO[:-1]))
    for move in (sent, received):
        with pytest.raises(LinkError, match="request r: 11 tokens are sent, 10 slots receive them"):
            wait(move) if move is sent else until(b, lambda: bool(raise_of(received)))
    until(b, lambda: a.poll() == [] and b.staging_free == 64)
    assert a.staging_free == 64


def test_a_head_that_nobody_holds(start: Any) -> None:
    a, b = start(seed=1, heads=range(2), total_heads=4, rows=2), start(heads=range(4), total_heads=4, rows=4)
    sent = a.send(meet(a, b), "r", torch.tensor(SLOTS))
    with pytest.raises(LinkError, match=r"request r: no peer holds head 2; this link's are 0 to 4, peers: Peer\("):
        b.receive("r", torch.tensor(TO))
    with pytest.raises(LinkError, match="no peer holds head 2"):
        wait(sent)
    assert (a.staging_free, b.staging_free) == (64, 64)


@pytest.mark.parametrize("by", ["sender", "receiver"])
def test_a_cancelled_request_frees_what_it_held(start: Any, by: str) -> None:
    a, b = start(seed=1), start(grace=0.1)
    peer = meet(a, b)
    sent, received = a.send(peer, "r", torch.tensor(SLOTS)), b.receive("r", torch.tensor(TO))
    a.cancel(sent, "no more") if by == "sender" else b.cancel(received, "no more")
    until(b, lambda: a.poll() == [] and sent.ended and received.ended and b.staging_free == a.staging_free == 64)
    assert "no more" in str(sent.error)
    assert "no more" in str(received.error)
    assert untouched(b)


def test_slots_that_are_none_of_the_pools(start: Any) -> None:
    link = start()
    for slots, expected in (
        ([64], r"each in \[0, 64\)"),
        ([-1], r"each in \[0, 64\)"),
        ([], "one slot"),
        ([1, 1], "each slot once"),
    ):
        with pytest.raises(hal.ArgumentError, match=expected):
            link.receive("r", torch.tensor(slots, dtype=torch.int64))


def test_without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "MODULES", ("no_such_module",))
    with pytest.raises(LinkError, match=r"NIXL is not installed — pip install 'hal-kernels\[nixl\]'"):
        make({})


def test_a_closed_link(start: Any) -> None:
    a, b = start(seed=1), start()
    peer = meet(a, b)
    sent = a.send(peer, "r", torch.tensor(SLOTS))
    b.close()
    with pytest.raises(LinkError, match=r"is gone: .*; request r was not acknowledged"):
        wait(sent)
    with pytest.raises(LinkError, match="this link is closed"):
        b.receive("r", torch.tensor(TO))
    assert a.staging_free == 64
