"""`Link`: rows between pools that differ; and every way to go wrong, with processes killed on purpose."""

from __future__ import annotations

import doctest
import io
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nixl_cu12", reason="NIXL is not installed here: the extra nixl")

import torch
from scale import link_peer
from scale.link_peer import Remote, make, pool

import hal
from hal.bench import link as bench
from hal.engines.nixl import Link, LinkError, LinkFull, agent, wait

SLOTS = [9, 8, 3, 40, 41, 42, 43, 17, 60, 0, 1]
TO = [50, 2, 3, 4, 33, 34, 35, 36, 62, 11, 12]


@pytest.fixture(autouse=True, scope="module")
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in link_peer.ENVIRONMENT.items():
            patch.setenv(name, value)
        # What the server of forks imports beforehand is found by it alone.
        patch.setenv(
            "PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        )
        hal.reload()
        yield
    hal.reload()


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Starts links, here or (``remote=True``) in processes; ends them."""
    made: list[Any] = []

    def begin(remote: bool = False, **given: Any) -> Any:
        made.append(Remote(**given) if remote else make(given))
        return made[-1]

    yield begin
    for link in made:
        link.close() if isinstance(link, Link) else link.kill()


def meet(a: Link, b: Link) -> Any:
    """a's peer b, when they have met."""
    peer = a.connect(b.address)
    wait(peer, b.accept())
    return peer


def remote_of(link: Link, remote: Remote) -> Any:
    """link's peer in the other process, which connects to it."""
    remote.tell("connect", link.address)
    peer = link.accept()
    wait(peer)
    remote.hear()
    return peer


def rows(of: hal.KVPool, slots: list[int]) -> torch.Tensor:
    """``[layers, 2, n, H, D]``, whatever the layout."""
    halves = [
        [t.reshape(-1, *t.shape[-2:]) for t in of.layer(i) if t is not None] for i in range(of.num_layers)
    ]
    return torch.stack([torch.stack([t[slots] for t in pair]) for pair in halves])


def until(link: Link, come: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not come():
        link.poll()
        assert time.monotonic() < end
        time.sleep(0.001)


def untouched(link: Link) -> bool:
    return not any(t.any() for t in link.pool.tensors)


# --- what is moved ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src", "dst", "dtype"),
    [
        (("layer_first", 4), ("page_head", 16), "float32"),
        (("page_head", 16), ("layer_first", 1), "bfloat16"),
        (("page_first_direct", 8), ("page_first", 4), "float8_e4m3fn"),
        (("page_first", 1), ("page_first_direct", 16), "float16"),
    ],
)
def test_layouts_and_page_sizes_differ(start: Any, src: Any, dst: Any, dtype: str) -> None:
    a, b = (
        start(layout=src[0], page=src[1], dtype=dtype, seed=1),
        start(layout=dst[0], page=dst[1], dtype=dtype),
    )
    peer = meet(a, b)
    wait(a.send(peer, "r", torch.tensor(SLOTS)), b.receive("r", torch.tensor(TO, dtype=torch.int32)))
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.pool.dtype.itemsize]
    got, other = rows(b.pool, TO).view(bits), sorted(set(range(64)) - set(TO))
    assert torch.equal(got, rows(a.pool, SLOTS).view(bits))
    assert got.any()
    assert not rows(b.pool, other).view(bits).any()
    assert (a.staging_free, b.staging_free) == (64, 64)


def test_latent_rows_without_heads() -> None:
    src = hal.KVPool(torch.randn(2, 32, 24), None, "layer_first", 4)
    dst = hal.KVPool([torch.zeros(32, 1, 24) for _ in range(2)], None, "layer_first", 16)
    with Link(src, model="m", staging=32) as a, Link(dst, model="m", staging=32) as b:
        peer = meet(a, b)
        wait(a.send(peer, "r", torch.arange(20)), b.receive("r", torch.arange(10, 30)))
    assert torch.equal(torch.stack(list(dst.k))[:, 10:30, 0], src.k[:, :20])


