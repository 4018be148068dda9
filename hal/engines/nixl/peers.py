"""The links that a link is connected to: how they meet, and what they say to one another."""

from __future__ import annotations

import base64
import contextlib
import socket
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hal import KVPool
from hal.engines.nixl import agent
from hal.engines.nixl.channel import Channel
from hal.engines.nixl.errors import LinkError

if TYPE_CHECKING:
    from hal.engines.nixl.link import Link

PROTOCOL = 2
"""Of the messages; links of another do not understand one another."""


def facts(pool: KVPool, model: str, total_heads: int, page_size: int) -> dict[str, Any]:
    """What must be the same at both ends. Layout, page size and slots of the pools, and the heads held, may differ."""
    return {
        "protocol": PROTOCOL,
        "nixl": agent.version(),
        "model": model,
        "dtype": str(pool.dtype).removeprefix("torch."),
        "layers": pool.num_layers,
        "k row": pool.row_shape[-1],
        "v row": None if pool.v_row_shape is None else pool.v_row_shape[-1],
        "total heads": total_heads,
        "page size on the wire": page_size,
    }


def cover(heads: range, given: Sequence[Peer], request: str) -> list[tuple[Peer, int, int]]:
    """(peer, first head, past the last) for all of `heads`: as few peers as can be.

    Raises:
        LinkError: a head that none of them holds.
    """
    found, head = [], heads.start
    while head < heads.stop:
        have = [p for p in given if p.ready and head in p.heads]
        if not have:
            raise LinkError(
                f"hal: link: request {request}: no peer holds head {head}; this link's are {heads.start} to "
                f"{heads.stop}, peers: {', '.join(map(str, given)) or 'none'}"
            )
        best = max(have, key=lambda p: p.heads.stop)
        stop = min(best.heads.stop, heads.stop)
        found.append((best, head, stop))
        head = stop
    return found


class Peer:
    """Another link.

    Attributes:
        ready: both have found that they fit.
        error: why it is gone or was refused, or None.
        heads: those that its rows hold.
    """

    def __init__(self, link: Link, sock: socket.socket, address: str, came: bool) -> None:
        self.link, self.channel, self.address, self.came = link, Channel(sock), address, came
        self.name = ""
        self.heads = range(0)
        self.wire: dict[str, Any] = {}
        self.ready = self.fits = self.agrees = False
        self.error: LinkError | None = None
        self.wants: dict[str, dict[str, Any]] = {}
        self.offers: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self.aborted: dict[str, str] = {}
        self.written: set[str] = set()
        """Tokens that were written for, until the peer has said what came of it."""

    @property
    def ended(self) -> bool:
        return self.ready or self.error is not None

    def __repr__(self) -> str:
        return f"Peer({self.address.rpartition(':')[0]}, heads {self.heads.start} to {self.heads.stop})"

    def send(self, kind: str, request: str, **what: Any) -> None:
        """Says it, unless the peer is gone."""
        if self.error is None:
            self.channel.send({"kind": kind, "request": request, **what})


