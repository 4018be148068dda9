"""Tests of the lowered lane run in it (``ci/ascend``: HAL_LANE=lowered, the venv of ``ci/engines-ascend.txt``).

Elsewhere those marked ``anywhere`` run, and the others are skipped, with the reason.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hal.lowered import missing


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "anywhere: needs none of the Ascend tools")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = "HAL_LANE is not lowered" if os.environ.get("HAL_LANE") != "lowered" else missing()
    here = Path(__file__).parent
    for item in items:
        if why and here in item.path.parents and item.get_closest_marker("anywhere") is None:
            item.add_marker(pytest.mark.skip(reason=f"not the lowered lane: {why}"))
