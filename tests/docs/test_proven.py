"""ci/proven.py: committed outcomes stand for tests of the same code alone, and one that does not come again fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import proven
import pytest

pytest_plugins = ("pytester",)
TESTS = """
import os, pytest
@pytest.mark.parametrize("i", range(20))
def test_some(i):
    if os.environ["MODE"] == "skip": pytest.skip("now")
    assert os.environ["MODE"] == "pass"
@pytest.mark.skip
def test_other(): pass
"""


@pytest.fixture
def run(pytester: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(proven, "ROOT", pytester.path)
    monkeypatch.setattr(proven, "of", lambda: {"python": "3", "versions": "torch 2", "files": {"hal": "0"}})
    monkeypatch.setenv("REPORTS", str(pytester.path / "reports"))
    monkeypatch.setenv("CI_SEED", "5")
    pytester.makepyfile(test_it=TESTS)

    def run(mode: str = "pass") -> Any:
        monkeypatch.setenv("MODE", mode)
        return pytester.inline_run("-q", plugins=[proven.Proven("group")])

    return run


def test_some_tests_stand_for_all(run: Any, pytester: Any) -> None:
    made, kept = pytester.path / "reports/tests/group.json", pytester.path / "docs/conformance/tests/group.json"
    assert run("fail").ret == 1
    assert not made.exists()
    whole = run()
    whole.assertoutcome(passed=20, skipped=1)
    kept.parent.mkdir(parents=True)
    made.rename(kept)
    for _ in range(2):
        run().assertoutcome(passed=2, skipped=1)
    assert not made.exists()
    assert run("fail").ret == 1
    assert run("skip").ret == 1  # two of them passed when they were recorded
    record = json.loads(kept.read_text())
    record["outcomes"] = dict.fromkeys(record["outcomes"], "skipped")
    kept.write_text(json.dumps(record))
    assert run().ret == 1
    record["of"]["files"]["hal"] = "1"
    kept.write_text(json.dumps(record))
    run().assertoutcome(passed=20, skipped=1)


def test_what_outcomes_stand_for(tmp_path: Path) -> None:
    now = {"python": "3.11", "versions": "torch 2", "files": {"hal": "0", "tests": "1"}}
    ids, path = ["a", "b"], tmp_path / "group.json"
    same = {"of": now, "outcomes": {"a": "passed", "b": "skipped"}}
    for change, says in (
        ({}, ""),
        ({"of": now | {"versions": "torch 3"}}, "versions: was torch 3"),
        ({"of": {}}, "KeyError"),
        ({"of": now | {"files": {"hal": "0", "tests": "2"}}}, "the code is not what was judged: tests"),
        ({"outcomes": {"a": "passed"}}, "1 tests are not in both, first b"),
        ({"outcomes": {"a": "passed", "b": "skipped", "c": "passed"}}, "1 tests are not in both, first c"),
        ({"outcomes": {"a": "passed", "b": "failed"}}, "b: failed"),
        ({"outcomes": None}, "TypeError"),
    ):
        path.write_text(json.dumps(same | change))
        why = "; ".join(proven.differences(path, ids, now))
        assert says in why
        assert bool(why) == bool(says)
    assert "FileNotFoundError" in proven.differences(tmp_path / "absent", ids, now)[0]
    files = proven.of()["files"]
    assert files.keys() == {"hal", "tests", "examples", "pyproject.toml", "ci/proven.py"}
    assert len({*files.values()}) == len(files)
