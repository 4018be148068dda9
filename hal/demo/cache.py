"""`PagedCache`: where each request's keys and values lie. All bookkeeping of slots is here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from hal.demo.meter import Meter
from hal.kvpool import KVPool, SlotAllocator

Prefix = tuple[int, tuple[int, ...]]
"""The page before (-1: none) and a page's own tokens: with that, all tokens up to the page's end."""


class PagedCache:
    """The KV pool of all layers, its host pool, and `req_to_token`, the table that says whose slots are whose.

    A full page is shared by all requests whose tokens up to its end are the same, from the moment it is
    given out until the last of them lets go of it. Only a request's last page can be open, and an open page
    is never shared, so nobody writes where another reads.

    Args:
        ops: the ops, counted.
        layers: of the model.
        kv_heads: likewise.
        head_dim: likewise.
        slots: capacity in tokens, a multiple of `page_size`.
        host_slots: capacity of the host pool, likewise.
        requests: rows of the table: requests that hold slots at one time.
        length: columns of the table: tokens of the longest request.
        page_size: tokens in a page, any size.
        dtype: of the keys and values.
        device: where they lie.
    """

    def __init__(
        self,
        ops: Meter,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        slots: int,
        host_slots: int,
        requests: int,
        length: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def half() -> list[Tensor]:
            return [torch.zeros(slots, kv_heads, head_dim, dtype=dtype, device=device) for _ in range(layers)]

        self.ops, self.page_size, self.device = ops, page_size, device
        self.pool = KVPool(half(), half(), layout="layer_first", page_size=page_size)
        self.host = KVPool.host_like(self.pool, host_slots, layout="page_first")
        self.free = SlotAllocator(slots, page_size)
        self.host_free = SlotAllocator(host_slots, page_size)
        self.req_to_token = torch.full((requests, length), -1, dtype=torch.int32, device=device)
        self.rows = list(range(requests))[::-1]
        self._holders: Counter[int] = Counter()
        self._page_of: dict[Prefix, int] = {}
        self._prefix_of: dict[int, Prefix] = {}

    @property
    def free_pages(self) -> int:
        return self.free.available // self.page_size

    def pages(self, tokens: int) -> int:
        """How many pages that many tokens need."""
        return -(-tokens // self.page_size)

    # --- a request's life: match, open, extend (again and again), close ------------------------------

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The pages that others hold already of these tokens' beginning.

        The last token is never among them: it must be computed, or there are no logits to go on from.
        """
        pages: list[int] = []
        for start in range(0, len(tokens) - self.page_size, self.page_size):
            page = self._page_of.get(self._prefix(pages, tokens, start))
            if page is None:
                break
            pages.append(page)
        return pages

    def open(self, shared: Sequence[int]) -> int:
        """A row of the table that begins with the pages that `match` found."""
        row = self.rows.pop()
        self._holders.update(shared)
        for i, page in enumerate(shared):
            first, at = page * self.page_size, i * self.page_size
            self.req_to_token[row, at : at + self.page_size] = torch.arange(first, first + self.page_size)
        return row

    def extend(self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> None:
        """Gives each row slots for the tokens ``starts[i]:ends[i]``: the rest of its open page, then new pages."""
        last = self.ops.get_last_loc(self.req_to_token, self._index(rows), self._index(starts)).tolist()
        for row, loc, start, end in zip(rows, last, starts, ends, strict=True):
            rest = min(-(loc + 1) % self.page_size, end - start)
            fresh = self.free.alloc(end - start - rest)
            self._holders.update((fresh[:: self.page_size] // self.page_size).tolist())
            slots = torch.cat([torch.arange(loc + 1, loc + 1 + rest), fresh])
            self.req_to_token[row, start:end] = slots.to(self.device, torch.int32)

    def publish(self, row: int, tokens: Sequence[int]) -> None:
        """Lets others share the full pages of these tokens, which the row has slots for.

        Before they are computed: whoever shares them runs in the same forward pass or a later one, and
        there every layer writes all keys and values before anyone attends to them.
        """
        slots = self.slots([row], [0], [len(tokens)]).tolist()
        pages: list[int] = []
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            prefix, page = self._prefix(pages, tokens, start), slots[start] // self.page_size
            if self._page_of.setdefault(prefix, page) != page:
                # Another's page has these tokens. Ours must not follow it in the chain: we don't hold it,
                # and once it is let go and holds other tokens, ours would be found behind those.
                break
            self._prefix_of[page] = prefix
            pages.append(page)

    def close(self, row: int, length: int) -> None:
        """Takes back a row that has slots for `length` tokens, and the pages that nobody else holds."""
        slots = self.slots([row], [0], [length])[:: self.page_size].tolist()
        pages = [slot // self.page_size for slot in slots]
        self._holders.subtract(pages)
        let_go = [page for page in pages if not self._holders[page]]
        for page in let_go:
            del self._holders[page]
            if page in self._prefix_of:
                del self._page_of[self._prefix_of.pop(page)]
        self.free.free(torch.tensor(let_go, dtype=torch.int64) * self.page_size)
        self.req_to_token[row] = -1
        self.rows.append(row)

    def _prefix(self, before: Sequence[int], tokens: Sequence[int], start: int) -> Prefix:
        return (before[-1] if before else -1, tuple(tokens[start : start + self.page_size]))

    # --- what a forward pass needs ------------------------------------------------------------------

    def slots(self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Tensor:
        """The slots of the tokens ``starts[i]:ends[i]`` of each row, one row after the other; int64."""
        out = torch.empty(sum(ends) - sum(starts), dtype=torch.int64, device=self.device)
        args = (self._index(rows), self._index(starts), self._index(ends))
        packed: Tensor = self.ops.assign_extend_cache_locs(self.req_to_token, *args, out)
        return packed

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    # --- to the host and back -----------------------------------------------------------------------

    def move_out(self, row: int, length: int) -> Tensor | None:
        """Copies a row's first `length` tokens to the host pool; the host slots, or None where it is full."""
        if self.pages(length) * self.page_size > self.host_free.available:
            return None
        host_slots = self.host_free.alloc(length)
        self.ops.kv_transfer(self.pool, self.host, self.slots([row], [0], [length]).cpu(), host_slots)
        return host_slots

    def move_in(self, row: int, host_slots: Tensor, have: int) -> None:
        """Copies back what `move_out` took, but for the first `have` tokens, which the row shares."""
        slots = self.slots([row], [have], [len(host_slots)]).cpu()
        self.ops.kv_transfer(self.host, self.pool, host_slots[have:], slots)
        self.host_free.free(host_slots)
