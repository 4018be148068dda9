"""The slot planner: its copies, done one by one with memmove, are the transfer; and they are as few as can be."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from hal._remote.target import DirectTarget
from hal.conformance.execute import execute
from hal.kv import plan as kvplan
from hal.kv.pool import KVPool
from hal.ops import get_spec
from hal.ops.spec import Sample

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


@pytest.mark.parametrize("sort", [None, "src", "dst"])
@pytest.mark.parametrize("sample", get_spec("kv_transfer").samples, ids=lambda s: s.name)
def test_its_copies_are_the_transfer(sample: Sample, sort: str | None) -> None:
    def by_hand(**a: Any) -> None:
        x, y = kvplan.pairs(a["src"], a["dst"], a["src_slots"], a["dst_slots"], sort)
        plan = kvplan.copies(a["src"], a["dst"], x, y, a["layers"])
        for src, dst, size in zip(plan.src.tolist(), plan.dst.tolist(), plan.sizes.tolist(), strict=True):
            ctypes.memmove(dst, src, size)

    spec = get_spec("kv_transfer")
    execute(spec, spec.make(**sample.params), DirectTarget.of("kv_transfer", by_hand))


def _pool(layout: str, slots: int = 64, page: int = 16, layers: int = 3, heads: int = 2, dim: int = 8) -> KVPool:
    pages = slots // page
    shape = {
        "layer_first": (layers, slots, heads, dim),
        "page_first": (slots, layers, heads, dim),
        "page_first_direct": (pages, layers, page, heads, dim),
        "page_head": (pages, heads, page, layers, dim),
    }[layout]
    return KVPool(torch.zeros(shape), None, layout=layout, page_size=page)


# 32 consecutive slots from a page's start: (source, destination) -> copies.
FEWEST = {
    ("page_first", "page_first"): 1,  # all is one block
    ("layer_first", "layer_first"): 3,  # a block a layer
    ("page_first_direct", "page_first_direct"): 1,  # whole pages, side by side
    ("page_head", "page_head"): 1,
    ("layer_first", "page_first_direct"): 6,  # a page of a layer
    ("layer_first", "page_first"): 96,  # a token of a layer
}


@pytest.mark.parametrize(("src", "dst"), FEWEST)
def test_as_few_as_can_be(src: str, dst: str) -> None:
    a, b = _pool(src), _pool(dst)
    plan = kvplan.copies(a, b, torch.arange(16, 48), torch.arange(32))
    assert len(plan.sizes) == FEWEST[src, dst]
    assert plan.bytes == 32 * 3 * 2 * 8 * 4


def test_a_range_of_layers_is_no_whole_page() -> None:
    a, b = _pool("page_first_direct"), _pool("page_first_direct")
    plan = kvplan.copies(a, b, torch.arange(16), torch.arange(16), range(2))
    assert plan.sizes.tolist() == [2 * 16 * 2 * 8 * 4]
    plan = kvplan.copies(a, b, torch.arange(8), torch.arange(8), range(2))
    assert plan.sizes.tolist() == [8 * 2 * 8 * 4] * 2


def test_runs_of_one_side_and_of_both() -> None:
    flat, paged = _pool("page_first"), _pool("page_first_direct")
    a = torch.arange(10, 30)
    assert kvplan.runs((a, flat)).tolist() == [[0, 20]]
    assert kvplan.runs((a, paged)).tolist() == [[0, 6], [6, 14]]
    b = torch.cat([torch.arange(0, 7), torch.arange(8, 21)])
    assert kvplan.runs((a, flat), (b, flat)).tolist() == [[0, 7], [7, 13]]
    assert kvplan.runs((a, paged), (b, flat)).tolist() == [[0, 6], [6, 1], [7, 13]]
    assert kvplan.runs((a[:0], flat)).shape == (0, 2)


def test_pairs_drops_what_is_skipped_and_sorts() -> None:
    src, dst = _pool("page_first"), _pool("page_first", slots=32)
    a = torch.tensor([5, -1, 63, 64, 3, 2**31 - 1, 2], dtype=torch.int32)
    b = torch.tensor([9, 1, 31, 0, 32, 1, 8], dtype=torch.int64)
    x, y = kvplan.pairs(src, dst, a, b)
    assert (x.tolist(), y.tolist()) == ([5, 63, 2], [9, 31, 8])
    assert x.dtype == y.dtype == torch.int64
    x, y = kvplan.pairs(src, dst, a, b, sort="dst")
    assert (x.tolist(), y.tolist()) == ([2, 5, 63], [8, 9, 31])