PARTS = {"2 to 1": ((2, 2), (4,)), "1 to 2": ((4,), (2, 2)), "3 to 2": ((2, 2, 2), (3, 3))}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_heads_are_parted_otherwise(start: Any, parts: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    total = sum(parts[0])
    full = pool(heads=total, seed=3)

    def side(sizes: tuple[int, ...], layout: str, page: int) -> list[Link]:
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        return [
            start(layout=layout, page=page, heads=range(i, i + n), total_heads=total, rows=n)
            for i, n in zip(begins, sizes, strict=True)
        ]

    senders, receivers = side(parts[0], "page_head", 4), side(parts[1], "layer_first", 16)
    for link in senders:
        for mine, all_heads in zip(link.pool.tensors, full.tensors, strict=True):
            part = all_heads[:, :, link.heads.start : link.heads.stop].unflatten(1, (-1, 4))
            mine.copy_(part.permute(1, 3, 2, 0, 4))
    moves = [b.receive("r", torch.tensor(TO), [p for a in senders if (p := back(a, b))]) for b in receivers]
    for a in senders:
        moves += [a.send(peer, "r", torch.tensor(SLOTS)) for peer in a.peers]
    wait(*moves)
    got = torch.cat([rows(b.pool, TO) for b in receivers], dim=3)
    assert torch.equal(got, rows(full, SLOTS))


def back(a: Link, b: Link) -> Any:
    """b's peer a."""
    peer = a.connect(b.address)
    found = b.accept()
    wait(peer, found)
    return found


def test_the_example() -> None:
    test = doctest.DocTestParser().get_doctest(Link.__doc__ or "", {}, "Link", None, None)
    out = io.StringIO()
    assert not doctest.DocTestRunner().run(test, out=out.write).failed, out.getvalue()


def test_two_processes(start: Any) -> None:
    here, there = start(layout="page_head"), start(remote=True, seed=5)
    remote_of(here, there)
    there.do("begin", "send", "r", SLOTS)
    wait(here.receive("r", torch.tensor(TO)))
    there.do("wait", "r")
    assert torch.equal(rows(here.pool, TO), rows(pool(seed=5), SLOTS))
    assert there.do("free") == 64


# --- a process is killed ------------------------------------------------------------------------------


def test_the_sender_dies_while_it_sends(start: Any) -> None:
    here, there = start(grace=1.0), start(remote=True, seed=5)
    remote_of(here, there)
    there.do("break", 3 * 8 * 4 + 20)  # a page is 384 bytes: within a page, and within a row
    received = here.receive("r", torch.tensor(TO))
    there.tell("begin", "send", "r", SLOTS)
    until(here, lambda: bool(here.wire.pool.tensors[0].any()))
    with pytest.raises(
        LinkError, match=r"the peer 127\S+ is gone: .*; request r, 11 tokens, was not complete"
    ):
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
    (theirs,), (mine,) = (
        changed.values(),
        [{"dtype": "float32", "model": "m", "page_size": 4}[n] for n in changed],
    )
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


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2[]", b'\0\0\0\x10{"kind":"offer"}'[:20]]
)
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
    with pytest.raises(
        LinkFull, match="request r2: the staging memory is full: 11 tokens asked for, 0 of 12 free"
    ):
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
    with pytest.raises(
        LinkFull, match="request r: the staging memory is full: 11 tokens asked for, 8 of 8 free"
    ):
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
        with pytest.raises(
            LinkError, match=r"request r was sent to Peer\(.*\) already: a request is moved once"
        ):
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
    with pytest.raises(
        LinkError, match=r"request r: no peer holds head 2; this link's are 0 to 4, peers: Peer\("
    ):
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
    until(
        b, lambda: a.poll() == [] and sent.ended and received.ended and b.staging_free == a.staging_free == 64
    )
    assert "no more" in str(sent.error)
    assert "no more" in str(received.error)
    assert untouched(b)


def test_slots_that_are_none_of_the_pools(start: Any) -> None:
    link = start()
    for slots, expected in (
        ([64], r"each in \[0, 64\)"), ([-1], r"each in \[0, 64\)"), ([], "one slot"), ([1, 1], "each slot once"),
    ):  # fmt: skip
        with pytest.raises(hal.ArgumentError, match=expected):
            link.receive("r", torch.tensor(slots, dtype=torch.int64))


def test_bench() -> None:
    found = bench.measure(tokens=16, layers=2, rounds=1, device="cpu", layout="page_head")
    assert found["bytes"] == 16 * 2 * 2 * 8 * 128 * 2
    assert found["link / plain"] == found["link GB/s"] / found["plain GB/s"]


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
