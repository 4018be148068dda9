"""Fixtures of the registry's tests."""

from __future__ import annotations

import pytest
from plugins import constant

import hal


@pytest.fixture
def five(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends b1 ... b5, whose get_last_loc is their number; no other plugin."""
    monkeypatch.setenv("HAL_PLUGINS", "none")
    for i in range(1, 6):
        hal.register("get_last_loc", backend=f"b{i}")(constant(i))
