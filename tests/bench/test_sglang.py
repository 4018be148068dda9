"""`hal bench engine sglang`, without SGLang: what its time box cuts off."""

from __future__ import annotations

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
