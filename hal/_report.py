"""``hal doctor --report``: all that one needs to know of a machine out of reach, in one file, nothing private.

Every step is a process of its own with a time box: one that fails, dies or hangs is a finding, and the next one runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hal import _doctor
from hal._errors import ArgumentError
from hal._private import redact

FORMAT = "hal-report/1"
SCHEMA = Path(__file__).with_name("report.schema.json")
Step = dict[str, Any]


def main(file: Path, ops: Sequence[str] | None, backends: Sequence[str] | None, timeout: float) -> int:
    """Writes FILE and a text beside it, and prints the text. 0 all right, 1 some step was not."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as e:
        raise ArgumentError("doctor", "--report", "a file that can be written", f"{file}: {e.strerror}") from None
    steps: list[Step] = []
    for step in run(ops, backends, timeout):
        print(_line(redact(step)), flush=True)
        steps.append(step)
        # Anew after each step: what ends this process loses one.
        report = {"format": FORMAT, "steps": redact(steps)}
        file.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    text = file.with_suffix(".txt")
    text.write_text("\n".join(lines(report)) + "\n", encoding="utf-8")
    print(f"\nwrote {file.name} and {text.name}: look through them before you give them away")
    return int(any(s["ok"] is False for s in steps))


def run(ops: Sequence[str] | None, backends: Sequence[str] | None, timeout: float) -> Iterator[Step]:
    """Each step as it ends."""
    yield _step("machine", timeout)
    states = _step("states", timeout)
    yield states
    ready = [r for r in states["rows"] if r.get("state") == "ready" and (not backends or r["backend"] in backends)]
    for kind in dict.fromkeys(r["devices"][0] for r in ready if r["lane"] == "device"):
        yield _step("device", timeout, kind)
    for row in ready:
        todo = [op for op in row["ops"] if not ops or op in ops]
        if todo:
            step = _ops(row["backend"], row["lane"], todo, timeout)
            yield step
            right = [r["op"] for r in step["rows"] if r["ok"]]
            # A simulated lane's time says nothing.
            if right and row["lane"] == "device":
                yield _step("times", timeout, row["backend"], *right)


def _step(name: str, timeout: float, *arguments: str) -> Step:
    begin = time.perf_counter()
    env = dict(os.environ)
    if name != "machine":
        env |= {"HAL_BACKEND": "", "HAL_LANE": ""}
    command = [sys.executable, "-m", "hal._report_steps", name, *arguments]
    out, died = _doctor.ask(command, env, timeout, each=True)
    rows = [json.loads(line) for line in out if line.startswith('{"')]
    return _make_step(" ".join([name, *arguments[:1]]), begin, rows, died)


def _ops(backend: str, lane: str, ops: Sequence[str], timeout: float) -> Step:
    """Every op, small. What an op that died or hung kept from running is run again without it."""
    begin, rows, todo = time.perf_counter(), [], list(ops)
    while todo:
        got = _doctor._child(backend, lane, todo, timeout, each=True)
        rows += [r for r in got if r["saw"] != "not reached"]
        todo = [r["op"] for r in got if r["saw"] == "not reached"]
    return _make_step(f"ops {backend} {lane}", begin, rows, "")


def _make_step(step: str, begin: float, rows: list[dict[str, Any]], died: str) -> Step:
    ok = not died and all(r.get("ok", True) is not False for r in rows)
    return {"step": step, "ok": ok, "seconds": round(time.perf_counter() - begin, 2), "error": died, "rows": rows}


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The report to read: a line a step, and what it found."""
    for step in report["steps"]:
        yield _line(step)
        for row in step["rows"]:
            shown = {k: v for k, v in row.items() if v not in ("", None, [], {}) and k not in ("detail", "ops")}
            yield "    " + "  ".join(f"{k}={v}" for k, v in shown.items())
            yield from (f"        {line}" for line in row.get("detail", ()))


def _line(step: Step) -> str:
    wrong = [r for r in step["rows"] if r.get("ok") is False]
    found = step["error"] or (f"{len(wrong)} of {len(step['rows'])} wrong" if wrong else f"{len(step['rows'])} rows")
    return f"{'ok   ' if step['ok'] else 'WRONG'} {step['step']}: {found} ({step['seconds']:g} s)"
