"""Paged allocation as an engine does it, for thousands of random steps: no slot handed out twice, none lost.

The model knows pages as sets of numbers alone; slots come from the ops, through the table of requests.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import hal

ROWS, WIDTH = 8, 96


class Engine(RuleBasedStateMachine):
    """The bookkeeping of an engine around `alloc_extend` and `alloc_decode`."""

    backend = "reference"

    @initialize(
        page=st.sampled_from([1, 2, 3, 5, 16]), pages=st.integers(1, 40), wide=st.booleans(), seed=st.integers(0, 9)
    )
    def start(self, page: int, pages: int, wide: bool, seed: int) -> None:
        self.page, self.pages = page, pages
        self.dtype = torch.int64 if wide else torch.int32
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
        self.free = order.to(self.dtype)
        self.table = torch.full((ROWS, WIDTH), -1, dtype=torch.int32)
        self.lens: dict[int, int] = {}
        self.slots: dict[int, list[int]] = {}

    def op(self, name: str, *args: Any) -> Any:
        return getattr(hal, name)(*args, backend=self.backend)

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=self.dtype)

    def grow(self, wanted: dict[int, int], decode: bool = False) -> None:
        """Every request of `wanted` gets so many more tokens, or, where pages are too few, none does."""
        rows = list(wanted)
        prefix = [self.lens.get(r, 0) for r in rows]
        seq = [p + wanted[r] for p, r in zip(prefix, rows, strict=True)]
        rows_t, prefix_t, seq_t = self.ints(rows), self.ints(prefix), self.ints(seq)
        last = self.op("get_last_loc", self.table, rows_t, prefix_t)
        out = torch.full((sum(wanted.values()),), -7, dtype=self.dtype)
        if decode:
            total = self.op("alloc_decode", seq_t, last, self.free, self.page, out)
        else:
            total = self.op("alloc_extend", prefix_t, seq_t, last, self.free, self.page, out)
        needed = int(total)
        assert needed == hal.num_new_pages(prefix, seq, self.page)
        if needed > len(self.free):
            assert -1 in out
            return
        self.op("write_req_to_token", self.table, rows_t, prefix_t, seq_t, out)
        self.free = self.free[needed:]
        at = 0
        for r, p, s in zip(rows, prefix, seq, strict=True):
            self.slots.setdefault(r, []).extend(out[at : at + s - p].tolist())
            self.lens[r] = s
            at += s - p
        back = torch.empty_like(out)
        assert self.op("assign_extend_cache_locs", self.table, rows_t, prefix_t, seq_t, back).equal(out)
        places = torch.empty_like(out)
        self.op("compute_positions", prefix_t, seq_t, places)
        assert places.tolist() == [x for p, s in zip(prefix, seq, strict=True) for x in range(p, s)]

    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, ROWS - 1), unique=True, max_size=ROWS))
        room = {r: WIDTH - self.lens.get(r, 0) for r in rows}
        self.grow({r: data.draw(st.integers(0, min(20, room[r]))) for r in rows})

    @precondition(lambda self: self.lens)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.lens)), unique=True))
        self.grow({r: 1 for r in rows if self.lens[r] < WIDTH}, decode=True)

    @precondition(lambda self: self.lens)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.give_back(data.draw(st.sampled_from(sorted(self.lens))))

    @precondition(lambda self: self.lens)
    @rule(data=st.data())
    def preempt_and_come_back(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.lens)))
        tokens = self.lens[row]
        self.give_back(row)
        self.grow({row: tokens})

    def give_back(self, row: int) -> None:
        tokens = self.lens.pop(row)
        slots = self.slots.pop(row)
        listed = torch.full((1, -(-WIDTH // self.page)), -7, dtype=torch.int32)
        self.op("build_page_table", self.table, self.ints([row]), self.ints([tokens]), self.page, listed)
        pages = [p for p in listed[0].tolist() if p >= 0]
        assert pages == list(dict.fromkeys(s // self.page for s in slots))
        self.free = torch.cat([self.free, self.ints(pages)])

    @invariant()
    def no_slot_twice_and_none_lost(self) -> None:
        if not hasattr(self, "free"):
            return
        owned = []
        for row, slots in self.slots.items():
            assert self.table[row, : self.lens[row]].tolist() == slots
            pages = list(dict.fromkeys(s // self.page for s in slots))
            assert len(pages) == -(-len(slots) // self.page)
            assert all(s % self.page == i % self.page for i, s in enumerate(slots))
            owned += pages
        assert sorted(owned + self.free.tolist()) == list(range(self.pages))

    @invariant()
    def what_attention_reads_is_what_was_handed_out(self) -> None:
        if not getattr(self, "lens", None):
            return
        rows = sorted(self.lens)
        out = torch.full((sum(self.lens.values()) + 3,), -7, dtype=torch.int32)
        indptr = torch.empty(len(rows) + 1, dtype=torch.int32)
        self.op("build_kv_indices", self.table, self.ints(rows), self.ints([self.lens[r] for r in rows]), indptr, out)
        assert out.tolist() == [s for r in rows for s in self.slots[r]] + [-7] * 3


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_no_slot_is_handed_out_twice_and_none_is_lost(backend: str) -> None:
    machine = type("Machine", (Engine,), {"backend": backend})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60 if os.environ.get("CI_ALL") else 20,
            stateful_step_count=50,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
