"""The Triton kernels of the ops beyond the core, compiled for every generation of GPU; nothing may spill."""

from __future__ import annotations

import os

import pytest
from engine.cases import OPS

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted")


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(
    ("op", "only"),
    [
        *((op, "one") for op in OPS),
        ("kv_write", "fp16-scale"),
        ("kv_write", "fp32-scale"),
        ("mla_kv_write", "deepseek-paged"),
        ("mla_rope_kv_write", "deepseek-v3"),
        ("mla_rope_kv_write", "fp32-scale"),
        ("qk_norm_rope_kv_write", "qwen3-0.6b"),
        ("qk_norm_rope_kv_write", "fp32-scale"),
        ("kv_move", "mla-page_first_direct"),
    ],
)
def test_compiles_without_spills(op: str, only: str, arch: int) -> None:
    from hal.backends.cuda import inspect

    if "scale" in only and arch < 90:
        pytest.skip("no conversion to fp8")
    rows = list(inspect.op(op, arch=arch, only=only))
    assert rows
    for row in rows:
        assert row.spills == 0, row
