"""Runs the suite on each fault until something kills it, and keeps the score."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hal._remote.target import DirectTarget
from hal.conformance._cases import cases_of
from hal.conformance._result import FAILED, Case
from hal.conformance._run import run_backend
from hal.conformance.proofs.run import run_case
from hal.ops import get_spec
from sabotage._healthy import Fault, healthy

SILENCE = 20.0
"""Seconds after which a silent worker counts as hung; the case it runs takes milliseconds."""


@dataclass(frozen=True)
class Kill:
    """What became of a fault. `case` is what killed it; empty: it survived, or was not run."""

    fault: Fault
    outcome: str
    case: str = ""
    message: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "fault": self.fault.name,
            "op": self.fault.op,
            "outcome": self.outcome,
            "killed_by": self.case,
            "message": self.message,
        }


def backend_of(fault: Fault) -> str:
    return "sabotaged-" + fault.name.replace(" ", "-")


def candidates(fault: Fault) -> Iterator[Case]:
    for proof in fault.proofs:
        yield from (c for c in cases_of(get_spec(fault.op)) if c.proof == proof)


def kill(fault: Fault, device: str = "cpu") -> Kill:
    """Runs cases on the fault until one fails for the reason that the fault names."""
    began = time.perf_counter()

    def done(outcome: str, case: str = "", message: str = "") -> Kill:
        return Kill(fault, outcome, case, message, time.perf_counter() - began)

    if device not in fault.device:
        return done("not run", message=f"needs {' or '.join(fault.device)}")
    if fault.plugin:
        return _kill_installed(fault, done)
    if fault.dies:
        return _kill_in_worker(fault, done)
    target = DirectTarget({fault.op: fault.make()}, backend_of(fault), device=torch.device(device))
    others = []
    for case in candidates(fault):
        result = run_case(case, target, get_spec(fault.op), examples=30)
        if result.outcome == FAILED:
            if re.search(fault.message, result.reason):
                return done("killed", result.id, result.reason)
            others.append(f"{result.id}: {result.reason}")
    return done("survived", message="; ".join(others[:2]))


def _kill_in_worker(fault: Fault, done: Any) -> Kill:
    # One case is enough for what ends a process, and each costs a process.
    cases = list(candidates(fault))[:1]
    outcome = run_backend(backend_of(fault), "device", [fault.op], cases, imports=["sabotage._plugin"], silence=SILENCE)
    if outcome.fatal:
        return done("survived", message=outcome.fatal)
    for result in outcome.results.values():
        if result.outcome == FAILED and re.search(fault.message, result.reason):
            return done("killed", result.id, result.reason)
    return done("survived", message="; ".join(f"{r.id} {r.outcome}: {r.reason}" for r in outcome.results.values()))


def install(folder: Path, name: str, sources: Mapping[str, str]) -> None:
    """Writes a plugin's distribution: what an installer would leave behind."""
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[hal.backends]\n{name} = {name}\n")
    (folder / f"{name}.py").write_text(sources["manifest"])
    (folder / f"{name}_kernels.py").write_text(sources["kernels"])


def _kill_installed(fault: Fault, done: Any) -> Kill:
    assert fault.plugin is not None
    name = fault.name.replace(" ", "_")
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder), name, fault.plugin)
        path = os.pathsep.join([folder, *(os.path.abspath(p) for p in sys.path if p)])
        ended = subprocess.run(
            [sys.executable, "-m", "hal", "conformance", name, "--op", fault.op, "--report", "out"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=600,
        )
        report = Path(folder, "out", "report.json")
        if ended.returncode != 1 or not report.exists():
            return done("survived", message=f"exit code {ended.returncode}: {ended.stderr[-300:]}")
        rows = json.loads(report.read_text())["cases"]
    for case in candidates(fault):
        row = next(r for r in rows if r["id"] == case.id)
        if row["outcome"] == FAILED and re.search(fault.message, row["reason"]):
            return done("killed", case.id, row["reason"])
    return done("survived", message="; ".join(f"{r['id']}: {r['reason']}" for r in rows[:2]))


@functools.cache
def false_alarm(op: str, name: str, device: str = "cpu") -> str:
    """What a case that has killed says against a healthy backend: nothing, or the kill means nothing."""
    target = DirectTarget({op: healthy(op)}, "healthy", device=torch.device(device))
    (case,) = [c for c in cases_of(get_spec(op)) if c.id == name]
    result = run_case(case, target, get_spec(op), examples=30)
    return f"{result.id}: {result.reason}" if result.outcome == FAILED else ""
