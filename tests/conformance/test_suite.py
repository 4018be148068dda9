"""The suite itself: its memory, its cases, its verdict, and that nothing outside of it decides one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hal._remote.target import Bound, DirectTarget, always
from hal.conformance import _picture, _report, _waivers, _writers, main
from hal.conformance._arena import POISONS, ZONE, Arena, Room, extent, place
from hal.conformance._cases import DEVICE_PROOFS, PROOFS, case_list, cases_of
from hal.conformance._result import FAILED, NOT_APPLICABLE, NOT_RUN, PASSED, REFUSED, SIMULATED, Case
from hal.conformance._run import run_backend
from hal.conformance._schema import misfits
from hal.conformance._sources import suite_files, suite_hash
from hal.conformance._truths import pure_outputs
from hal.conformance._verify import beyond_samples, inconsistencies
from hal.conformance.proofs.run import run_case
from hal.kv.pool import KVPool
from hal.ops import BUILTIN, get_spec

ROOT = Path(__file__).parents[2]
ROOM = Room(Arena())


def run(args: list[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env={**os.environ, "PYTHONPATH": path, **env}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip


# --- the memory -------------------------------------------------------------------------------------


def odd_view() -> torch.Tensor:
    return torch.arange(40, dtype=torch.int32)[1:].as_strided((3, 4), (12, 1))


@pytest.mark.parametrize("poison", POISONS)
def test_a_placed_tensor_has_the_same_elements_strides_and_alignment(poison: int) -> None:
    t = odd_view()
    placed = place({"t": t}, ROOM, poison=poison)
    got = placed.values["t"]
    assert torch.equal(got, t)
    assert got.stride() == t.stride()
    assert got.data_ptr() % 16 == t.data_ptr() % 16
    assert got.data_ptr() != t.data_ptr()
    moved = place({"t": t}, ROOM, shift=1).values["t"]
    assert moved.data_ptr() % 16 == (t.data_ptr() + 4) % 16


@pytest.mark.parametrize(
    ("offset", "where"),
    [
        (-1, "4 bytes before it"), (28, "0 bytes past the end of it"), (5, "gaps"),
        (ZONE // 4 + 27, "4092 bytes past"), (-1024, "4096 bytes before"),
    ],
)  # fmt: skip
def test_a_stray_write_is_seen_and_placed(offset: int, where: str) -> None:
    placed = place({"t": odd_view()}, ROOM)
    t = placed.values["t"]
    t.as_strided((1,), (1,), t.storage_offset() + offset).fill_(12345)
    (block,) = placed.all()
    changed = block.touched(torch.ones(3, 4, dtype=torch.bool))
    assert changed is not None
    assert where in changed


def test_only_named_elements_may_change() -> None:
    placed = place({"t": odd_view()}, ROOM)
    placed.values["t"][1, 2] = -5
    (block,) = placed.all()
    named = torch.zeros(3, 4, dtype=torch.bool)
    assert block.touched(named) == "t[1, 2]: changed, though the contract does not name it (4 bytes in all)"
    assert block.touched(None) is not None
    named[1, 2] = True
    assert block.touched(named) is None


def test_far_rows_are_watched_around_each_row() -> None:
    t = torch.empty_strided((4, 5), (2**29, 1), dtype=torch.int32).copy_(torch.arange(20).view(4, 5))
    placed = place({"t": t}, ROOM)
    got, (block,) = placed.values["t"], placed.all()
    assert torch.equal(got, t)
    assert block.touched(None) is None
    got.as_strided((1,), (1,), got.storage_offset() + 3 * 2**29 + 5).fill_(1)
    assert "past the end of row 3" in (block.touched(torch.ones(4, 5, dtype=torch.bool)) or "")


def test_outputs_hold_the_poison() -> None:
    placed = place({"t": odd_view()}, ROOM, poison=0x5A, outputs=frozenset({"t"}))
    assert (placed.values["t"] == 0x5A5A5A5A).all()


@pytest.mark.parametrize("side", ["start", "end"])
def test_guard_pages_hold_the_tensor(side: str) -> None:
    t = odd_view()
    got = place({"t": t}, Room(Arena(), side=side)).values["t"]
    assert torch.equal(got, t)
    at = got.data_ptr() if side == "start" else got.data_ptr() + extent(t) * 4
    assert at % os.sysconf("SC_PAGE_SIZE") == 0


def test_a_touched_guard_page_ends_the_process() -> None:
    code = (
        "import torch, ctypes\nfrom hal.conformance._arena import *\nfrom hal._remote.memory import Placed as Given\n"
        "arena = Arena()\nplaced = place({'t': torch.zeros(5)}, Room(arena, side='end'))\n"
        "given = Given(arena.memory, placed.arguments, torch.device('cpu'))\nt = given.values['t']\n"
        "byte = ctypes.c_byte.from_address(t.data_ptr() + 20)\nbyte.value\n"
        "with given.guarded():\n    print('guarded', flush=True)\n    byte.value\n"
    )
    got = run(["-c", code], ROOT)
    assert (got.stdout, got.returncode) == ("guarded\n", -11)


def test_pools_are_placed_half_by_half() -> None:
    a = get_spec("kv_transfer").make(dst="list")
    placed = place(a, ROOM)
    assert isinstance(placed.values["dst"], KVPool)
    assert [b.name for b in placed.blocks["dst"]] == [f"dst.{x}[{i}]" for x in "kv" for i in range(3)]
    assert placed.values["dst"].layout == "layer_first"


def test_a_tensor_that_is_a_part_of_another_stays_one() -> None:
    k = torch.randn(4, 2, 6)
    arguments = {"k": k, "v": k[..., :4], "w": k[..., 2:], "x": k.clone()}
    placed = place(arguments, ROOM, shift=1)
    assert placed.values["v"].data_ptr() == placed.values["k"].data_ptr()
    assert all(torch.equal(placed.values[name], t) for name, t in arguments.items())
    assert list(placed.blocks) == ["k", "w", "x"]
    apart = place(arguments, ROOM, apart=frozenset({"v"}))
    assert apart.values["v"].data_ptr() != apart.values["k"].data_ptr()


def test_pure_outputs_are_found_by_changing_them() -> None:
    assert pure_outputs(get_spec("assign_extend_cache_locs")) == {"out"}
    assert pure_outputs(get_spec("rope_kv_write")) == {"k_cache", "v_cache"}
    assert pure_outputs(get_spec("kv_transfer")) == {"dst"}
    assert pure_outputs(get_spec("get_last_loc")) == set()


# --- the case list ----------------------------------------------------------------------------------


def test_every_sample_and_error_has_its_case() -> None:
    for op in BUILTIN:
        cases = cases_of(get_spec(op))
        assert len({c.id for c in cases}) == len(cases)
        assert {c.sample for c in cases if c.proof in ("value", "large")} == {
            s.name for s in get_spec(op).samples
        }
        assert {c.name for c in cases if c.proof == "errors"} == {e.name for e in get_spec(op).errors}
        assert {c.proof for c in cases} <= set(PROOFS)
        assert set(DEVICE_PROOFS) <= {c.proof for c in cases}


def test_the_hash_is_of_the_sources() -> None:
    assert len(suite_hash()) == 64
    assert suite_hash() == suite_hash()
    decide = (
        "conformance/_verdict.py", "conformance/proofs/value.py", "_remote/perform.py", "ops/spec.py", "kv/pool.py",
        "ops/proofs/judge.py", "_errors.py", "_host.py", "_memory.py",
    )  # fmt: skip
    assert {f"hal/{name}" for name in decide} <= set(suite_files())


@pytest.mark.parametrize("op", BUILTIN)
def test_no_case_passes_against_an_empty_function(op: str) -> None:
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    target = DirectTarget({op: Bound(nothing, always, "nothing")})
    for case in cases_of(get_spec(op)):
        result = run_case(case, target, get_spec(op), examples=5)
        expected = (FAILED, NOT_APPLICABLE) if case.proof in (*DEVICE_PROOFS, "placement") else (FAILED,)
        assert result.outcome in expected, f"{case.id}: {result.outcome} {result.reason}"


def test_what_is_kept_of_some_calls_alone_is_no_leak() -> None:
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
    assert "1,000 more tensors alive" in forever.reason


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


# --- verdict and waivers ----------------------------------------------------------------------------


CASES = [Case("op_a", "value", n) for n in "xy"] + [
    Case("op_a", "value", "f", tag="feature:f"),
    Case("op_b", "value", "z"),
]


def verdict(outcomes: dict[str, str], waivers: Any = (), certify: bool = True, **more: Any) -> dict[str, Any]:
    outcomes = {c.id: outcomes.get(c.name, PASSED) for c in CASES}
    return _report.verdict(
        CASES, outcomes, _waivers.read(waivers), core=["op_a"], certify=certify, today="2027-01-01", reasons={}, **more
    )  # fmt: skip


def test_certified_is_everything_required_and_nothing_failed() -> None:
    assert verdict({})["certified"]
    assert verdict({"f": REFUSED})["certified"]
    assert verdict({"x": NOT_APPLICABLE})["certified"]
    assert not verdict({}, certify=False)["certified"]
    for bad in (FAILED, REFUSED, NOT_RUN):
        result = verdict({"y": bad})
        assert not result["certified"]
        assert "op_a/value/y" in result["lacking"][0]
    assert not verdict({"f": FAILED})["certified"]
    assert not verdict({"z": FAILED})["certified"]


def test_what_did_not_run_is_never_passed() -> None:
    result = _report.verdict(CASES, {}, (), core=["op_a"], certify=True, today="2027-01-01", reasons={})
    assert result["counts"]["passed"] == 0
    assert result["counts"]["not_run"] == len(CASES)
    assert _report.exit_code(result, True) == 3


@pytest.mark.parametrize(
    ("waiver", "outcomes", "fault", "certified"),
    [
        (
            {"kind": "notyet", "op": "op_b", "case": "value/z", "expires": "2027-06-01"},
            {"z": FAILED},
            None,
            True,
        ),
        (
            {"kind": "notyet", "op": "op_b", "case": "value/z", "expires": "2026-06-01"},
            {"z": FAILED},
            "expired",
            False,
        ),
        ({"kind": "never", "op": "op_b", "case": "value/none"}, {}, "matches no case", False),
        ({"kind": "never", "op": "op_b", "case": "value/z"}, {}, "does not fail", False),
        ({"kind": "never", "op": "op_a", "case": "value/x"}, {"x": FAILED}, None, False),
    ],
)
def test_waivers(
    waiver: dict[str, str], outcomes: dict[str, str], fault: str | None, certified: bool
) -> None:
    result = verdict(outcomes, [{"reason": "r", **waiver}])
    assert result["certified"] == certified
    assert bool(result["waiver_faults"]) == (fault is not None)
    if fault is not None:
        assert fault in result["waiver_faults"][0]
        assert _report.exit_code(result, False) == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "perhaps", "op": "a", "case": "b", "reason": "c"},
        {"kind": "notyet", "op": "a", "case": "b", "reason": "c"},
        {"kind": "never", "op": "a", "case": "b"},
        {"kind": "never", "op": "a", "case": "b", "reason": "c", "expires": "soon"},
        {"kind": "never", "op": "a", "case": "b", "reason": "c", "tolerance": "10"},
    ],
)
def test_a_waiver_that_can_not_be_read_is_an_error(bad: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"waiver|isoformat"):
        _waivers.read([bad])


# --- a run ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a whole run, which takes minutes: ci/suite has just made one, and says where."""
    folder = Path(os.environ.get("REFERENCE_REPORT") or tmp_path_factory.mktemp("report"))
    if not os.environ.get("REFERENCE_REPORT"):
        assert main("reference", certify=True, report=folder, quiet=True) == 0
    for name in ("report.xml", "report.html"):
        assert (folder / name).read_text()
    return json.loads((folder / "report.json").read_text())  # type: ignore[no-any-return]


