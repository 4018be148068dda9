"""The tables of block tables, without their clocks: every implementation is right, ours, the peers' and the variant."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("triton")

from hal.bench import block_table, cuda

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU; a call instead of a clock."""

    def called(calls: cuda.Calls, sets: int, *_: Any, **__: Any) -> dict[str, float]:
        for call in calls.values():
            call(sets - 1)
        return {name: 2.0 + i for i, name in enumerate(calls)}

    for name, value in {"DEVICE": "cpu", "HEADS": (2, 1, 16), "POOL": 64, "CACHED": 0}.items():
        monkeypatch.setattr(block_table, name, value)
    for name in ("PER_SM", "FEW"):
        monkeypatch.setattr(block_table.by_slots, name, 1)
    monkeypatch.setattr(cuda, "device_us", called)
    monkeypatch.setattr(cuda, "host_us", called)


def test_listing() -> None:
    rows = block_table.expand((1, 5), (40,))
    assert [r["bs"] for r in rows] == [1, 5]
    assert all(len(r["device_us"]) == 3 for r in rows)


@pytest.mark.parametrize(("bs", "keys"), [(1, 300), (3, 20)])
def test_decode_by_block_table(bs: int, keys: int) -> None:
    """Judged by decode_attention itself: one part and several, few requests and many."""
    (row,) = block_table.decode((bs,), (keys,))
    assert row["step_us"] == {
        "slots": 32 * 3.0 + 2.0, "blocks, page": 32 * 4.0, "blocks, lane": 32 * 5.0
    }  # fmt: skip


def test_a_wrong_variant_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    good = block_table.decode_by_blocks
    monkeypatch.setattr(
        block_table,
        "decode_by_blocks",
        lambda *a, **kw: good(*a, **kw).roll(1, 0) if kw["by_page"] else good(*a, **kw),
    )
    with pytest.raises(AssertionError, match="blocks, page"):
        block_table.decode((2,), (20,))
