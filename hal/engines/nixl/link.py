"""`Link`: pages of a pool to another process's, complete or not at all.

The receiver asks (``want``: which of its staged pages, which heads), the sender packs, writes there by NIXL, and NIXL's
notification comes after the bytes. Then, and not before, the receiver unpacks into its pool and says so (``ack``).
Messages and the news that a peer is gone go by a TCP connection of their own.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable

from torch import Tensor

from hal import KVPool
from hal._errors import ArgumentError
from hal.engines.nixl import agent, peers
from hal.engines.nixl.errors import LinkError
from hal.engines.nixl.peers import Peer, Peers
from hal.engines.nixl.slots import Generations, Stamped
from hal.engines.nixl.transfer import Transfer
from hal.engines.nixl.wire import Wire

REMEMBERED = 1 << 16
"""Ended requests that are known, so that none is moved twice."""


class Link:
    """One end: a pool, staging memory beside it, and the peers it is connected to. One thread uses it at a time.

    Args:
        pool: the keys and values; any layout, on the CPU or on a GPU.
        model: a name that both ends give; others are refused.
        heads: which KV heads of the model each row holds, in steps of 1; None: all, as without tensor parallelism.
        total_heads: of the model; None: as many as `heads` has.
        page_size: tokens of a page on the wire, the same at both ends, whatever the pools' page sizes are.
        staging: tokens that can be under way at once.
        host, port: where it listens; 0: a free port. Peers are trusted: let no others reach it.
        grace: seconds for which staging memory is not used again after a peer that might have been writing to it
            died: what is in flight may still come.

    Raises:
        ArgumentError: heads that do not fit the pool's rows.
        LinkError: NIXL is not installed.

    Example:
        >>> import torch, hal
        >>> from hal.engines.nixl import Link, wait
        >>> full = hal.KVPool(torch.randn(2, 64, 4, 8), torch.randn(2, 64, 4, 8), "layer_first", page_size=16)
        >>> other = hal.KVPool(torch.zeros(16, 4, 4, 2, 8), torch.zeros(16, 4, 4, 2, 8), "page_head", page_size=4)
        >>> with Link(full, model="m", staging=64) as prefill, Link(other, model="m", staging=64) as decode:
        ...     to = prefill.connect(decode.address)
        ...     wait(to, decode.accept())
        ...     wait(prefill.send(to, "r1", torch.arange(20)), decode.receive("r1", torch.arange(40, 60)))
        >>> torch.equal(other.layer(1)[0][10, 0], full.k[1, 0])
        True
    """

    def __init__(
        self,
        pool: KVPool,
        *,
        model: str,
        heads: range | None = None,
        total_heads: int | None = None,
        page_size: int = 16,
        staging: int = 4096,
        host: str = "127.0.0.1",
        port: int = 0,
        grace: float = 10.0,
    ) -> None:
        self.pool, self.grace = pool, grace
        rows = pool.row_shape[0] if len(pool.row_shape) == 2 else 1
        self.heads = range(rows) if heads is None else heads
        total = len(self.heads) if total_heads is None else total_heads
        if self.heads.step != 1 or len(self.heads) != rows or not 0 <= self.heads.start <= total - rows:
            raise ArgumentError("Link", "heads", f"{rows} heads in steps of 1, of {total}", repr(self.heads))
        for name, value in (("page_size", page_size), ("staging", staging)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError("Link", name, "an int >= 1", repr(value))
        self.wire = Wire(pool, page_size, staging)
        self.agent = agent.Agent(self.wire)
        self.generations = Generations(pool)
        facts = peers.facts(pool, model, total, page_size)
        self._peers = Peers(self, facts, host, port)
        self._active: dict[tuple[str, str, Peer | None], Transfer] = {}
        self._ended: OrderedDict[tuple[str, str, str], None] = OrderedDict()
        self._tokens: dict[str, Transfer] = {}
        self._quarantine: list[tuple[float, str]] = []
        self._news: list[Transfer] = []
        self.closed = False

    # --- peers --------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """``host:port`` that others connect to."""
        return self._peers.address

    @property
    def peers(self) -> list[Peer]:
        """Those that are connected and ready."""
        return [p for p in self._peers.all if p.ready]

    def connect(self, address: str, timeout: float = 10.0) -> Peer:
        """Connects to another link's `address`. It is ready when `wait` has returned.

        Raises:
            LinkError: nobody listens there.
        """
        return self._peers.connect(address, timeout)

    def accept(self, timeout: float = 60.0) -> Peer:
        """The next link that has connected to this one and fits. It is ready when `wait` has returned.

        Raises:
            LinkError: none came in `timeout` seconds, or it was refused: it differs in what must be the same.
        """
        end = time.monotonic() + timeout
        while not self._peers.newcomers:
            self.poll()
            if time.monotonic() > end:
                raise LinkError(f"hal: link: nobody connected to {self.address} in {timeout:g} s")
            time.sleep(0.001)
        peer = self._peers.newcomers.popleft()
        if peer.error is not None:
            raise peer.error
        return peer

    # --- transfers ----------------------------------------------------------------------------------

    def stamp(self, slots: Tensor) -> Stamped:
        """A list of slots that is refused once one of them has been `freed`."""
        return self.generations.stamp(slots)

    def freed(self, slots: Tensor) -> None:
        """To be told of slots that are given back: lists that were made before are stale."""
        self.generations.freed(slots)

    def send(self, to: Peer, request: str, slots: Tensor | Stamped) -> Transfer:
        """Sends the rows of a request to a peer that receives it, or will. The rows are packed when this returns.

        Args:
            to: a peer that is ready.
            request: a name that both ends give.
            slots: ``[n]`` int32 or int64 on the CPU, in the order of the tokens.

        Raises:
            LinkError: the peer is gone or has refused it, the request was sent to it before, the list is stale.
            LinkFull: the staging memory is full. The peer is told: the same request may be sent again.
        """
        found = self._new("send", request, slots, to)
        try:
            if to.error is not None:
                raise to.error
            if not to.ready:
                raise LinkError(f"hal: link: request {request}: {to} is not ready — wait(peer) first")
            refused = to.refused.pop(request, None)
            if refused is not None:
                raise LinkError(refused)
            self.generations.check(found.slots, request)
            found.staged = self.wire.take(found.tokens, request)
            found.packed.extend(self.wire.pack(found.slots.slots, found.staged))
        except Exception as e:
            found.fail(e)
            raise
        found.offer()
        found.ready()
        return found

    def receive(self, request: str, slots: Tensor | Stamped, of: Iterable[Peer] | None = None) -> Transfer:
        """Receives the rows of a request from the peers that hold its heads. They are in the pool when it is `done`.

        Args:
            request: a name that both ends give.
            slots: ``[n]`` int32 or int64 on the CPU, in the order of the tokens. Nothing is written to them before
                all has come.
            of: peers that will send it; None: all that are connected. Together they must hold this link's heads.

        Raises:
            LinkError: heads that no peer holds, a peer has given up, the request was received before, the list is
                stale.
            LinkFull: the staging memory is full. The peers are told.
        """
        found = self._new("receive", request, slots, None)
        given = self.peers if of is None else list(of)
        try:
            for peer in given:
                if peer.error is not None:
                    raise peer.error
                why = peer.aborted.pop(request, None)
                if why is not None:
                    raise LinkError(why)
            self.generations.check(found.slots, request)
            parts = peers.cover(self.heads, given, request)
            found.staged = self.wire.take(found.tokens, request)
        except Exception as e:
            found.fail(e, tell=given)
            raise
        for peer, start, stop in parts:
            token = uuid.uuid4().hex
            found.open[token] = peer
            self._tokens[token] = found
            peer.send(
                "want",
                request,
                token=token,
                tokens=found.tokens,
                heads=[start, stop],
                pages=self.wire.pages(found.staged),
            )
        for peer in given:
            if peer.offers.pop(request, False) and peer not in found.open.values():
                peer.send("unneeded", request)
        return found

    def cancel(self, transfer: Transfer, why: str = "it was cancelled") -> None:
        """Ends a transfer, here and at its peers. What it held is free again when they can't write there any more."""
        if not transfer.ended:
            transfer.fail(LinkError(f"hal: link: request {transfer.request}: {why}"))

    def _new(self, kind: str, request: str, slots: Tensor | Stamped, peer: Peer | None) -> Transfer:
        if self.closed:
            raise LinkError(f"hal: link: request {request}: this link is closed")
        key = (kind, request, peer)
        if key in self._active or self.known(kind, request, peer):
            how = f"sent to {peer} already" if kind == "send" else "received already"
            raise LinkError(f"hal: link: request {request} was {how}: a request is moved once")
        found = Transfer(self, kind, request, self.generations.stamp(slots), peer)
        self._active[key] = found
        return found

    def known(self, kind: str, request: str, peer: Peer | None) -> bool:
        """Has this request been moved?"""
        return (kind, request, peer.name if peer else "") in self._ended

    def active(self, kind: str, request: str, peer: Peer | None = None) -> Transfer | None:
        return self._active.get((kind, request, peer))

    def _end(self, found: Transfer) -> None:
        """`found` has come to its end, by itself or not."""
        self._active.pop((found.kind, found.request, found.peer), None)
        self._news.append(found)
        if found.error is None:
            self._ended[found.kind, found.request, found.peer.name if found.peer else ""] = None
            if len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)

    # --- progress -----------------------------------------------------------------------------------

    def poll(self) -> list[Transfer]:
        """Goes on with everything, without waiting. Returns the transfers that ended since the last call."""
        if self.closed:
            raise LinkError("hal: link: this link is closed")
        for name, token, of in self.agent.notifications():
            found = self._tokens.get(token)
            if found is not None and found.open[token].name == name and found.written(token, of):
                self.shut(token, arrived=True)
        self._peers.poll()
        for found in [t for t in self._active.values() if t.handles]:
            found.look()
        self.agent.sweep()
        now = time.monotonic()
        while self._quarantine and self._quarantine[0][0] <= now:
            self.shut(self._quarantine.pop(0)[1])
        news, self._news = self._news, []
        return news

    def shut(self, token: str, *, arrived: bool = False) -> None:
        """Nobody writes for this token any more."""
        found = self._tokens.pop(token, None)
        if found is not None:
            found.shut(token, arrived)

    def quarantine(self, token: str) -> None:
        """Nobody will begin to write for this token, but what was written may still be under way."""
        self._quarantine.append((time.monotonic() + self.grace, token))

    def gone(self, peer: Peer) -> None:
        """A peer has died, or can't be understood: its transfers fail, what it may write to is left alone a while."""
        assert peer.error is not None
        for found in [t for t in self._active.values() if t.peer is peer or peer in t.open.values()]:
            found.fail(
                LinkError(
                    f"{peer.error}; request {found.request}, {found.tokens} tokens, was not complete: "
                    "nothing of it was written to the pool"
                    if found.kind == "receive"
                    else f"{peer.error}; request {found.request} was not acknowledged"
                )
            )
        for token, found in list(self._tokens.items()):
            if found.open[token] is peer:
                self.quarantine(token)
        self.agent.forget(peer.name)

    @property
    def staging_free(self) -> int:
        """Tokens of staging memory that no request holds."""
        return self.wire.allocator.available

    def close(self) -> None:
        """Ends all transfers, tells the peers, and gives back what NIXL registered."""
        if self.closed:
            return
        for found in list(self._active.values()):
            self.cancel(found, "the link was closed")
        self.closed = True
        self._peers.close()
        self.agent.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


def wait(*things: Transfer | Peer, timeout: float = 60.0) -> None:
    """Polls until all of them have ended, or are ready. They may be of several links of this process.

    Args:
        timeout: seconds.

    Raises:
        LinkError: one failed, with its reason, or the time is up: then they go on as before.
    """
    end = time.monotonic() + timeout
    links = {id(t.link): t.link for t in things}
    while True:
        for link in links.values():
            link._news += link.poll()
        for t in things:
            if t.error is not None:
                raise t.error
        left = [t for t in things if not t.ended]
        if not left:
            return
        if time.monotonic() > end:
            raise LinkError(f"hal: link: {timeout:g} s are over; not ended: {', '.join(map(str, left))}")
        time.sleep(0.0002)
