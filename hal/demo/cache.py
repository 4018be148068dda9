"""`PagedCache`: where each request's keys and values lie. All bookkeeping of slots is here, by hal's ops.

What is a number of tokens or pages is known on the host; which slots they are is known on the device alone,
in `req_to_token` and the list of free pages, and no step waits to hear of it. Only the pages that requests may share
are known on both sides: the host must compare their tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import hal
from hal.demo.model import Batch
from hal.kv.allocator import SlotAllocator
from hal.kv.pool import KVPool

Prefix = tuple[int, tuple[int, ...]]
"""The page before (-1: none) and a page's own tokens: with that, all tokens up to the page's end."""


class PagedCache:
    """The KV pool of all layers, its host pool, and `req_to_token`, the table that says whose slots are whose.

    The full pages of a prompt are shared by all requests whose tokens up to their end are the same, from the moment
    they are given out until the last of them lets go. Only a request's last page can be open, and an open page
    is never shared, so nobody writes where another reads.

    Args:
        ops: hal's ops as attributes: `hal` itself, what `hal.bind` gives, or a `Meter`.
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
        share: False: every request computes its whole prompt.
    """

    def __init__(
        self,
        ops: Any,
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
        share: bool = True,
    ) -> None:
        def half() -> list[Tensor]:
            return [torch.zeros(slots, kv_heads, head_dim, dtype=dtype, device=device) for _ in range(layers)]

        self.ops, self.page_size, self.device, self.share = ops, page_size, device, share
        self.pool = KVPool(half(), half(), layout="layer_first", page_size=page_size)
        self.host = KVPool.host_like(self.pool, host_slots, layout="page_first")
        self.host_free = SlotAllocator(host_slots, page_size)
        self.free = torch.arange(slots // page_size, dtype=torch.int32, device=device)
        self.req_to_token = torch.full((requests, length), -1, dtype=torch.int32, device=device)
        self.rows = list(range(requests))[::-1]
        self._shared: dict[int, list[int]] = {}
        self._holders: Counter[int] = Counter()
        self._page_of: dict[Prefix, int] = {}
        self._prefix_of: dict[int, Prefix] = {}

    @property
    def free_pages(self) -> int:
        return len(self.free)

    def pages(self, tokens: int) -> int:
        """How many pages that many tokens need."""
        return -(-tokens // self.page_size)

    # --- a request's life: match, open, extend or append (again and again), close --------------------

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The pages that others hold already of these tokens' beginning.

        The last token is never among them: it must be computed, or there are no logits to go on from.
        """
        pages: list[int] = []
        for start in range(0, len(tokens) - self.page_size if self.share else 0, self.page_size):
            page = self._page_of.get(self._prefix(pages, tokens, start))
            if page is None:
                break
            pages.append(page)
        return pages

    def open(self, shared: Sequence[int]) -> int:
        """A row of the table that begins with the pages that `match` found."""
        row = self.rows.pop()
        self._shared[row] = list(shared)
        self._holders.update(shared)
        if shared:
            first = self.index(shared).view(-1, 1) * self.page_size
            slots = (first + torch.arange(self.page_size, dtype=torch.int32, device=self.device)).view(-1)
            self.ops.write_req_to_token(self.req_to_token, *self.index([row], [0], [len(slots)]), slots)
        return row

    def extend(self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> None:
        """Gives each row slots for the tokens ``starts[i]:ends[i]``: the rest of its open page, then new pages."""
        at, start, end = self.index(rows, starts, ends)
        last = self.ops.get_last_loc(self.req_to_token, at, start)
        out = torch.empty(sum(ends) - sum(starts), dtype=torch.int32, device=self.device)
        self.ops.alloc_extend(start, end, last, self.free, self.page_size, out)
        self._note(at, start, end, out, hal.num_new_pages(starts, ends, self.page_size))

    def append(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Gives each row a slot for the token after its first ``lengths[i]``."""
        ends = [n + 1 for n in lengths]
        at, start, end = self.index(rows, lengths, ends)
        last = self.ops.get_last_loc(self.req_to_token, at, start)
        out = torch.empty(len(rows), dtype=torch.int32, device=self.device)
        self.ops.alloc_decode(end, last, self.free, self.page_size, out)
        self._note(at, start, end, out, hal.num_new_pages(lengths, ends, self.page_size))

    def _note(self, at: Tensor, start: Tensor, end: Tensor, slots: Tensor, taken: int) -> None:
        self.ops.write_req_to_token(self.req_to_token, at, start, end, slots)
        self.free = self.free[taken:]

    def publish(self, row: int, tokens: Sequence[int]) -> None:
        """Lets others share the full pages of these tokens, which the row has slots for.

        Before they are computed: whoever shares them runs in the same forward pass or a later one, and
        there every layer writes all keys and values before anyone attends to them.
        """
        pages, full = self._shared[row], len(tokens) // self.page_size
        if not self.share or len(pages) == full:
            return
        table = self._page_table(row, len(tokens)).tolist()
        for i in range(len(pages), full):
            prefix, page = self._prefix(pages, tokens, i * self.page_size), table[i]
            if self._page_of.setdefault(prefix, page) != page:
                # Another's page has these tokens. Ours must not follow it in the chain: we don't hold it,
                # and once it is let go and holds other tokens, ours would be found behind those.
                break
            self._prefix_of[page] = prefix
            self._holders[page] = 1
            pages.append(page)

    def close(self, row: int, length: int) -> None:
        """Takes back a row that has slots for `length` tokens, and the pages that nobody else holds."""
        shared = self._shared.pop(row)
        self._holders.subtract(shared)
        let_go = [page for page in shared if not self._holders[page]]
        for page in let_go:
            del self._holders[page]
            del self._page_of[self._prefix_of.pop(page)]
        own = self._page_table(row, length)[len(shared) :]
        self.free = torch.cat([self.free, self.index(let_go), own])
        self.req_to_token[row] = -1
        self.rows.append(row)

    def _page_table(self, row: int, length: int) -> Tensor:
        at, lengths = self.index([row], [length])
        out = torch.empty(1, self.pages(length), dtype=torch.int32, device=self.device)
        self.ops.build_page_table(self.req_to_token, at, lengths, self.page_size, out)
        return out[0]

    def _prefix(self, before: Sequence[int], tokens: Sequence[int], start: int) -> Prefix:
        return (before[-1] if before else -1, tuple(tokens[start : start + self.page_size]))

    def index(self, *lists: Sequence[int]) -> Tensor:
        """Ints on the device, int32: ``[n]``, or ``[lists, n]`` for several of one length, in one copy."""
        values = lists[0] if len(lists) == 1 else lists
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    # --- what a forward pass needs ------------------------------------------------------------------

    def fill(
        self, batch: Batch, tokens: Sequence[int], rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> Batch:
        """Makes `batch` that of the tokens ``starts[i]:ends[i]`` of each row; what is too many in it, padding."""
        batch.tokens.copy_(self.index(tokens))
        at, start, end = self.index(rows, starts, ends)
        self.ops.compute_positions(start, end, batch.positions, batch.qo_indptr)
        self.ops.assign_extend_cache_locs(self.req_to_token, at, start, end, batch.slots)
        self.ops.build_kv_indices(self.req_to_token, at, end, batch.kv_indptr, batch.kv_indices)
        return batch

    # --- to the host and back -----------------------------------------------------------------------

    def slots(self, row: int, start: int, end: int) -> Tensor:
        """The slots of a row's tokens ``start:end``, on the CPU, which lets `kv_transfer` coalesce runs of them."""
        out = torch.empty(end - start, dtype=torch.int64, device=self.device)
        self.ops.assign_extend_cache_locs(self.req_to_token, *self.index([row], [start], [end]), out)
        return out.cpu()

    def move_out(self, row: int, length: int) -> Tensor | None:
        """Copies a row's first `length` tokens to the host pool; the host slots, or None where it is full."""
        if self.pages(length) * self.page_size > self.host_free.available:
            return None
        host_slots = self.host_free.alloc(length)
        self.ops.kv_transfer(self.pool, self.host, self.slots(row, 0, length), host_slots)
        return host_slots

    def move_in(self, row: int, host_slots: Tensor, have: int) -> None:
        """Copies back what `move_out` took, but for the first `have` tokens, which the row shares."""
        slots = self.slots(row, have, len(host_slots))
        self.ops.kv_transfer(self.host, self.pool, host_slots[have:], slots)
        self.host_free.free(host_slots)
