"""`list_keys` and `runs`: well-formed whatever the listing is."""

from __future__ import annotations

import doctest

import torch

from hal.kv import paging
from hal.kv.paging import list_keys, runs


def test_its_examples_run() -> None:
    failed, tried = doctest.testmod(paging)
    assert tried > failed == 0


def test_runs_are_requests_where_all_keys_are_there() -> None:
    """No run more than needed: a request is one, but where its listing has holes among its queries' own keys."""
    qo, kv = torch.tensor([0, 3, 3, 5]), torch.tensor([0, 5, 9, 11])
    slots = torch.arange(11)
    got = runs(qo, kv, slots, 5, 11)
    assert (got.rows, got.keys.lengths, got.window, got.owned) == ([0, 3, 5], [5, 2], -1, None)
    assert got.keys.slots.tolist() == [0, 1, 2, 3, 4, 9, 10]
    assert got.seen.tolist() == [3, 4, 5, 1, 2]
    assert runs(qo, kv, slots, 5, 11, sliding_window=1).window == 1
    early, late = slots.clone(), slots.clone()
    early[0], late[3] = -1, -1
    assert runs(qo, kv, early, 5, 11).rows == [0, 3, 5]
    got = runs(qo, kv, late, 5, 11)
    assert (got.rows, got.keys.lengths) == ([0, 1, 3, 5], [3, 4, 2])
    assert got.seen.tolist() == [3, 3, 4, 1, 2]
    got = runs(qo, kv, late, 5, 11, sliding_window=1)
    assert (got.rows, got.window, got.keys.slots.tolist()) == ([0, 1, 2, 3, 4, 5], -1, [1, 2, 2, 4, 9, 9, 10])


def test_list_keys_is_well_formed_whatever_it_gets() -> None:
    """Offsets that overlap, slots that are none, a window that counts them."""
    indices = torch.tensor([5, -1, 7, 99, 2, 2**40, 3])
    got = list_keys(torch.tensor([0, 5, 2, 7]), indices, 10)
    assert got.lengths == [3, 0, 3]
    assert got.slots.tolist() == [5, 7, 2, 7, 2, 3]
    assert got.begin.tolist() == [0, 3, 3]
    assert got.rows(4)[0].tolist() == [[5, 7, 2, 0], [0, 0, 0, 0], [7, 2, 3, 0]]
    assert list_keys(torch.tensor([-(2**62), 2**62]), indices, 10).lengths == [4]
    assert list_keys(torch.tensor([0, 4]), indices, 10, sliding_window=1).slots.tolist() == [7]
    assert list_keys(torch.tensor([0]), indices[:0], 0).lengths == []