def test_reference_is_certified(report: dict[str, Any]) -> None:
    assert report["verdict"]["certified"], report["verdict"]["lacking"]
    assert report["verdict"]["counts"]["passed"] > 400
    assert all(0 < v <= 1 for row in _report.room(report["cases"]).values() for v in row.values())


def test_the_report_has_the_shape_of_its_schema(report: dict[str, Any]) -> None:
    schema = json.loads((ROOT / "hal/conformance/report.schema.json").read_text())
    assert misfits(report, schema) == []
    assert misfits({**report, "lane": "moon", "more": 1}, schema) == [
        "$: extra more", "$.lane: expected one of device, interpreter, lowered, got 'moon'",
    ]  # fmt: skip


def test_a_consistent_report_verifies(report: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    assert main(verify=path) == 0
    assert "not that the run took place" in capsys.readouterr().out
    assert main(verify=path, rerun=5) == 0
    assert "ran 5 cases again" in capsys.readouterr().out
    assert main(verify=tmp_path / "none.json") == 2


def test_what_is_no_report_is_said_so(report: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "report.json"
    whole = json.dumps(report)
    room = next(i for i, c in enumerate(report["cases"]) if c["headroom"])
    dtype = next(iter(report["cases"][room]["headroom"]))
    at = f"$.cases[{room}].headroom.{dtype}"

    def headroom(value: Any) -> str:
        other = json.loads(whole)
        other["cases"][room]["headroom"][dtype] = value
        return json.dumps(other)

    for text, says in (
        ("{}", "$: no schema"), ("[]", "$: expected object, got list"), ("null", "$: expected object, got None"),
        (whole[: len(whole) // 2], "not a report: "), ("", "not a report: "),
        (headroom(float("nan")), "NaN is no JSON"), (headroom(float("inf")), "Infinity is no JSON"),
        (headroom(-1), f"{at}: expected at least 0, got -1"), (headroom("0.5"), f"{at}: expected number, got '0.5'"),
        (headroom(True), f"{at}: expected number, got True"), (headroom(0.25).replace("0.25", "1e999"), at),
        (whole.replace("hal-conformance/2", "hal-conformance/1"), "schema 'hal-conformance/1'; expected"),
    ):  # fmt: skip
        path.write_text(text)
        assert main(verify=path) == 2, text[:80]
        assert says in capsys.readouterr().err


def _no_case(r: dict[str, Any]) -> None:
    r["cases"].pop()


def _twice(r: dict[str, Any]) -> None:
    r["cases"].append(r["cases"][0])


def _failed_one(r: dict[str, Any]) -> None:
    r["cases"][0]["outcome"] = FAILED


def _other_suite(r: dict[str, Any]) -> None:
    r["suite"]["hash"] = "0" * 64


def _beyond(r: dict[str, Any]) -> None:
    next(c for c in r["cases"] if c["headroom"])["headroom"] = {"bf16": 1.2}


def _optional(r: dict[str, Any]) -> None:
    r["cases"][0]["tag"] = "feature:x"


def _does_not_apply(r: dict[str, Any]) -> None:
    r["cases"][0]["outcome"] = NOT_APPLICABLE


def _fewer_ops(r: dict[str, Any]) -> None:
    r["suite"]["ops"] = r["suite"]["ops"][:1]
    r["cases"] = [c for c in r["cases"] if c["op"] == r["suite"]["ops"][0]]


def _simulated_on_the_device(r: dict[str, Any]) -> None:
    for c in r["cases"]:
        if c["op"] == "kv_transfer" and c["outcome"] == PASSED:
            c["outcome"] = SIMULATED
    counts = r["verdict"]["counts"]
    counts["simulated"] = sum(c["outcome"] == SIMULATED for c in r["cases"])
    counts["passed"] -= counts["simulated"]


def _graphs_on_a_cpu(r: dict[str, Any]) -> None:
    for c in r["cases"]:
        if c["proof"] == "graph":
            c["outcome"] = PASSED
            r["verdict"]["counts"]["passed"] += 1
            r["verdict"]["counts"]["not_applicable"] -= 1
            r["verdict"]["ran"] += 1


def _on_a_device_without_its_proofs(r: dict[str, Any]) -> None:
    r["device_type"] = "cuda"


def _lane_of_another(r: dict[str, Any]) -> None:
    """What a lowered report of ascend is, once its lane is written over."""
    r["backend"] = "ascend"


def _lane_it_has_not(r: dict[str, Any]) -> None:
    r["backend"], r["lane"] = "cpu", "lowered"


def _other_code(r: dict[str, Any]) -> None:
    r["code"]["files"]["hal/kv/pool.py"] = "0" * 64


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_no_case, "1 cases missing"), (_twice, "listed twice"), (_failed_one, "verdict."),
        (_other_suite, "made by another suite"), (_beyond, "passed with an error beyond the bound"),
        (_optional, "not the case of this suite"), (_does_not_apply, "always applies"),
        (_fewer_ops, "verdict."), (_simulated_on_the_device, "simulated, which it can not be in lane device"),
        (_graphs_on_a_cpu, "passed on a CPU, which has no graph"),
        (_on_a_device_without_its_proofs, "stream always applies on cuda"),
        (_lane_of_another, "lane device on cpu; ascend runs it on npu"),
        (_lane_it_has_not, "lane lowered, which cpu has not"),
        (_other_code, "the code is not what was judged: hal/kv/pool.py"),
    ],
)  # fmt: skip
def test_an_inconsistent_report_is_found_out(report: dict[str, Any], change: Any, says: str) -> None:
    other = json.loads(json.dumps(report))
    change(other)
    assert says in "; ".join(inconsistencies(other)[0])
    assert inconsistencies(report) == ([], [])


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


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"PYTEST_ADDOPTS": "--co"},
        {"PYTEST_ADDOPTS": "-p no:python", "PYTHONWARNINGS": "ignore"},
        {"PYTHONOPTIMIZE": "2"},
    ],
)
def test_no_configuration_saves_a_wrong_backend(hostile: Path, env: dict[str, str]) -> None:
    args = ["-m", "hal", "conformance", "mine", "--import", "mine", "--op", "get_last_loc", "--report", "out"]
    got = run(args, hostile, **env)
    assert got.returncode == 1, got.stdout + got.stderr
    cases = json.loads((hostile / "out/report.json").read_text())["cases"]
    assert sum(c["outcome"] == FAILED for c in cases) > 20


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("import os; os._exit(0)", "the process died (exit code 0)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "the process died (SIGKILL)"),
        ("import sys; sys.exit(0)", "the process died"),
        ("import time; time.sleep(99)", "hung: no call ended for 9 s"),
    ],
)
def test_a_dying_or_hanging_backend_fails_by_name_and_the_rest_goes_on(
    tmp_path: Path, body: str, says: str, monkeypatch: Any
) -> None:
    (tmp_path / "mine.py").write_text(
        EMPTY.format(body=f"if len(prefix_lens) == 1: {body}\n    return prefix_lens.clone()")
    )
    monkeypatch.chdir(tmp_path)
    wanted = ("get_last_loc/value/one", "get_last_loc/value/i64-i64", "get_last_loc/value/past-one-block")
    cases = [c for c in cases_of(get_spec("get_last_loc")) if c.id in wanted]
    outcome = run_backend("mine", "device", ["get_last_loc"], cases, imports=["mine"], silence=9.0)
    assert set(outcome.results) == set(wanted), outcome.fatal
    assert {r.outcome for r in outcome.results.values()} == {FAILED}
    assert says in outcome.results["get_last_loc/value/one"].reason


