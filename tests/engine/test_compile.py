"""The Triton kernels of the ops beyond the core, compiled for every generation of GPU; nothing may spill."""

from __future__ import annotations

import os

import pytest
from engine.cases import OPS

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled when interpreted")


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("op", OPS)
def test_compiles_without_spills(op: str, arch: int) -> None:
    from hal.backends.cuda import inspect

    rows = list(inspect.op(op, arch=arch))
    assert rows
    for row in rows:
        assert row.spills == 0, row
