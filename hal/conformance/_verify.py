"""Checking a report: its shape, whether its verdict follows from its cases, and whether the code is still the same."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from hal._devices import EMULATED
from hal.conformance import _report, _waivers
from hal.conformance._cases import DEVICE_PROOFS, case_list
from hal.conformance._result import NOT_APPLICABLE, OUTCOMES, PASSED, SIMULATED, Case
from hal.conformance._schema import misfits
from hal.conformance._sources import changed, code_of, suite_hash
from hal.conformance.proofs import fresh, soak
from hal.ops import BUILTIN, get_spec
from hal.ops.spec import PoolArg
from hal.registry._points import BUILTIN as BACKENDS

MAY_NOT_APPLY = ("pages", "determinism", "placement", *DEVICE_PROOFS)
ALWAYS_ON_A_DEVICE = ("stream", "sync", "memory")


def read(path: Path) -> dict[str, Any]:
    """A report, of the shape that its schema says.

    Raises:
        OSError, ValueError: there is none; the text says where it breaks the schema.
    """

    def none(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    report = json.loads(path.read_text(encoding="utf-8"), parse_constant=none)
    if isinstance(report, dict) and report.get("schema") not in (None, _report.SCHEMA):
        raise ValueError(f"schema {report['schema']!r:.60}; expected {_report.SCHEMA!r}")
    schema = json.loads(resources.files("hal.conformance").joinpath("report.schema.json").read_text("utf-8"))
    wrong = misfits(report, schema)
    if wrong:
        raise ValueError("; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""))
    datetime.date.fromisoformat(report["date"])
    return report  # type: ignore[no-any-return]


def core_ops() -> list[str]:
    """The ops that a certified backend must have."""
    return [name for name in BUILTIN if get_spec(name).core]


def beyond_samples(ops: Sequence[str], lane: str) -> dict[str, Any]:
    """How far and how long the lane is tried beyond the fixed samples: what a slow lane leaves out stands here."""
    specs = {op: get_spec(op) for op in ops if op in BUILTIN}
    # As JSON has it, so that a report that was read is compared with equals.
    told: dict[str, Any] = json.loads(json.dumps({"fresh": fresh.plan(specs, lane), "soak": soak.plan(lane)}))
    return told


def simulates(case: Case, lane: str) -> bool:
    """Does the lane stand in for what this case is about? Between two pools rows may cross from one memory to
    another, which no kernel does on a lowered device."""
    if lane != "lowered" or case.op not in BUILTIN:
        return False
    return sum(isinstance(a, PoolArg) for a in get_spec(case.op).args.values()) > 1


def inconsistencies(report: Mapping[str, Any], theirs: Sequence[Case] = ()) -> tuple[list[str], list[str]]:
    """(what in a report does not follow from its own raw cases, this suite's case list and this code; remarks).

    Args:
        report: of the schema's shape.
        theirs: the cases of ops that a plugin brings.
    """
    wrong: list[str] = []
    if report["suite"]["hash"] != suite_hash():
        wrong.append(f"made by another suite: {report['suite']['hash'][:12]}; this is {suite_hash()[:12]}")
    ops = report["suite"]["ops"]
    unknown = [op for op in ops if op not in BUILTIN and op not in {c.op for c in theirs}]
    if unknown:
        return [*wrong, f"unknown ops: {', '.join(unknown)}"], []
    cases = [*case_list({op: get_spec(op) for op in ops if op in BUILTIN}), *theirs]
    rows = {r["id"]: r for r in report["cases"]}
    if len(rows) != len(report["cases"]):
        wrong.append(f"{len(report['cases']) - len(rows)} cases are listed twice")
    lacking = [c.id for c in cases if c.id not in rows]
    extra = sorted(set(rows) - {c.id for c in cases})
    wrong += [
        f"{len(ids)} cases {what}, first {ids[0]}" for ids, what in ((lacking, "missing"), (extra, "unknown")) if ids
    ]
    for case in cases:
        if case.id in rows:
            wrong += _case(case, rows[case.id], report)
    wrong += _place(report)
    told, due = dict(report["beyond_samples"]), beyond_samples(ops, report["lane"])
    del told["seed"]
    if told != due:
        wrong.append(
            f"beyond_samples: the suite does {_short(due)} on lane {report['lane']}, the report {_short(told)}"
        )
    try:
        waivers = _waivers.read(
            {k: v for k, v in w.items() if v is not None or k != "expires"} for w in report["waivers"]
        )
    except ValueError as e:
        return [*wrong, str(e)], []
    again = _report.verdict(
        cases,
        {i: r["outcome"] for i, r in rows.items()},
        waivers,
        core=core_ops(),
        certify=report["certify"],
        today=report["date"],
        reasons={i: r["reason"] for i, r in rows.items()},
    )
    for key, value in again.items():
        if report["verdict"].get(key) != value:
            wrong.append(
                f"verdict.{key}: the cases say {_short(value)}, the report {_short(report['verdict'].get(key))}"
            )
    code, remarks = _code(report)
    return wrong + code, remarks


def _case(case: Case, row: Mapping[str, Any], report: Mapping[str, Any]) -> list[str]:
    wrong = []
    outcome = row["outcome"]
    if outcome not in OUTCOMES:
        wrong.append(f"{case.id}: unknown outcome {outcome!r}")
    if any(row[k] != v for k, v in asdict(case).items()):
        wrong.append(f"{case.id}: not the case of this suite")
    if outcome in (PASSED, SIMULATED) and any(v > 1 for v in row["headroom"].values()):
        wrong.append(f"{case.id}: passed with an error beyond the bound")
    if outcome in (PASSED, SIMULATED) and (outcome == SIMULATED) != simulates(case, report["lane"]):
        wrong.append(f"{case.id}: {outcome}, which it can not be in lane {report['lane']}")
    if outcome == NOT_APPLICABLE and case.proof not in MAY_NOT_APPLY:
        wrong.append(f"{case.id}: {case.proof} always applies")
    on_cpu = report["device_type"] == "cpu"
    if on_cpu and case.proof in (*DEVICE_PROOFS, "placement") and outcome in (PASSED, SIMULATED):
        wrong.append(f"{case.id}: passed on a CPU, which has no {case.proof}")
    if not on_cpu and case.proof in ALWAYS_ON_A_DEVICE and outcome == NOT_APPLICABLE:
        wrong.append(f"{case.id}: {case.proof} always applies on {report['device_type']}")
    return wrong


def _place(report: Mapping[str, Any]) -> list[str]:
    """Whether the backend has that lane, on that type of device."""
    lanes = _lanes(report["backend"]) or report["lanes"]
    if lanes is None:
        return []
    lane, device = report["lane"], report["device_type"]
    if lane == EMULATED:
        if report["certify"]:
            return ["an emulated device, which is never certified"]
        lane = "device"
    if lane not in lanes:
        return [f"lane {lane}, which {report['backend']} has not; it has {', '.join(lanes)}"]
    if device not in lanes[lane]:
        return [f"lane {lane} on {device}; {report['backend']} runs it on {', '.join(lanes[lane])}"]
    return []


def _lanes(backend: str) -> dict[str, list[str]] | None:
    """Those of one of our own backends: their manifests are hal's code, not a plugin's."""
    name = backend.partition("/")[0]
    if name not in BACKENDS:
        return None
    manifest = import_module(BACKENDS[name]).hal_backend()
    return {lane: list(types) for lane, types in manifest.lanes.items()}


def _code(report: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(what was judged and is another thing now, what could not be looked at)."""
    now = code_of(report["backend"])
    if not now["complete"] and report["code"]["complete"]:
        return [], [f"the sources of {report['backend']} are not here: that they are what was judged is not known"]
    files = changed(report["code"], now)
    if not files and now["sha256"] == report["code"]["sha256"]:
        return [], []
    named = ", ".join(files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
    return [f"the code is not what was judged: {named or 'the hash of all files'}"], []


def _short(value: Any) -> str:
    return f"{value!r:.120}"