def test_several_jobs_say_what_one_says() -> None:
    cases = [c for c in cases_of(get_spec("get_last_loc")) if c.proof in ("value", "threads", "ragged")]
    one, three = (run_backend("reference", "device", ["get_last_loc"], cases, jobs=j) for j in (1, 3))
    assert {r.id: r.outcome for r in one.results.values()} == {
        r.id: r.outcome for r in three.results.values()
    }
    assert set(three.results) == {c.id for c in cases}
    assert (one.device, one.declared) == (three.device, three.declared)


def test_a_failing_example_runs_by_itself(hostile: Path) -> None:
    args = ["-m", "hal", "conformance", "mine", "--import", "mine", "--op", "get_last_loc", "--report", "out"]
    run(args, hostile)
    cases = {c["id"]: c for c in json.loads((hostile / "out/report.json").read_text())["cases"]}
    for case in ("get_last_loc/ragged/all", "get_last_loc/pages/i64-i64"):
        got = run(["-c", cases[case]["snippet"]], hostile)
        assert got.returncode == 1
        assert "AssertionError: " in got.stderr
        assert "return" in got.stderr


# --- under pytest -----------------------------------------------------------------------------------


def test_the_pytest_form(tmp_path: Path) -> None:
    plugin = ["-p", "hal.conformance.pytest_plugin"]
    help_ = run(["-m", "pytest", "--help"], tmp_path).stdout
    if "--hal-backend" in help_:
        plugin = []
    base = ["-m", "pytest", *plugin, "-q", "-p", "no:cacheprovider", "--pyargs", "hal.conformance"]
    got = run([*base, "--hal-backend", "reference", "--hal-op", "get_last_loc"], tmp_path)
    assert got.returncode == 0, got.stdout
    assert "72 passed, 5 skipped" in got.stdout
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


