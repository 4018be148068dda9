"""Fixtures of the project's own tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """In a lane whose outcomes are committed some tests stand for all: ``ci/proven.py``."""
    if group := os.environ.pop("CI_PROVEN", ""):
        from proven import Proven

        config.pluginmanager.register(Proven(group))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """hal as in a process that has just started, in an environment without HAL_*; as it was, afterwards."""
    from plugins import Snapshot

    before = Snapshot(monkeypatch)
    yield
    before.restore(tmp_path)


@pytest.fixture
def plugins(fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """A folder for stand-in plugins, on ``sys.path``."""
    from plugins import Plugins

    monkeypatch.syspath_prepend(str(tmp_path))
    return Plugins(tmp_path)
