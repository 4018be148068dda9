"""Tests whose outcomes are committed: where they are of this very code, one in ten runs again, else all of them.

A lane names a group of tests in CI_PROVEN, and ``tests/conftest.py`` loads this. docs/conformance/tests/GROUP.json has
each test's outcome, and what code that is of, with which versions: all of hal, the tests and the examples, by hashes.
Which tests run again is drawn by CI_SEED; each must come to what was recorded. A whole run in which none failed is
written to $REPORTS/tests/GROUP.json, if that is set: ci/certificates commits it. `ci/test all` sets no CI_PROVEN.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from hal.conformance._again import made_of, unlike
from hal.conformance._sources import digest, hashes, under

ROOT = Path(__file__).resolve().parents[1]
EVERY = 10


def of() -> dict[str, Any]:
    tops = {top: digest(hashes(dict(under(ROOT / top, top)))) for top in ("hal", "tests", "examples")}
    return made_of(tops | hashes({name: ROOT / name for name in ("pyproject.toml", "ci/proven.py")}))


def differences(path: Path, ids: list[str], now: dict[str, Any]) -> list[str]:
    """Why what was recorded does not stand for the tests `ids`: nothing, where it does."""
    try:
        record = json.loads(path.read_text("utf-8"))
        outcomes = record["outcomes"]
        other = sorted({*ids} ^ {*outcomes})
        named = [f"{len(other)} tests are not in both, first {other[0]}"] if other else []
        bad = [f"{i}: {o}" for i, o in outcomes.items() if o not in ("passed", "skipped")]
        return unlike(record["of"], now) + named + bad[:1]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        return [f"{type(e).__name__}: {e}"]


class Proven:
    """The plugin of one run."""

    def __init__(self, group: str) -> None:
        self.path = ROOT / "docs/conformance/tests" / f"{group}.json"
        self.expected: dict[str, str] | None = None
        self.outcomes: dict[str, str] = {}
        self.told: list[str] = []
        self.now = of()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        name = f"{self.path.relative_to(ROOT)}"
        ids = [item.nodeid for item in items]
        if why := differences(self.path, ids, self.now):
            self.told = ["\n  ".join([f"{name} proves nothing of what is here; all tests run:", *why])]
            return
        seed = int(os.environ.get("CI_SEED", "0"))
        outcomes = json.loads(self.path.read_text("utf-8"))["outcomes"]
        ran = [i for i in ids if outcomes[i] == "passed"]
        some = random.Random(seed).sample(ran, -(-len(ran) // EVERY))
        # That the others are skipped is found out at no cost.
        drawn = {*ids} - {*ran} | {*some}
        self.expected = {i: outcomes[i] for i in drawn}
        again = f"{len(some)} of {len(ran)} tests that ran run again (the same ones: CI_SEED={seed})"
        self.told = [f"{name} is of this code and these versions; {again}"]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in drawn])
        items[:] = [item for item in items if item.nodeid in drawn]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self, session: Any) -> None:
        if session.exitstatus != pytest.ExitCode.OK:
            return
        if self.expected is None:
            if folder := os.environ.get("REPORTS"):
                path = Path(folder, "tests", self.path.name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({"of": self.now, "outcomes": self.outcomes}, indent=1) + "\n", "utf-8")
        elif self.outcomes != self.expected:
            self.told.append(f"not what was recorded: {sorted({*self.outcomes.items()} - {*self.expected.items()})}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self.told:
            terminalreporter.write_line(line)