def test_junit_and_html_hold_what_failed() -> None:
    rows: list[dict[str, Any]] = [
        {
            **vars(c),
            "id": c.id,
            "outcome": o,
            "reason": r,
            "snippet": "import <x>",
            "headroom": {"bf16": 0.5},
            "seconds": 0.1,
        }
        for c, o, r in zip(
            CASES,
            (PASSED, FAILED, REFUSED, NOT_RUN),
            ("", "q[0]: 1 < 2 & wrong\x00\nat line 3", "no", "why"),
            strict=True,
        )
    ]
    document = {
        "backend": "b", "lane": "device", "device": "cpu", "date": "2027-01-01", "certify": True, "seconds": 1.0,
        "note": "", "code": {"files": {}, "sha256": "cd", "complete": True}, "trust": _report.trust(["own_op"]),
        "beyond_samples": {"seed": 3, **beyond_samples(["get_last_loc"], "device")},
        "suite": {"hash": "ab", "version": "1"}, "cases": rows,
        "waivers": [{"kind": "never", "op": "op_a", "case": "value/x", "reason": "<r>", "expires": None}],
        "environment": {
            "python": "3", "platform": "p", "distributions": [{"name": "n", "version": "1", "record_sha256": None}],
        },
        "verdict": verdict({"y": FAILED, "f": REFUSED, "z": NOT_RUN}),
    }  # fmt: skip
    from xml.etree import ElementTree

    root = ElementTree.fromstring(_writers.junit(document))
    assert [s.attrib["failures"] for s in root] == ["1", "0"]
    assert [s.attrib["skipped"] for s in root] == ["1", "1"]
    html = _writers.page(document)
    assert "<script" not in html
    assert "http" not in html
    assert "q[0]: 1 &lt; 2 &amp; wrong" in html
    text = _report.terminal(document)
    assert "FAILED op_a/value/y" in text
    assert "NOT CERTIFIED" in text
    assert "own_op" in text
    assert "own_op" in html
    assert "1/2 1 FAILED" in _report.cell({PASSED: 1, FAILED: 1})
    # What failed comes first: in a line, how to run it again, the rest; what has not run comes last.
    order = ("Failed: 1", "q[0]: 1 &lt; 2", "import &lt;x&gt;", "<pre>at line 3</pre>", "<svg", "Not run: 1")
    places = [html.index(part) for part in order]
    assert places == sorted(places)
    assert text.index("FAILED op_a/value/y") < text.index("    import <x>") < text.index("  at line 3")


