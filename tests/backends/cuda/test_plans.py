"""Plans by metadata, in the order of a launcher: look up, make, remember."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from hal.backends.cuda._cache import Plans
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
