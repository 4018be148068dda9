"""A report in the place of a run: of this very code alone, and what is drawn of it has to come out as it says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hal.conformance import main
from hal.conformance._again import Asked, differences, drawn
from hal.conformance._find import find, job_for
from hal.conformance._result import FAILED, NOT_APPLICABLE, PASSED
from hal.conformance._worker import Worker

OP = "get_last_loc"
ASKED = Asked("reference", "device", None, (), (OP,), None, False)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    assert main("reference", ops=[OP], report=folder, quiet=True) == 0
    return folder / "report.json"


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with find(job_for("reference", "device", ops=[OP])) as found:
        yield found


def rewritten(path: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    report = json.loads(path.read_text())
    change(report)
    other = folder / "report.json"
    other.write_text(json.dumps(report))
    return other


def case(report: dict[str, Any], proof: str) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in report["cases"] if c["proof"] == proof)
    return found


def does_not_apply(report: dict[str, Any]) -> None:
    """A verdict changed by hand, and all that follows from it: no look at the report shows it."""
    case(report, "determinism")["outcome"] = NOT_APPLICABLE
    report["verdict"]["counts"][PASSED] -= 1
    report["verdict"]["counts"][NOT_APPLICABLE] += 1
    report["verdict"]["ran"] -= 1


def seed_that_draws(path: Path, proof: str, count: int, drawing: bool = True) -> int:
    report = json.loads(path.read_text())
    name = case(report, proof)["id"]
    return next(s for s in range(1000) if (name in drawn(report, count, s)) == drawing)


def test_one_in_some_cases_runs_again_and_the_seed_says_which(path: Path, tmp_path: Path, capsys: Any) -> None:
    assert main("reference", ops=[OP], against=path, sample=20, seed=7, report=tmp_path / "none") == 0
    said = capsys.readouterr().out
    assert "the same ones: --sample 20 --seed 7" in said
    assert "ran 4 cases again (seed 7), 0 differ" in said
    assert not (tmp_path / "none").exists()
    report = json.loads(path.read_text())
    assert drawn(report, 4, 7).keys() == drawn(report, 4, 7).keys() != drawn(report, 4, 8).keys()
    assert set().union(*(drawn(report, 4, s) for s in range(300))) == {c["id"] for c in report["cases"]}


def test_a_verdict_changed_by_hand_fails_when_it_is_drawn(path: Path, tmp_path: Path, capsys: Any) -> None:
    forged = rewritten(path, tmp_path, does_not_apply)
    seed = seed_that_draws(path, "determinism", 4)
    assert main("reference", ops=[OP], against=forged, sample=20, seed=seed) == 1
    assert re.search(r"get_last_loc/determinism/\S+: reported not_applicable, now passed", capsys.readouterr().out)


def test_all_cases_run_where_the_report_is_of_another_code(path: Path, tmp_path: Path, capsys: Any) -> None:
    stale = rewritten(path, tmp_path, lambda r: r["code"]["files"].update({"hal/kv/pool.py": "0" * 64}))
    assert main("reference", ops=[OP], against=stale, report=tmp_path / "whole") == 0
    said = capsys.readouterr().out
    assert "proves nothing of what is here; all cases run:\n  the code is not what was judged: hal/kv/pool.py" in said
    assert "72 passed" in said
    assert len(json.loads((tmp_path / "whole/report.json").read_text())["cases"]) == 77


def _failed(r: dict[str, Any]) -> None:
    case(r, "value")["outcome"] = FAILED


def _failed_and_says_so(r: dict[str, Any]) -> None:
    _failed(r)
    r["verdict"]["counts"][PASSED] -= 1
    r["verdict"]["counts"][FAILED] += 1
    r["verdict"]["failed"].append(case(r, "value")["id"])


def _other_torch(r: dict[str, Any]) -> None:
    next(d for d in r["environment"]["distributions"] if d["name"] == "torch")["version"] = "2.12.0"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: None, ""),
        (_failed, "verdict.counts: the cases say"),
        (_failed_and_says_so, "exit code: the report's 1, expected 0"),
        (lambda r: r["cases"].pop(), "1 cases missing"),
        (lambda r: r["cases"].append(r["cases"][0]), "listed twice"),
        (lambda r: r["suite"].update(hash="0" * 64), "made by another suite"),
        (lambda r: r["code"].update(sha256="0" * 64), "the code is not what was judged"),
        (lambda r: r["code"]["files"].pop("hal/kv/pool.py"), "the code is not what was judged: hal/kv/pool.py"),
        (_other_torch, "versions: the report's hal-kernels"),
        (lambda r: r["environment"]["distributions"].pop(), "versions: "),
        (lambda r: r["environment"].update(python="3.10.1"), "python: the report's 3.10.1"),
        (lambda r: r.update(device="cpu (sparc, 3 threads)"), "device: the report's cpu (sparc, 3 threads)"),
        (lambda r: r.update(backend="cpu"), "backend: the report's cpu, expected reference"),
        (lambda r: r.update(lane="lowered"), "lane: the report's lowered, expected device"),
        (lambda r: r.update(certify=True), "--certify: the report's True, expected False"),
        (lambda r: r["suite"]["ops"].append("alloc_decode"), "ops: the report's"),
    ],
)
def test_what_a_report_does_not_stand_for(path: Path, worker: Worker, change: Any, says: str) -> None:
    report = json.loads(path.read_text())
    change(report)
    why = differences(report, ASKED, worker)
    assert (says in "; ".join(why)) if says else why == []


@pytest.mark.parametrize("text", ["", "{}", "[]", "{", '{"schema": "hal-conformance/1"}'])
def test_what_is_no_report_stands_for_nothing(text: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("hal.conformance._run.judge_backend", lambda *_: 1 / 0)
    (tmp_path / "report.json").write_text(text)
    for path in (tmp_path / "report.json", tmp_path / "absent.json"):
        with pytest.raises(ZeroDivisionError):
            main("reference", ops=[OP], against=path)
        assert "not a report: " in capsys.readouterr().out
