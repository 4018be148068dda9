"""The suite itself: its memory, its cases, its verdict, and that nothing outside of it decides one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conformance.child import ROOT, run

from hal._remote.target import Bound, DirectTarget, always
from hal.conformance import main
from hal.conformance._cases import DEVICE_PROOFS, PROOFS, case_list, cases_of
from hal.conformance._find import job_for
from hal.conformance._judge import Apart
from hal.conformance._result import FAILED, NOT_APPLICABLE, PASSED, REFUSED, Case, Result
from hal.conformance._run import run_backend
from hal.conformance._sources import suite_files, suite_hash
from hal.conformance.proofs.run import run_case
from hal.ops import BUILTIN, get_spec

# --- the case list ----------------------------------------------------------------------------------


def test_every_sample_and_error_has_its_case() -> None:
    for op in BUILTIN:
        cases = cases_of(get_spec(op))
        assert len({c.id for c in cases}) == len(cases)
        assert {c.sample for c in cases if c.proof in ("value", "large")} == {s.name for s in get_spec(op).samples}
        assert {c.name for c in cases if c.proof == "errors"} == {e.name for e in get_spec(op).errors}
        assert {c.proof for c in cases} <= set(PROOFS)
        assert set(DEVICE_PROOFS) <= {c.proof for c in cases}


def test_the_hash_is_of_the_sources() -> None:
    assert len(suite_hash()) == 64
    assert suite_hash() == suite_hash()
    decide = tuple(
        """
        conformance/_verdict.py conformance/proofs/value.py _remote/perform.py ops/spec.py kv/pool.py
        ops/proofs/judge.py _errors.py _host.py _memory.py
        """.split()
    )
    assert {f"hal/{name}" for name in decide} <= set(suite_files())


@pytest.mark.parametrize("op", BUILTIN)
def test_no_case_passes_against_an_empty_function(op: str) -> None:
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    target = DirectTarget({op: Bound(nothing, always, "nothing")})
    cases = cases_of(get_spec(op))
    if not os.environ.get("CI_ALL"):  # of those that differ by their inputs alone, one
        cases = [*{(c.proof, c.tag, "" if c.sample or c.proof == "fresh" else c.name): c for c in cases}.values()]
    for case in cases:
        result = run_case(case, target, get_spec(op), examples=5)
        expected = (FAILED, NOT_APPLICABLE) if case.proof in (*DEVICE_PROOFS, "placement") else (FAILED,)
        assert result.outcome in expected, f"{case.id}: {result.outcome} {result.reason}"


def test_what_is_kept_of_some_calls_alone_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hal.conformance.proofs.soak.SECONDS", float("inf"))  # as many calls on a busy machine
    op, good = "get_last_loc", get_spec("get_last_loc").reference
    case = Case(op, "leak", "all")

    def keeping(limit: int) -> Any:
        kept: list[Any] = []

        def run(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
            found = good(req_to_token, req_pool_indices, prefix_lens)
            if len(kept) < limit:
                kept.append(found.clone())
            return found

        target = DirectTarget({op: Bound(run, always, "keeps")})
        target.foreign = lambda op: {}  # type: ignore[method-assign]
        return run_case(case, target, get_spec(op))

    # 1,000 calls a round: the second keeps too many, the third none; or every one.
    assert keeping(1_450).outcome == PASSED
    forever = keeping(10**9)
    assert forever.outcome == FAILED
    assert re.search(r"[\d,]+ more tensors alive", forever.reason)


def test_a_refusal_is_only_for_features_and_names_a_declared_limit() -> None:
    op = "rope_kv_write"

    def no(sig: Any) -> str | None:
        return "interleaved: not yet" if sig["interleaved"] else None

    fn = get_spec(op).reference
    case = Case(op, "value", "interleaved-bf16", "interleaved-bf16", "feature:interleaved")
    required = Case(op, "value", "interleaved-bf16", "interleaved-bf16")
    for limits, which, outcome, words in (
        (("interleaved",), case, REFUSED, "interleaved: not yet"),
        (("head_dim",), case, FAILED, "names no limit of the manifest (declared: head_dim)"),
        (("interleaved",), required, FAILED, "supports refuses what is required"),
    ):
        target = DirectTarget({op: Bound(fn, no, "x")}, limits=limits)
        target.foreign = lambda op: {}  # type: ignore[method-assign]
        result = run_case(which, target, get_spec(op))
        assert (result.outcome, words in result.reason) == (outcome, True), result.reason


def test_usage_errors(capsys: Any) -> None:
    assert main() == 2
    assert main("no_such_backend") == 2
    assert "no_such_backend" in capsys.readouterr().err
    assert main("reference", ops=["get_last_lok"]) == 2
    assert main("reference", ops=["get_last_loc"], certify=True) == 2


def test_nothing_ran_is_no_success(capsys: Any) -> None:
    """The lane is not there to run on, or the backend is not ready: never exit code 0."""
    assert main("ascend", ops=["get_last_loc"], quiet=True) in (2, 3)


# --- what a backend or a folder may try -------------------------------------------------------------

EMPTY = """
import hal

