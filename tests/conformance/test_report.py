"""Verdict, waivers, and the report: what it says, and that a report which is not consistent is found out."""

from __future__ import annotations

import functools
import json
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conformance.child import ROOT

from hal.conformance import _picture, _report, _waivers, _writers, main
from hal.conformance._result import FAILED, NOT_APPLICABLE, NOT_RUN, PASSED, REFUSED, SIMULATED, Case
from hal.conformance._schema import misfits
from hal.conformance._verify import beyond_samples, inconsistencies

# --- verdict and waivers ----------------------------------------------------------------------------


CASES = [Case("op_a", "value", n) for n in "xy"] + [
    Case("op_a", "value", "f", tag="feature:f"),
    Case("op_b", "value", "z"),
]


def verdict(outcomes: dict[str, str], waivers: Any = (), certify: bool = True, **more: Any) -> dict[str, Any]:
    outcomes = {c.id: outcomes.get(c.name, PASSED) for c in CASES}
    return _report.verdict(
        CASES, outcomes, _waivers.read(waivers), core=["op_a"], certify=certify, today="2027-01-01", reasons={}, **more
    )


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
        ({"kind": "notyet", "op": "op_b", "case": "value/z", "expires": "2027-06-01"}, {"z": FAILED}, None, True),
        ({"kind": "notyet", "op": "op_b", "case": "value/z", "expires": "2026-06-01"}, {"z": FAILED}, "expired", False),
        ({"kind": "never", "op": "op_b", "case": "value/none"}, {}, "matches no case", False),
        ({"kind": "never", "op": "op_b", "case": "value/z"}, {}, "does not fail", False),
        ({"kind": "never", "op": "op_a", "case": "value/x"}, {"x": FAILED}, None, False),
    ],
)
def test_waivers(waiver: dict[str, str], outcomes: dict[str, str], fault: str | None, certified: bool) -> None:
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
    """Of a whole run, which takes minutes: ci/suite has just made one, or has one of this code, and says where."""
    folder = tmp_path_factory.mktemp("report")
    given = os.environ.get("CPU_REPORT")
    if not given:
        assert main("cpu", certify=True, report=folder, quiet=True) == 0
    report = _writers.Report.read(Path(given or folder) / "report.json")
    written = _writers.write(report, folder)
    assert [p.name for p in written if p.read_text()] == ["report.json", "report.xml", "report.html"]
    assert json.loads(written[0].read_text()) == report
    return report


def test_it_is_certified(report: dict[str, Any]) -> None:
    assert report["verdict"]["certified"], report["verdict"]["lacking"]
    assert report["verdict"]["counts"]["passed"] > 400
    assert all(0 < v <= 1 for row in _report.room(report["cases"]).values() for v in row.values())


def test_the_report_has_the_shape_of_its_schema(report: dict[str, Any]) -> None:
    schema = json.loads((ROOT / "hal/conformance/report.schema.json").read_text())
    assert misfits(report, schema) == []
    assert misfits({**report, "lane": "moon", "more": 1}, schema) == [
        "$: extra more",
        "$.lane: expected one of device, emulated, interpreter, lowered, got 'moon'",
    ]


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
        ("{}", "$: no schema"),
        ("[]", "$: expected object, got list"),
        ("null", "$: expected object, got None"),
        (whole[: len(whole) // 2], "not a report: "),
        ("", "not a report: "),
        (headroom(float("nan")), "NaN is no JSON"),
        (headroom(float("inf")), "Infinity is no JSON"),
        (headroom(-1), f"{at}: expected at least 0, got -1"),
        (headroom("0.5"), f"{at}: expected number, got '0.5'"),
        (headroom(True), f"{at}: expected number, got True"),
        (headroom(0.25).replace("0.25", "1e999"), at),
        (whole.replace("hal-conformance/2", "hal-conformance/1"), "schema 'hal-conformance/1'; expected"),
    ):
        path.write_text(text)
        assert main(verify=path) == 2, text[:80]
        assert says in capsys.readouterr().err


def put(*way: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(r: dict[str, Any]) -> None:
        functools.reduce(operator.getitem, way[:-1], r)[way[-1]] = value

    return change


def _beyond(r: dict[str, Any]) -> None:
    next(c for c in r["cases"] if c["headroom"])["headroom"] = {"bf16": 1.2}


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


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r["cases"].pop(), "1 cases missing"),
        (lambda r: r["cases"].append(r["cases"][0]), "listed twice"),
        (put("cases", 0, "outcome", value=FAILED), "verdict."),
        (put("suite", "hash", value="0" * 64), "made by another suite"),
        (_beyond, "passed with an error beyond the bound"),
        (put("cases", 0, "tag", value="feature:x"), "not the case of this suite"),
        (put("cases", 0, "outcome", value=NOT_APPLICABLE), "always applies"),
        (_fewer_ops, "verdict."),
        (_simulated_on_the_device, "simulated, which it can not be in lane device"),
        (_graphs_on_a_cpu, "passed on a CPU, which has no graph"),
        (put("device_type", value="cuda"), "stream always applies on cuda"),
        # What a lowered report of ascend is, once its lane is written over.
        (put("backend", value="ascend"), "lane device on cpu; ascend runs it on npu"),
        (put("lane", value="lowered"), "lane lowered, which cpu has not"),
        (put("code", "files", "hal/kv/pool.py", value="0" * 64), "the code is not what was judged: hal/kv/pool.py"),
    ],
)
def test_an_inconsistent_report_is_found_out(report: dict[str, Any], change: Any, says: str) -> None:
    other = json.loads(json.dumps(report))
    change(other)
    assert says in "; ".join(inconsistencies(other)[0])
    assert inconsistencies(report) == ([], [])


