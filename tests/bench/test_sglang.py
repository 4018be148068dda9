"""`hal bench engine sglang`, without SGLang: what its time box cuts off, turns, drafts, what is said of HiCache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hal.bench import sglang, sglang_hicache


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


def test_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who need not wait goes on at once, who waits until the turn has come, or until nobody is left to give it."""
    monkeypatch.setitem(sys.modules, "sglang.srt.models.registry", ModuleType("registry"))
    for above in ("sglang", "sglang.srt", "sglang.srt.models"):
        monkeypatch.setitem(sys.modules, above, ModuleType(above))
    runner = SimpleNamespace(server_args=SimpleNamespace(model_path=str(tmp_path)))
    sglang.wait_for_turn(runner)
    (tmp_path / sglang.ASKED).write_text(str(os.getpid()))
    waiting = threading.Thread(target=sglang.wait_for_turn, args=(runner,))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    (tmp_path / sglang.TURN).touch()
    waiting.join(60)
    assert not waiting.is_alive()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / sglang.TURN).unlink()
    (tmp_path / sglang.ASKED).write_text(str(gone.pid))
    with pytest.raises(ProcessLookupError):
        sglang.wait_for_turn(runner)


def test_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a child wrote is found, with an error where it ended with one; its folder is gone with it."""
    (tmp_path / "turning.py").write_text(
        "import json, os, pathlib, sys\n"
        "def child(status, folder):\n"
        "    pathlib.Path(folder, 'found.json').write_text(json.dumps({'HAL_X': os.environ['HAL_X']}))\n"
        "    sys.exit(int(status))\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with (
        sglang.Child("turning", "child", "0", env={"HAL_X": "1"}) as right,
        sglang.Child("turning", "child", "3", env={"HAL_X": "2"}) as wrong,
    ):
        assert right.run() == {"HAL_X": "1"}
        assert wrong.run() == {"HAL_X": "2", "error": "exit status 3: see stderr"}
    assert not right.folder.exists()


def test_what_returned() -> None:
    """Other tokens than the kept prompt's, or than without HiCache, are said."""

    def row(**tokens: int) -> dict[str, Any]:
        return {w: {"ms": 1.0, "cached": 64, "tokens": [t], "logprobs": [-t / 8]} for w, t in tokens.items()}

    rows = [row(computed=1, kept=1, returned=1), row(computed=2, kept=2, returned=2)]
    copies = {"load": {"GB/s": 50.0, "tokens": 128}}
    found = {"rows": rows, "copies": copies}
    right = sglang_hicache.summary(found, {"rows": rows})
    assert all(right[k] is True for k in ("first token as kept", "computed as without", "kept as without"))
    assert (right["its logprob apart, at most"], right["load GB/s"], right["tokens of loads"]) == (0, 50.0, 128)
    wrong = sglang_hicache.summary({**found, "rows": [rows[0], row(computed=2, kept=2, returned=3)]}, {"rows": rows})
    assert (wrong["first token as kept"], wrong["its logprob apart, at most"]) == (False, 0.125)
    other = sglang_hicache.summary({**found, "rows": rows[::-1]}, {"rows": rows})
    assert (other["first token as kept"], other["computed as without"]) == (True, False)
    assert sglang_hicache.summary({"rows": rows, "copies": {}}, None).keys() == {
        "computed ms",
        "kept ms",
        "returned ms",
    }


def test_engines_whose_prompts_return(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is asked for in turn; other tokens than stock's are an error."""
    asked, differs = [], ["none"]

    class Child:
        def __init__(self, module: str, function: str, engine: str, *args: str, env: dict[str, str]) -> None:
            self.engine = engine

        def run(self) -> dict[str, Any]:
            asked.append(self.engine)
            last = 2 if self.engine == differs[0] else 1
            one = {"ms": 1.0, "cached": 64, "tokens": [1, last], "logprobs": [0.0, 0.0]}
            copies = {} if self.engine == "without" else {"load": {"GB/s": 50.0, "tokens": 64}}
            return {"rows": [dict.fromkeys(("computed", "kept", "returned"), one)] * 2, "copies": copies}

        def __enter__(self) -> Child:
            return self

        def __exit__(self, *exc: object) -> None: ...

    monkeypatch.setattr(sglang, "Child", Child)
    file = tmp_path / "report.json"
    for differs[0], code in (("none", 0), ("hal", 1), ("stock", 1)):
        assert sglang_hicache.main(sglang.Options("tiny"), sglang_hicache.ENGINES, 64, file) == code
    assert asked == list(sglang_hicache.ENGINES) * 3
    report = json.loads(file.read_text())
    assert report["summary"]["hal"]["all tokens as stock"] is False
    assert report["load, hal / stock"] == 1
