"""`Engine`: continuous batching. Requests come and go at any step; prompts and decodes share a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from torch import Tensor

from hal._errors import HalError
from hal.demo.cache import PagedCache
from hal.demo.graphs import DecodeGraphs, Record, padded, unsafe
from hal.demo.model import Batch, Llama

OPS = (
    "get_last_loc",
    "alloc_extend",
    "alloc_decode",
    "write_req_to_token",
    "build_page_table",
    "compute_positions",
    "assign_extend_cache_locs",
    "build_kv_indices",
    "rope_kv_write",
    "extend_attention",
    "decode_attention",
    "kv_transfer",
)
"""What the engine calls."""


@dataclass(eq=False)
class Request:
    """A prompt and what became of it.

    Attributes:
        tokens: the prompt, then what was generated; ends with an end token or after `max_new`.
        gaps: for each generated token, how far the best logit was ahead of the second.
        row: its row of `req_to_token` while it holds slots, else None.
        cached: how many of its tokens have keys and values, in those slots or in `host_slots`.
        host_slots: where they are while it is pre-empted; None if nowhere.
        started: whether it has run before.
        done: it has all its tokens and holds nothing.
    """

    prompt: list[int]
    max_new: int
    priority: int
    number: int
    tokens: list[int]
    gaps: list[float] = field(default_factory=list)
    row: int | None = None
    cached: int = 0
    host_slots: Tensor | None = None
    started: bool = False
    done: bool = False

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: the more urgent, among equals the earlier. No two are equal, so nobody can take
        slots from somebody who takes them back."""
        return (-self.priority, self.number)


@dataclass(frozen=True)
class Event:
    """Something that happened to a request: ``started``, ``to the host``, ``dropped``, ``back``, ``done``."""

    step: int
    request: Request
    what: str
    tokens: int
    """Those reused (started), moved (to the host, back), dropped, or generated (done)."""


