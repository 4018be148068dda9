"""Plans by metadata, in the order of a launcher: look up, make, remember."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hal.backends.cuda._cache import Plans
from hal.kv.pool import KVPool
from hal.triton import launch


def test_plans_are_forgotten_when_there_are_too_many() -> None:
    plans: Plans[Any] = Plans(limit=2)
    for i in range(2):
        plans[(i,)] = i
    assert plans == {(0,): 0, (1,): 1}
    plans[(2,)] = 2
    assert plans == {(2,): 2}
    launch.forget()
    assert not plans


def test_a_pool_s_plans_go_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for pools that are gone would be as many tables as there were pools."""
    from hal.backends.cuda import _copy, kv_move

    def pool() -> KVPool:
        return KVPool(torch.zeros(2, 8, 1, 16, device="cpu"), torch.zeros(2, 8, 1, 16, device="cpu"))

    monkeypatch.setattr(_copy, "_plans", Plans())
    monkeypatch.setattr(kv_move, "_plans", Plans())
    kept = pool()
    for _ in range(3):
        other = pool()
        _copy.plan(kept.planes(), other.planes(), 1, 1, torch.device("cpu"))
        kv_move._plan(other, 16)
        assert kv_move._plan(other, 16) is kv_move._plan(other, 16)
        del other
        gc.collect()
        assert not _copy._plans
        assert not kv_move._plans
    kv_move._plan(kept, 16)
    assert len(kv_move._plans) == 1