# --- how it is shown -------------------------------------------------------------------------------


def test_junit_and_html_hold_what_failed() -> None:
    reasons = ("", "q[0]: 1 < 2 & wrong\x00\nat line 3", "no", "why")
    same = {"snippet": "import <x>", "headroom": {"bf16": 0.5}, "seconds": 0.1}
    rows: list[dict[str, Any]] = [
        {**vars(c), "id": c.id, "outcome": o, "reason": r, **same}
        for c, o, r in zip(CASES, (PASSED, FAILED, REFUSED, NOT_RUN), reasons, strict=True)
    ]
    document = {
        "backend": "b",
        "lane": "device",
        "device": "cpu",
        "date": "2027-01-01",
        "certify": True,
        "seconds": 1.0,
        "note": "",
        "code": {"files": {}, "sha256": "cd", "complete": True},
        "trust": _report.trust(["own_op"]),
        "beyond_samples": {"seed": 3, **beyond_samples(["get_last_loc"], "device")},
        "suite": {"hash": "ab", "version": "1"},
        "cases": rows,
        "waivers": [{"kind": "never", "op": "op_a", "case": "value/x", "reason": "<r>", "expires": None}],
        "environment": {
            "python": "3",
            "platform": "p",
            "distributions": [{"name": "n", "version": "1", "record_sha256": None}],
        },
        "verdict": verdict({"y": FAILED, "f": REFUSED, "z": NOT_RUN}),
    }
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
            ("a", "value", "required", PASSED),
            ("a", "pages", "required", NOT_APPLICABLE),
            ("a", "value", "feature:fp8", REFUSED),
            ("a", "supports", "feature:fp8", PASSED),
            ("b", "value", "required", PASSED),
            ("b", "value", "required", FAILED),
            ("b", "supports", "feature:mla", FAILED),
            ("c", "value", "required", SIMULATED),
            ("d", "value", "required", NOT_RUN),
        )
    ]
    assert _picture.columns(rows) == ["required", "fp8", "mla"]
    assert _picture.squares(rows) == {
        "a": {"required": "passed", "fp8": "refused"},
        "b": {"required": "failed", "mla": "failed"},
        "c": {"required": "simulated"},
        "d": {"required": "not run"},
    }
    picture = _picture.svg(rows)
    assert picture.count("<rect") == 6 + 5  # and the legend
    assert "<title>b, mla: failed</title>" in picture


def test_a_matrix_has_the_ops_that_ran_and_cuts_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "an_op_of_a_name_that_is_long_indeed"
    rows = [
        {"op": op, "proof": "value", "tag": "required", "outcome": outcome, "reason": reason}
        for op, outcome, reason in (
            ("one", PASSED, ""),
            (long, PASSED, ""),
            (long + "_too", FAILED, "no"),
            ("left", NOT_RUN, "x has no left"),
            ("out", NOT_RUN, "x has no out"),
        )
    ]
    narrow, wide = _report._matrix(rows, 80), _report._matrix(rows, 200)
    assert max(map(len, narrow)) <= 80
    for lines in (narrow, wide):
        heads = [word for line in lines for word in line.split() if word not in ("value", "1", "0/1", "FAILED")]
        assert heads == ["one", long, long + "_too"]
    assert sum(line == "" for line in narrow) == 2
    assert sum(line == "" for line in wide) == 1
    assert _report._skip_lines(rows) == ["", "not run: 2 ops, 2 cases: x has none of these: left, out"]
