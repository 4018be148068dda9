"""`hal bench engine sglang`, without SGLang: what its time box cuts off, and a step with drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hal.bench import sglang


class Engine:
    """Answers at once; starting took `start` seconds of `clock`, a call takes 30 and 1 for each new token."""

    def __init__(self, clock: list[float], start: float) -> None:
        self.clock = clock
        clock[0] += start

    def get_server_info(self) -> dict[str, str]:
        return {"attention_backend": "hal"}

    def generate(
        self, input_ids: list[list[int]], sampling_params: dict[str, Any], **more: Any
    ) -> list[dict[str, Any]]:
        self.clock[0] += 30 + sampling_params["max_new_tokens"]
        return [{"meta_info": {"output_top_logprobs": [[(-1.0, 5, None)]]}, "output_ids": [5]} for _ in input_ids]

    def shutdown(self) -> None:
        pass


@pytest.mark.parametrize(("seconds", "skipped"), [(1e9, []), (250, ["ttft 16"]), (1, ["decode 2 x 8", "ttft 16"])])
def test_a_slow_start_costs_no_points(monkeypatch: pytest.MonkeyPatch, seconds: float, skipped: list[str]) -> None:
    clock = [0.0]
    monkeypatch.setattr(sglang.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(sglang, "_engine", lambda *given: Engine(clock, start=1000))
    options = sglang.Options("tiny", decode=[(2, 8)], ttft=[16], seconds=seconds)
    *_, found = sglang.measure("hal", options, "")
    assert (found["start_s"], found["skipped"]) == (1000, skipped)
    assert len(found["logits"]) == 6
    assert len(found["decode"]) == 1 - ("decode 2 x 8" in skipped)


class Drafting(Engine):
    """Each step takes three seconds and gives two tokens."""

    def generate(self, input_ids: list[list[int]], sampling_params: dict[str, Any], **more: Any) -> list[Any]:
        steps = sampling_params["max_new_tokens"] // 2
        self.clock[0] += 3 * steps
        return [{"meta_info": {"spec_verify_ct": steps - i}} for i in range(len(input_ids))]


def test_a_step_with_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is that of the steps that verified, not of the tokens; logits are not compared."""
    clock = [0.0]
    monkeypatch.setattr(sglang.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(sglang, "_engine", lambda *given: Drafting(clock, start=0))
    options = sglang.Options("tiny", decode=[(2, 8)], ttft=[], steps=64, drafts=3)
    *_, found = sglang.measure("hal", options, "")
    (point,) = found["decode"]
    assert (point["median_step_ms"], point["steps"], point["tokens_s"]) == (3000, [32] * 3, 2 * 64 / 96)
    assert "logits" not in found


def test_the_draft_model(tmp_path: Path) -> None:
    """One layer of the shape, in a chain."""
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 32, "vocab_size": 9}))
    settings = sglang._drafts(sglang.Options(drafts=3), str(tmp_path))
    draft = json.loads(Path(settings["speculative_draft_model_path"], "config.json").read_text())
    assert draft == {"num_hidden_layers": 1, "vocab_size": 9}
    assert (settings["speculative_num_steps"], settings["speculative_num_draft_tokens"]) == (3, 4)