@hal.register("get_last_loc", backend="mine")
def get_last_loc(req_to_token, req_pool_indices, prefix_lens):
    {body}
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A working directory in which everything that pytest reads says that all is well."""
    (tmp_path / "conftest.py").write_text(
        "import pytest\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
        "    out = yield\n    out.get_result().outcome = 'passed'\n\n"
        "def pytest_collection_modifyitems(items):\n    items.clear()\n\n"
        "def pytest_sessionfinish(session):\n    session.exitstatus = 0\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --co -k nothing\nfilterwarnings = ignore\n")
    (tmp_path / "mine.py").write_text(EMPTY.format(body="return prefix_lens.clone()"))
    return tmp_path


def test_no_configuration_saves_a_wrong_backend_and_a_failing_example_runs_by_itself(hostile: Path) -> None:
    args = ["-m", "hal", "conformance", "mine", "--import", "mine", "--op", "get_last_loc", "--report", "out"]
    saving = {"PYTEST_ADDOPTS": "--co -p no:python", "PYTHONWARNINGS": "ignore", "PYTHONOPTIMIZE": "2"}
    got = run(args, hostile, **saving)
    assert got.returncode == 1, got.stdout + got.stderr
    cases = {c["id"]: c for c in json.loads((hostile / "out/report.json").read_text())["cases"]}
    assert sum(c["outcome"] == FAILED for c in cases.values()) > 20
    for case in ("get_last_loc/ragged/all", "get_last_loc/pages/i64-i64"):
        got = run(["-c", cases[case]["snippet"]], hostile)
        assert got.returncode == 1
        assert "AssertionError: " in got.stderr
        assert "return" in got.stderr


@pytest.mark.parametrize(
    ("body", "says", "jobs"),
    [
        ("import os; os._exit(0)", "the process died (exit code 0)", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "the process died (SIGKILL)", 1),
        ("import sys; sys.exit(0)", "the process died", 1),
        ("import time; time.sleep(99)", "hung: no call ended for 9 s", 1),
        ("import os; os.abort()", "the process died (SIGABRT)", 2),
    ],
)
def test_a_dying_or_hanging_backend_fails_by_name_and_the_rest_goes_on(
    tmp_path: Path, body: str, says: str, jobs: int, monkeypatch: Any
) -> None:
    (tmp_path / "mine.py").write_text(
        EMPTY.format(body=f"if len(prefix_lens) == 1: {body}\n    return prefix_lens.clone()")
    )
    monkeypatch.chdir(tmp_path)
    wanted = ("get_last_loc/value/one", "get_last_loc/value/i64-i64", "get_last_loc/value/past-one-block")
    cases = [c for c in cases_of(get_spec("get_last_loc")) if c.id in wanted]
    outcome = run_backend("mine", "device", ["get_last_loc"], cases, imports=["mine"], silence=9.0, jobs=jobs)
    assert set(outcome.results) == set(wanted), outcome.fatal
    assert {r.outcome for r in outcome.results.values()} == {FAILED}
    assert says in outcome.results["get_last_loc/value/one"].reason


def test_a_judge_that_ends_leaves_the_rest_to_others() -> None:
    cases = [c for c in cases_of(get_spec("get_last_loc")) if c.proof == "value"]
    left, told = list(cases), list[Result]()
    ended, other = (Apart(job_for("reference", "device", None, [], ["get_last_loc"], None)) for _ in range(2))
    ended._child.kill()
    for judge in (ended, other):
        judge.prove(lambda: left.pop(0) if left else None, told.append)
    assert [r.id for r in told] == [c.id for c in cases]
    assert "the judge's process ended before it (exit code -9)" in told[0].reason
    assert {r.outcome for r in told[1:]} == {PASSED}


def test_several_jobs_say_what_one_says() -> None:
    cases = [c for c in cases_of(get_spec("get_last_loc")) if c.proof in ("value", "threads")]
    one, two = (run_backend("reference", "device", ["get_last_loc"], cases, jobs=j) for j in (1, 2))
    assert {r.id: r.outcome for r in one.results.values()} == {r.id: r.outcome for r in two.results.values()}
    assert set(two.results) == {c.id for c in cases}
    assert (one.device, one.declared) == (two.device, two.declared)


# --- under pytest -----------------------------------------------------------------------------------


def test_the_pytest_form(tmp_path: Path) -> None:
    plugin = ["-p", "hal.conformance.pytest_plugin"]
    help_ = run(["-m", "pytest", "--help"], tmp_path).stdout
    if "--hal-backend" in help_:
        plugin = []
    base = ["-m", "pytest", *plugin, "-q", "-p", "no:cacheprovider", "--pyargs", "hal.conformance"]
    got = run([*base, "--hal-backend", "reference", "--hal-op", "get_last_loc", "-k", "/value/ or /sync/"], tmp_path)
    assert got.returncode == 0, got.stdout
    assert "16 passed, 1 skipped, 60 deselected" in got.stdout
    none = run(base, tmp_path)
    assert none.returncode != 0
    assert "--hal-backend" in none.stdout + none.stderr
    for options, says in (
        (["--hal-backend", "referense"], "unknown backend referense (did you mean reference?)"),
        (["--hal-backend", "reference", "--hal-op", "get_lost_loc"], "unknown op get_lost_loc (did you mean"),
    ):
        typo = run([*base, *options], tmp_path)
        assert typo.returncode == 4
        assert says in typo.stderr
        assert len((typo.stdout + typo.stderr).split("\n", 1)[0]) < 400
        assert (typo.stdout + typo.stderr).strip().count("\n") == 0


def test_the_pytest_plugin_is_light() -> None:
    heavy = "('torch', 'hal.ops.spec', 'hypothesis')"
    code = f"import hal.conformance.pytest_plugin, sys; print([m for m in {heavy} if m in sys.modules])"
    assert run(["-c", code], ROOT).stdout.strip() == "[]"


def test_case_list_is_the_ops_in_order() -> None:
    some = case_list({op: get_spec(op) for op in BUILTIN})
    assert list(dict.fromkeys(c.op for c in some)) == list(BUILTIN)


def test_a_worker_ends_with_its_runner(tmp_path: Path) -> None:
    """A case that runs for ever, whose runner was killed, would take a core until the machine goes down."""
    worker = (
        "import time; from hal._remote import serve\n"
        "serve.end_with_parent(); print('ready', flush=True); time.sleep(600)"
    )
    runner = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {worker!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", runner], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as killed:
        assert killed.stdout is not None
        pid = int(killed.stdout.readline())
        os.kill(pid, 0)
        killed.kill()
    for _ in range(3000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the worker outlived its runner")
