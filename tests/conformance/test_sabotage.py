"""The catalogue of sabotaged backends and what counts as a kill; ``ci/sabotage`` runs all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sabotage import __main__ as score
from sabotage import faults
from sabotage._healthy import Fault
from sabotage._run import kill

from hal.ops import BUILTIN


def test_the_catalogue() -> None:
    """At least thirty that a CPU shows, over all four ops; what needs a device is said to be not run."""
    on_cpu = [f for f in faults() if "cpu" in f.device]
    assert len(on_cpu) >= 30
    assert {f.op for f in on_cpu} == set(BUILTIN)
    elsewhere = [f for f in faults() if "cpu" not in f.device]
    assert {p for f in elsewhere for p in f.proofs} == {"stream", "sync", "graph", "overlap", "memory"}
    assert all(kill(f).outcome == "not run" for f in elsewhere)


def test_a_kill_for_another_reason_does_not_count() -> None:
    (fault,) = [f for f in faults() if f.name == "v never written"]
    assert kill(fault).outcome == "killed"
    other = Fault(fault.name, fault.op, fault.make, r"fell back in secret", ("stream", "errors"))
    assert kill(other).outcome == "survived"


def made(folder: Path, **more: Any) -> Path:
    kills = [{"fault": f.name, "op": f.op, "outcome": "killed" if "cpu" in f.device else "not run"} for f in faults()]
    path = folder / "score.json"
    path.write_text(json.dumps({"device": "cpu", "of": score.what(), "faults": kills} | more))
    return path


def test_a_score_stands_for_a_run_of_the_same_code(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    argv = ["sabotage", "--against", str(made(tmp_path)), "--sample", "99", "--seed", "1", "--json", f"{tmp_path}/out"]
    monkeypatch.setattr("sys.argv", argv)
    assert score.main() == 0
    assert "again 2 / 2" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(score, "kill", lambda fault, device: score.Kill(fault, "survived"))
    assert score.main() == 1


def test_a_score_of_other_code_or_faults_stands_for_nothing(tmp_path: Path) -> None:
    def why(**more: Any) -> str:
        return "; ".join(score.differences(made(tmp_path, **more), faults(), "cpu"))

    whole = json.loads(made(tmp_path).read_text())
    files = whole["of"]["files"]
    assert {"tests/sabotage/_kv.py", "hal/registry/_dispatch.py", "hal/conformance/_verdict.py"} <= files.keys()
    assert why() == ""
    for more, says in (
        ({"of": {**whole["of"], "files": {**files, "tests/sabotage/_kv.py": "0"}}}, "judged: tests/sabotage/_kv.py"),
        ({"of": {**whole["of"], "versions": "torch 2.12.0"}}, "versions: was torch 2.12.0"),
        ({"of": {**whole["of"], "python": "3.10"}}, "python: "),
        ({"of": {}}, "KeyError"),
        ({"of": None}, "TypeError"),
        ({"device": "cuda"}, "device: "),
        ({"faults": whole["faults"][1:]}, "its faults are not these"),
        ({"faults": [{**whole["faults"][0], "outcome": "survived"}, *whole["faults"][1:]]}, "its faults are not these"),
    ):
        assert says in why(**more)
    assert "FileNotFoundError" in score.differences(tmp_path / "absent", faults(), "cpu")[0]
