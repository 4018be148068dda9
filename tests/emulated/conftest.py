"""These tests want the emulated torch_npu in place of a real one: ``ci/ascend`` puts its folder on the path."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

npu = getattr(torch, "npu", None)
if not getattr(npu, "emulated", False):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """npu:0 and its default stream are current, and nothing is left to do."""
    yield
    for device in range(npu.device_count()):
        npu.synchronize(device)
        npu.set_stream(npu.default_stream(device))
    npu.set_device(0)
