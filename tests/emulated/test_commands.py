"""What a person with an NPU types first, on the emulated one: and nothing of it is said to have run on a device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hal.conformance._cases import case_list
from hal.conformance._find import find, job_for
from hal.conformance._result import NOT_APPLICABLE, PASSED, Case
from hal.conformance._run import main, run
from hal.conformance._verify import inconsistencies, read
from hal.ops import BUILTIN, get_spec


def told(*command: str) -> Any:
    """What a command of hal writes as JSON, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "hal", *command], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_info_has_the_devices_by_their_names() -> None:
    found = {b["name"]: b for b in told("info", "--json")["backends"]}["ascend"]
    assert found["lanes"]["device"]["state"] == "ready"
    assert found["status"] == {f"npu:{i}": "Ascend910B3, emulated" for i in range(2)}


def test_doctor_names_the_lane() -> None:
    rows = told("doctor", "--json", "--backend", "ascend", "--op", "kv_transfer", "--op", "alloc_decode")["results"]
    assert {(r["op"], r["ok"]) for r in rows if r["lane"] == "emulated"} == {
        ("kv_transfer", True),
        ("alloc_decode", True),
    }
    assert not any(r["lane"] == "device" for r in rows)


def test_the_reports_questions_to_a_device_are_answered() -> None:
    """`hal doctor --report`'s step ``device npu``, row by row."""
    command = [sys.executable, "-m", "hal._report_steps", "device", "npu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert {name for name, row in rows.items() if not row["ok"]} == set(), rows
    assert rows["npu:1"]["saw"] == "Ascend910B3, emulated"
    assert rows["triton's device"]["saw"]["num_vectorcore"] == 40
    assert {rows[name]["saw"] for name in ("a side stream", "pinned copies", "batched copies")} == {"right"}
    assert rows["timed events"]["saw"].endswith(" ms")


PROOFS = {"value": 1, "misaligned": 1, "defaults": 1, "threads": 1, "later": 1, "empty": 1, "placement": 9}
"""How many cases of each."""
OF_CORE_OPS = {"stream": 1, "sync": 1, "memory": 1}


def some(op: str) -> list[Case]:
    cases = [c for c in case_list({op: get_spec(op)}) if c.tag == "required"]
    proofs = PROOFS | (OF_CORE_OPS if get_spec(op).core else {})
    return [c for proof, count in proofs.items() for c in [c for c in cases if c.proof == proof][:count]]


def test_the_suite_judges_every_op_on_the_second_device() -> None:
    cases = [case for op in BUILTIN for case in some(op)]
    with find(job_for("ascend", "device", "npu:1", silence=1800)) as worker:
        assert (worker.lane, worker.about["device"]) == ("emulated", "Ascend910B3, emulated (npu:1)")
        results = run(worker, cases).results
    wrong = {i: r.reason for i, r in results.items() if r.outcome not in (PASSED, NOT_APPLICABLE)}
    # Which a kernel can't do there, and the suite asks of every backend.
    refused = {i: wrong.pop(f"kv_transfer/placement/{i}") for i in ("device-to-host", "host-to-device")}
    assert all("device_slots" in why for why in refused.values())
    assert not wrong
    assert len(results) == len(cases)


def test_a_report_says_emulated_and_never_certifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("ascend", ["alloc_decode"], "device", tmp_path, timeout=1800, quiet=True) == 0
    path = tmp_path / "report.json"
    report = read(path)
    assert (report["lane"], report["verdict"]["certified"], report["verdict"]["failed"]) == ("emulated", False, [])
    assert main(verify=path) == 0
    assert "lane emulated: not certified" in capsys.readouterr().out
    for forged in ({"certify": True}, {"certify": True, "lane": "device"}):
        assert inconsistencies({**report, **forged})[0], forged
    assert main("ascend", None, "device", certify=True, quiet=True) == 3
    assert "an emulated device is never certified" in capsys.readouterr().err
