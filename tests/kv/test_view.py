"""A cache's view against the addresses that indexing gives."""

from __future__ import annotations

import pytest
import torch

from hal.kv import view

FLAT = torch.zeros(12, 2, 8, dtype=torch.uint8)
PAGED = torch.zeros(3, 4, 2, 8, dtype=torch.uint8)
INTERLEAVED = torch.zeros(3, 2, 4, 2, 8, dtype=torch.uint8)[:, 0]
HEADS_FIRST = torch.zeros(3, 2, 4, 8, dtype=torch.uint8).transpose(1, 2)
JOINT = torch.zeros(12, 8, dtype=torch.uint8)
JOINT_PAGED = torch.zeros(3, 2, 4, 8, dtype=torch.uint8)[:, 1]


@pytest.mark.parametrize(
    ("cache", "row_dims", "fused"),
    [
        (FLAT, 2, True),
        (PAGED, 2, True),
        (INTERLEAVED, 2, False),
        (HEADS_FIRST, 2, False),
        (PAGED[:, :1], 2, True),
        (JOINT, 1, True),
        (JOINT_PAGED, 1, False),
    ],
)
def test_every_slot_is_where_indexing_finds_it(cache: torch.Tensor, row_dims: int, fused: bool) -> None:
    slots, page = view.count_slots(cache, row_dims), view.page_size(cache, row_dims)
    assert slots == cache.shape[: cache.ndim - row_dims].numel()
    for size, (far, near, head) in ((page, view.strides(cache, row_dims)), view.fuse_pages(cache, row_dims)):
        for slot in range(slots):
            row = cache[slot // page, slot % page] if cache.ndim > row_dims + 1 else cache[slot]
            at = cache.storage_offset() + slot // size * far + slot % size * near
            assert at == row.storage_offset()
            if row_dims == 2:
                assert at + head == row[1].storage_offset()
    assert (view.fuse_pages(cache, row_dims)[0] == 1) == (fused or page == 1)


def test_two_caches_are_fused_together_or_not_at_all() -> None:
    assert view.fuse_pages_of_both(PAGED, PAGED) == (1, (16, 0, 8), (16, 0, 8))
    assert view.fuse_pages_of_both(PAGED, INTERLEAVED) == (4, (64, 16, 8), (128, 16, 8))


def test_copy_unit() -> None:
    assert [view.copy_unit(s) for s in ((64, 0), (24, 16), (24, 3), ())] == [16, 8, 1, 16]
