"""One request on its way: what it holds, and how it ends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hal._errors import HalError
from hal.engines.nixl.errors import LinkError
from hal.engines.nixl.slots import Stamped

if TYPE_CHECKING:
    from hal.engines.nixl.link import Link
    from hal.engines.nixl.peers import Peer
    from hal.engines.nixl.wire import Piece


BURST = 1e-4
"""Seconds for which a poll asks NIXL how far a transfer is."""


class Transfer:
    """A request that a `Link` sends or receives.

    Attributes:
        request: its name.
        kind: ``send`` or ``receive``.
        tokens: how many.
        done: all of it is in the receiver's pool. So says the sender's too, when the receiver has said so.
        steps: when each step was over, in seconds of `time.perf_counter`: ``asked for``; of a send ``packed``, ``begun
            to write``, ``written``; of a receive ``arrived``; ``done``.
        error: why it failed, or None. Then nothing of it is in the receiver's pool.
    """

    def __init__(self, link: Link, kind: str, request: str, slots: Stamped, peer: Peer | None) -> None:
        self.link, self.kind, self.request, self.slots, self.peer = link, kind, request, slots, peer
        self.tokens = len(slots.slots)
        self.done = False
        self.error: HalError | None = None
        self.staged: Tensor | None = None
        self.open: dict[str, Peer] = {}
        """Of what is received: who may still write, by token."""
        self.arrived: Counter[str] = Counter()
        """How many of their writes have come, by token."""
        self.packed: list[Piece] = []
        self.handles: list[Any] = []
        self.steps: dict[str, float] = {}
        self.step("asked for")
        self.came: list[tuple[str, Peer]] = []

    @property
    def ended(self) -> bool:
        return self.done or self.error is not None

    def __repr__(self) -> str:
        state = "done" if self.done else "failed" if self.error is not None else "under way"
        return f"Transfer({self.kind} {self.request}, {self.tokens} tokens, {state})"

    def step(self, name: str) -> None:
        self.steps[name] = time.perf_counter()

    def _free(self) -> None:
        if self.staged is not None:
            self.link.wire.free(self.staged)
            self.staged = None

    def _finish(self) -> None:
        self.done = True
        self.step("done")
        self.link._end(self)

    def fail(self, why: Exception | str, tell: Iterable[Peer] | None = None) -> None:
        """Ends it, frees what nobody writes to any more, and tells the peers.

        Args:
            why: an error, or what a peer has said.
            tell: peers besides those that are to write; of a send: whom instead of its peer.
        """
        if self.ended:
            return
        self.error = why if isinstance(why, HalError) else LinkError(str(why))
        self.link._end(self)
        if self.kind == "send":
            assert self.peer is not None
            self._release()
            self.ready()
            # Only read: what is still sent from it will never be complete.
            self._free()
            for peer in (self.peer,) if tell is None else tell:
                peer.send("abort", self.request, why=str(self.error))
            return
        for token, peer in list(self.open.items()):
            peer.send("refuse", self.request, why=str(self.error), token=token)
        for peer in tell or ():
            peer.send("refuse", self.request, why=str(self.error), token="")
        if not self.open:
            self._free()

    # --- the sender's ---------------------------------------------------------------------------------

    def offer(self) -> None:
        assert self.peer is not None
        self.peer.send("offer", self.request, tokens=self.tokens)
        want = self.peer.wants.pop(self.request, None)
        if want is not None:
            self.write(want)

    def write(self, want: dict[str, Any]) -> None:
        """The peer has said where to."""
        assert self.peer is not None
        assert self.staged is not None
        wire = self.link.wire
        if want["tokens"] != self.tokens:
            n, m = self.tokens, want["tokens"]
            self.fail(LinkError(f"hal: link: request {self.request}: {n} tokens are sent, {m} slots receive them"))
            return
        start, stop = want["heads"]
        there = self.peer.wire
        pages, token = wire.pages(self.staged), want["token"]
        try:
            for piece in self.packed:
                here, to = wire.descriptors(
                    pages[piece.pages],
                    start - self.link.heads.start,
                    there,
                    want["pages"][piece.pages],
                    start - self.peer.heads.start,
                    stop - start,
                )
                piece.ready()
                self.peer.written.add(token)
                self.handles.append(
                    self.link.agent.write(here, to, there["memory"], self.peer.name, token, len(self.packed))
                )
        except LinkError as e:
            self.fail(e)
            return
        self.step("begun to write")
        self.look()

    def ready(self) -> None:
        """All rows are packed."""
        for piece in self.packed:
            piece.ready()
        self.step("packed")

    def look(self) -> None:
        """How far NIXL is. UCX goes on with a write only when it is asked: so it is asked often, a short while."""
        try:
            end = time.perf_counter() + BURST
            while any(self.link.agent.moving(handle) for handle in self.handles):
                if time.perf_counter() > end:
                    return
        except LinkError as e:
            self.fail(e)
            return
        self.step("written")
        self._release()
        self._free()

    def _release(self) -> None:
        for handle in self.handles:
            self.link.agent.release(handle)
        self.handles.clear()

    def acknowledged(self) -> None:
        if not self.ended:
            self._free()
            self._finish()

    # --- the receiver's -------------------------------------------------------------------------------

    def written(self, token: str, of: int) -> bool:
        """A write for this token, of so many, is complete. Are all?"""
        self.arrived[token] += 1
        return self.arrived[token] == of

    def shut(self, token: str, arrived: bool) -> None:
        """One of the peers has written all of its part, or never will."""
        peer = self.open.pop(token)
        if arrived and not self.ended:
            self.came.append((token, peer))
        if self.open:
            return
        if not self.ended:
            self._unpack()
        self._free()

    def _unpack(self) -> None:
        assert self.staged is not None
        try:
            self.link.generations.check(self.slots, self.request)
            self.step("arrived")
            self.link.wire.unpack(self.staged, self.slots.slots)
        except Exception as e:
            self.fail(e, tell=[peer for _, peer in self.came])
            return
        for token, peer in self.came:
            peer.send("ack", self.request, token=token)
        self._finish()