class Engine:
    """Greedy generation for many requests at once over one paged cache.

    Each step gives every request, by rank, the slots it needs, and takes them from those of lower rank
    if it must: their keys and values go to the host (or, where that is full, are computed again).
    Then one forward pass computes the prompts of the new and one token of each of the others.

    Args:
        model: whose ops and device the engine uses.
        slots: capacity of the KV pool in tokens, a multiple of `page_size`.
        host_slots: of the host pool, likewise; 0 for none.
        max_running: requests that hold slots at one time.
        max_length: tokens of the longest request, prompt and generation.
        page_size: tokens in a page, any size.
        share: False: every request computes its whole prompt, whatever is in the cache already.
        record: captures decode steps into graphs, e.g. `hal.demo.graphs.record_cuda`; None: none is.
    """

    def __init__(
        self,
        model: Llama,
        *,
        slots: int,
        host_slots: int,
        max_running: int,
        max_length: int,
        page_size: int = 16,
        share: bool = True,
        record: Record | None = None,
    ) -> None:
        self.model, self.max_length = model, max_length
        self.cache = PagedCache(
            model.ops,
            layers=len(model.layers),
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            slots=slots,
            host_slots=host_slots,
            requests=max_running,
            length=max_length,
            page_size=page_size,
            dtype=model.dtype,
            device=model.device,
            share=share,
        )
        self.graphs: DecodeGraphs | None = None
        if record is not None:
            pool = self.cache.pool
            self.graphs = DecodeGraphs(
                lambda batch: model.forward(batch, pool),
                record,
                most=max_running,
                # Requests share pages, so together they may list more tokens than there are slots.
                listed=max_running * max_length,
                device=model.device,
                why_not=unsafe(model.examples(pool), "rope_kv_write", "decode_attention"),
            )
        self.live: list[Request] = []
        self.events: list[Event] = []
        self.steps = 0
        self._count = 0

    def add(self, prompt: list[int], max_new: int, priority: int = 0) -> Request:
        """Queues a request.

        Raises:
            HalError: it could not run even alone.
        """
        length = len(prompt) + max_new
        most = min(self.max_length, self.model.max_positions, self.cache.pool.num_slots)
        if not prompt or max_new < 1 or length > most:
            raise HalError(
                f"hal demo: a request of {len(prompt)} + {max_new} tokens: expected at least 1 + 1, at most {most}"
            )
        request = Request(list(prompt), max_new, priority, self._count, list(prompt))
        self._count += 1
        self.live.append(request)
        return request

    def run(self) -> None:
        """Steps until every request is done."""
        while self.live:
            self.step()

    def step(self) -> list[Request]:
        """One forward pass; the requests that got a token by it."""
        requests = self._schedule()
        if not requests:
            return []
        best, found = self._best(requests)
        self.steps += 1
        for r, values, token in zip(requests, best, found, strict=True):
            r.cached = len(r.tokens)
            r.tokens.append(token)
            r.gaps.append(values[0] - values[1])
            if token in self.model.eos or len(r.output) == r.max_new:
                self._finish(r)
        return requests

    def _best(self, requests: Sequence[Request]) -> tuple[list[list[float]], list[int]]:
        """For each request its two best logits, and the token of the best."""
        n, rows = len(requests), [r.row for r in requests if r.row is not None]
        starts, ends = [r.cached for r in requests], [len(r.tokens) for r in requests]
        tokens = list(chain.from_iterable(r.tokens[r.cached :] for r in requests))
        decode = len(tokens) == n
        batch = self.graphs.batch(n) if self.graphs and decode else None
        if batch is not None and self.graphs is not None:
            size = len(batch.tokens)
            self.cache.fill(batch, *(padded(x, size) for x in (tokens, rows, starts, ends)))
            logits = self.graphs.replay(batch)[:n]
        else:
            batch = Batch.empty(len(tokens), n, sum(ends), self.model.device, decode=decode)
            logits = self.model.forward(self.cache.fill(batch, tokens, rows, starts, ends), self.cache.pool)
        best = logits.topk(2)
        return best.values.tolist(), best.indices[:, 0].tolist()

    def preempt(self, request: Request) -> None:
        """Takes a running request's slots; it comes back by its rank. `step` calls it where slots are short.

        Raises:
            HalError: the request holds none.
        """
        if request.row is None:
            raise HalError(f"hal demo: preempt: request {request.number} is not running")
        request.host_slots = self.cache.move_out(request.row, request.cached)
        self.cache.close(request.row, request.cached)
        request.row = None
        self._note(request, "dropped" if request.host_slots is None else "to the host", request.cached)
        if request.host_slots is None:
            request.cached = 0

    # --- who runs -----------------------------------------------------------------------------------

    def _schedule(self) -> list[Request]:
        """By rank, those that have slots for all their tokens after this."""
        batch: list[Request] = []
        going_on: list[Request] = []
        promised, blocked = 0, False
        for r in sorted(self.live, key=lambda r: r.rank):
            if r.row is None:
                # Who waits longest is next, however small those behind it are.
                blocked = blocked or not self._admit(r, promised)
                if not blocked:
                    batch.append(r)
                continue
            need = self.cache.pages(r.cached + 1) - self.cache.pages(r.cached)
            while need > self.cache.free_pages - promised and self._take_below(r):
                pass
            if need <= self.cache.free_pages - promised:
                promised += need
                going_on.append(r)
        if going_on:
            rows = [r.row for r in going_on if r.row is not None]
            self.cache.append(rows, [r.cached for r in going_on])
        return going_on + batch

    def _admit(self, r: Request, promised: int) -> bool:
        """Gives a waiting request a row and slots, and its keys and values back; False if there is no room."""
        cache = self.cache
        while True:
            # Anew each time: whom we pre-empt may have been the last to hold a page of this prefix.
            shared = cache.match(r.tokens)
            if cache.rows and cache.pages(len(r.tokens)) - len(shared) <= cache.free_pages - promised:
                break
            if not self._take_below(r):
                return False
        have = len(shared) * cache.page_size
        r.row = cache.open(shared)
        cache.extend([r.row], [have], [len(r.tokens)])
        if r.host_slots is not None:
            cache.move_in(r.row, r.host_slots, have)
            self._note(r, "back", r.cached - have)
            r.host_slots = None
        else:
            r.cached = have
            self._note(r, "back" if r.started else "started", have if not r.started else 0)
        r.started = True
        cache.publish(r.row, r.tokens)
        return True

    def _take_below(self, r: Request) -> bool:
        """Pre-empts the lowest of those that run, if it is below r."""
        running = [other for other in self.live if other.row is not None]
        lowest = max(running, key=lambda other: other.rank, default=r)
        if lowest.rank <= r.rank:
            return False
        self.preempt(lowest)
        return True

    def _finish(self, r: Request) -> None:
        assert r.row is not None
        self.cache.close(r.row, r.cached)
        r.row, r.done = None, True
        self.live.remove(r)
        self._note(r, "done", len(r.output))

    def _note(self, r: Request, what: str, tokens: int) -> None:
        self.events.append(Event(self.steps, r, what, tokens))
