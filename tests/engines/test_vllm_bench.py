"""`hal bench attention`: both compute the same, and both are timed."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here")

from hal.bench import cpu_vllm


def test_both_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cpu_vllm.main(as_json=True, quick=True) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["bs"], row["new"], row["tokens"]) for row in rows] == [(1, 1, 128), (1, 128, 128)]
    for row in rows:
        assert set(row["wall_us"]) == {"hal", "vllm"}


def test_other_outputs_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_vllm, "NEAR", dict.fromkeys(cpu_vllm.NEAR, -1.0))
    with pytest.raises(AssertionError, match=r"outputs are .* apart"):
        cpu_vllm.vllm_attention(quick=True)