def test_the_picture_has_a_square_for_each_op_and_feature() -> None:
    rows: list[dict[str, Any]] = [
        {"op": op, "proof": proof, "tag": tag, "outcome": outcome}
        for op, proof, tag, outcome in (
            ("a", "value", "required", PASSED), ("a", "pages", "required", NOT_APPLICABLE),
            ("a", "value", "feature:fp8", REFUSED), ("a", "supports", "feature:fp8", PASSED),
            ("b", "value", "required", PASSED), ("b", "value", "required", FAILED),
            ("b", "supports", "feature:mla", FAILED), ("c", "value", "required", SIMULATED),
            ("d", "value", "required", NOT_RUN),
        )
    ]  # fmt: skip
    assert _picture.columns(rows) == ["required", "fp8", "mla"]
    assert _picture.squares(rows) == {
        "a": {"required": "passed", "fp8": "refused"}, "b": {"required": "failed", "mla": "failed"},
        "c": {"required": "simulated"}, "d": {"required": "not run"},
    }  # fmt: skip
    picture = _picture.svg(rows)
    assert picture.count("<rect") == 6 + 5  # and the legend
    assert "<title>b, mla: failed</title>" in picture


def test_a_matrix_has_the_ops_that_ran_and_cuts_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "an_op_of_a_name_that_is_long_indeed"
    rows = [
        {"op": op, "proof": "value", "tag": "required", "outcome": outcome, "reason": reason}
        for op, outcome, reason in (
            ("one", PASSED, ""), (long, PASSED, ""), (long + "_too", FAILED, "no"), ("left", NOT_RUN, "x has no left"),
            ("out", NOT_RUN, "x has no out"),
        )
    ]  # fmt: skip
    narrow, wide = _report._matrix(rows, 80), _report._matrix(rows, 200)
    assert max(map(len, narrow)) <= 80
    for lines in (narrow, wide):
        heads = [
            word for line in lines for word in line.split() if word not in ("value", "1", "0/1", "FAILED")
        ]
        assert heads == ["one", long, long + "_too"]
    assert sum(line == "" for line in narrow) == 2
    assert sum(line == "" for line in wide) == 1
    assert _report._skipped(rows) == ["", "not run: 2 ops, 2 cases: x has none of these: left, out"]


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
    for _ in range(300):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the worker outlived its runner")
