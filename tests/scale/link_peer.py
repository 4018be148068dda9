"""A link in a process of its own, that does what it is told through a pipe. Forked, so that it starts quickly."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

import hal
from hal.engines.nixl import Link, LinkError, Peer, Transfer, wait, wire

ENVIRONMENT = {
    "HAL_BACKEND": "reference",
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "lo",
    "UCX_LOG_LEVEL": "fatal",
    "NIXL_LOG_LEVEL": "FATAL",
    "OMP_NUM_THREADS": "1",
}


def pool(layout: str = "layer_first", page: int = 4, heads: int = 2, slots: int = 64, **given: Any) -> hal.KVPool:
    """A small pool, zeros; `seed`: rows that say whose they are."""
    shape = {
        "layer_first": (3, slots, heads, 8),
        "page_first": (slots, 3, heads, 8),
        "page_first_direct": (slots // page, 3, page, heads, 8),
        "page_head": (slots // page, heads, page, 3, 8),
    }[layout]
    dtype, seed = getattr(torch, given.get("dtype", "float32")), given.get("seed")

    def half(add: int) -> torch.Tensor:
        if seed is None:
            return torch.zeros(shape, dtype=dtype)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed + add)).to(dtype)

    return hal.KVPool(half(0), half(1), layout, page)


def make(given: dict[str, Any]) -> Link:
    of_link = ("model", "heads", "total_heads", "page_size", "staging", "grace")
    options = {"model": "m", "page_size": 4, "staging": 64, **{n: given[n] for n in of_link if n in given}}
    # `heads` are the link's; the rows of the pool have as many.
    of_pool = {n: v for n, v in given.items() if n not in of_link}
    rows = of_pool.pop("rows", 2)
    return Link(pool(heads=rows, **of_pool), **options)


def break_off(link: Link, keep: int) -> None:
    """The next write, the last of its request, ends in the middle, without a notification: this process is killed when
    `keep` bytes of it are there."""
    nixl = link.agent.nixl

    whole, begun = link.agent.write, 0

    def write(here: Any, there: Any, memory: str, to: str, token: str, of: int) -> Any:
        nonlocal begun
        begun += 1
        return whole(here, there, memory, to, token, of) if begun < of else last(here, there, to)

    def last(here: Any, there: Any, to: str) -> None:
        halves = [[(int(rows[0][0]), keep, int(rows[0][2]))] for rows in (here, there)]
        src, dst = (nixl.get_xfer_descs(half, "DRAM") for half in halves)
        handle = nixl.initialize_xfer("WRITE", src, dst, to)
        state = nixl.transfer(handle)
        while state == "PROC":
            state = nixl.check_xfer_state(handle)
        assert state == "DONE"
        # UCX says that it is done here; over TCP the bytes may still be on their way.
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    link.agent.write = write  # type: ignore[method-assign]


def serve(pipe: Connection, given: dict[str, Any]) -> None:
    """Answers (name, arguments) by what came of it; an error as its text."""
    wire.PIECE_BYTES = given.pop("piece", wire.PIECE_BYTES)
    link = make(given)
    found: dict[str, Transfer | Peer] = {}

    def begin(kind: str, request: str, slots: list[int]) -> None:
        listed = torch.tensor(slots)
        if kind == "send":
            found[request] = link.send(link.peers[-1], request, listed)
        else:
            found[request] = link.receive(request, listed)

    def do(name: str, *args: Any) -> Any:
        match name:
            case "address":
                return link.address
            case "connect":
                wait(link.connect(args[0]))
            case "connected":
                wait(link.accept())
            case "begin":
                begin(*args)
            case "wait":
                wait(found[args[0]])
            case "break":
                break_off(link, args[0])
            case "free":
                return link.staging_free
            case "rows":
                layer = [link.pool.layer(i)[0].reshape(-1, *link.pool.row_shape) for i in range(3)]
                return torch.stack([t[torch.tensor(args[0])] for t in layer]).tolist()
        return None

    while True:
        if not pipe.poll(0.002):
            link.poll()
            continue
        try:
            pipe.send(("", do(*pipe.recv())))
        except LinkError as e:
            pipe.send((f"{type(e).__name__}: {e}", None))
        except EOFError:
            return


class Remote:
    """A link in another process."""

    def __init__(self, **given: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["scale.link_peer", "nixl_cu12._api"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, given), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, *what: Any) -> None:
        self.pipe.send(what)

    def hear(self) -> Any:
        assert self.pipe.poll(120), "no answer"
        why, found = self.pipe.recv()
        if why:
            raise LinkError(why)
        return found

    def do(self, *what: Any) -> Any:
        self.tell(*what)
        return self.hear()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
        self.process.join(60)


# --- in the test --------------------------------------------------------------------------------------

SLOTS = [9, 8, 3, 40, 41, 42, 43, 17, 60, 0, 1]
TO = [50, 2, 3, 4, 33, 34, 35, 36, 62, 11, 12]


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
    halves = [[t.reshape(-1, *t.shape[-2:]) for t in of.layer(i) if t is not None] for i in range(of.num_layers)]
    return torch.stack([torch.stack([t[slots] for t in pair]) for pair in halves])


def until(link: Link, come: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not come():
        link.poll()
        assert time.monotonic() < end
        time.sleep(0.001)


def untouched(link: Link) -> bool:
    return not any(t.any() for t in link.pool.tensors)