class Peers:
    """All of a link's, and the socket on which others come."""

    def __init__(self, link: Link, own: dict[str, Any], host: str, port: int) -> None:
        self.link, self.facts = link, own
        self.listener = socket.create_server((host, port))
        self.listener.setblocking(False)
        self.address = "{}:{}".format(*self.listener.getsockname()[:2])
        self.all: list[Peer] = []
        self.newcomers: deque[Peer] = deque(maxlen=1000)

    def connect(self, address: str, timeout: float) -> Peer:
        host, _, port = address.rpartition(":")
        try:
            sock = socket.create_connection((host, int(port)), timeout)
        except (OSError, ValueError) as e:
            why = getattr(e, "strerror", None) or e
            raise LinkError(f"hal: link: can't connect to {address}: {why} — is a Link listening there?") from e
        return self._add(sock, address, came=False)

    def _add(self, sock: socket.socket, address: str, *, came: bool) -> Peer:
        peer = Peer(self.link, sock, address, came)
        self.all.append(peer)
        heads = self.link.heads
        metadata = base64.b64encode(self.link.agent.metadata()).decode()
        peer.send(
            "hello",
            "",
            facts=self.facts,
            heads=[heads.start, heads.stop],
            wire=self.link.wire.described(),
            agent=metadata,
        )
        return peer

    def poll(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, address = self.listener.accept()
                self._add(sock, "{}:{}".format(*address[:2]), came=True)
        for peer in list(self.all):
            messages, why = peer.channel.read()
            for message in messages:
                if peer.error is None:
                    try:
                        self._hear(peer, message)
                    except (KeyError, TypeError, ValueError) as e:
                        self._lose(peer, f"what it sends are no messages of a link: {e!r}")
            if why and peer.error is None:
                self._lose(peer, why)

    def _lose(self, peer: Peer, why: str) -> None:
        how = "is gone" if peer.ready else "could not be met"
        self._drop(peer, LinkError(f"hal: link: the peer {peer.address} {how}: {why}"))

    def _drop(self, peer: Peer, error: LinkError) -> None:
        peer.error, met, new = error, peer.ready, peer.came and not peer.fits
        peer.ready = False
        peer.channel.close()
        self.all.remove(peer)
        if met:
            self.link.gone(peer)
        elif new:
            self.newcomers.append(peer)

    # --- what is said ---------------------------------------------------------------------------------

    def _hear(self, peer: Peer, m: dict[str, Any]) -> None:
        kind = m["kind"]
        if kind in ("hello", "fits", "differs"):
            getattr(self, f"_{kind}")(peer, m)
        elif not peer.ready:
            raise ValueError(f"{kind} before it was met")
        elif kind in ("offer", "want", "ack", "refuse", "abort", "unneeded", "closed"):
            getattr(self, f"_{kind}")(peer, m["request"], m)
        else:
            raise ValueError(kind)

    def _hello(self, peer: Peer, m: dict[str, Any]) -> None:
        theirs, names = m["facts"], list(dict.fromkeys([*self.facts, *m["facts"]]))
        differ = [n for n in names if self.facts.get(n) != theirs.get(n)]
        if differ:
            said = "; ".join(f"{n} is {self.facts.get(n)} here and {theirs.get(n)} there" for n in differ)
            peer.send(
                "differs",
                "",
                why="; ".join(f"{n} is {theirs.get(n)} here and {self.facts.get(n)} there" for n in differ),
            )
            self._differs(peer, {"why": said})
            return
        peer.heads, peer.wire = range(*m["heads"]), m["wire"]
        try:
            peer.name = self.link.agent.meet(base64.b64decode(m["agent"]))
        except Exception as e:
            raise ValueError(f"NIXL does not understand its metadata: {e}") from e
        peer.fits = True
        peer.send("fits", "")
        if peer.came:
            self.newcomers.append(peer)
        self._met(peer)

    def _fits(self, peer: Peer, m: dict[str, Any]) -> None:
        peer.agrees = True
        self._met(peer)

    def _met(self, peer: Peer) -> None:
        if peer.fits and peer.agrees:
            peer.ready = True

    def _differs(self, peer: Peer, m: dict[str, Any]) -> None:
        why = f"{m['why']} — both ends must be started alike"
        self._drop(peer, LinkError(f"hal: link: the peer {peer.address} was refused: {why}"))

    def _offer(self, peer: Peer, request: str, m: dict[str, Any]) -> None:
        peer.aborted.pop(request, None)
        active = self.link.active("receive", request)
        if self.link.known("receive", request, None):
            why = f"hal: link: request {request} was received already: a request is moved once"
            peer.send("refuse", request, why=why, token="")
        elif active is None:
            peer.offers[request] = m["tokens"]
        elif peer not in active.open.values():
            peer.send("unneeded", request)

    def _want(self, peer: Peer, request: str, m: dict[str, Any]) -> None:
        start, stop = m["heads"]
        pages = m["pages"]
        held = self.link.heads
        if not (held.start <= start < stop <= held.stop) or not all(0 <= p < peer.wire["pages"] for p in pages):
            raise ValueError(f"want of heads {m['heads']} and pages {pages[:4]}")
        if len(pages) != -(-m["tokens"] // self.facts["page size on the wire"]):
            raise ValueError(f"want of {len(pages)} pages for {m['tokens']} tokens")
        peer.refused.pop(request, None)
        active = self.link.active("send", request, peer)
        if active is None or active.staged is None:
            peer.wants[request] = m
        else:
            active.write(m)

    def _ack(self, peer: Peer, request: str, m: dict[str, Any]) -> None:
        peer.written.discard(m["token"])
        active = self.link.active("send", request, peer)
        if active is not None:
            active.acknowledged()

    def _unneeded(self, peer: Peer, request: str, m: dict[str, Any]) -> None:
        active = self.link.active("send", request, peer)
        if active is not None:
            active.acknowledged()

    def _refuse(self, peer: Peer, request: str, m: dict[str, Any]) -> None:
        token = m["token"]
        if peer.wants.get(request, {}).get("token") == token:
            del peer.wants[request]
        active = self.link.active("send", request, peer)
        if active is not None:
            active.fail(m["why"], tell=())
        elif not token:
            peer.refused[request] = m["why"]
        if token:
            peer.send("closed", request, token=token, began=token in peer.written)
            peer.written.discard(token)

    def _abort(self, peer: Peer, request: str, m: dict[str, Any]) -> None:
        peer.offers.pop(request, None)
        active = self.link.active("receive", request)
        if active is not None and peer in active.open.values():
            active.fail(m["why"])
        elif not self.link.known("receive", request, None):
            peer.aborted[request] = m["why"]

    def _closed(self, peer: Peer, request: str, m: dict[str, Any]) -> None:
        if m["began"]:
            # What is in flight may still come.
            self.link.quarantine(m["token"])
        else:
            self.link.shut(m["token"])

    def close(self) -> None:
        for peer in self.all:
            peer.channel.close()
        self.all.clear()
        self.listener.close()
