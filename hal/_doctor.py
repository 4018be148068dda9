"""``hal doctor``: every op, small, on every ready backend, in a child process each; and what it saw."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any, TextIO

from rich.console import Console

from hal._output import data_output
from hal._show import Grid


def main(ops: Sequence[str] | None, backends: Sequence[str] | None, timeout: float, as_json: bool) -> int:
    """Runs the children and shows the outcome. 0 all right, 1 something is wrong, 3 nothing ran."""
    if not as_json:
        rows, notes = _examine(ops, backends, timeout)
        _show(rows, notes)
    else:
        with data_output() as out:
            rows, notes = _examine(ops, backends, timeout)
            print(json.dumps({"results": rows, "notes": notes}, indent=2), file=out)
    ran = [r for r in rows if r["ok"] is not None]
    return 3 if not ran else int(not all(r["ok"] for r in ran))


def _examine(
    ops: Sequence[str] | None, backends: Sequence[str] | None, timeout: float
) -> tuple[list[dict[str, Any]], list[str]]:
    from hal.registry import current

    table = current()
    for op in ops or ():
        table.spec(op)
    for name in backends or ():
        table.parse(name, "--backend {}")
    rows: list[dict[str, Any]] = []
    plan = [("reference", "device", list(table.op_names))]
    for name, entry in table.entries.items():
        for lane in entry.lanes or ("device",):
            state = entry.state(lane)
            have = [op for op in table.op_names if entry.usual(op)]
            if state.ready and have:
                plan.append((name, lane, have))
            elif not state.ready:
                rows.append({"backend": name, "lane": lane, "op": "", "ok": None, "saw": str(state)})
    for name, lane, have in plan:
        todo = [op for op in have if not ops or op in ops]
        if todo and (not backends or name in backends):
            rows += _child(name, lane, todo, timeout)
    return [r for r in rows if not backends or r["backend"] in backends], _notes()


def _child(backend: str, lane: str, ops: Sequence[str], timeout: float, each: bool = False) -> list[dict[str, Any]]:
    """One backend's ops in a process of their own: its crash or hang is an outcome, not ours."""
    env = {**os.environ, "HAL_LANE": lane, "HAL_BACKEND": "", "HAL_CHECKS": "args"}
    if lane == "interpreter":
        env["TRITON_INTERPRET"] = "1"
    else:
        env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "hal._doctor", backend, lane, *ops]
    out, died = ask(command, env, timeout, each)
    rows = [json.loads(line) for line in out if line.startswith('{"backend"')]
    seen = {r["op"] for r in rows}
    lost = [op for op in ops if op not in seen]
    if lost:
        rows.append({"backend": backend, "lane": lane, "op": lost[0], "ok": False, "saw": died or "no answer"})
        rows += [{"backend": backend, "lane": lane, "op": op, "ok": False, "saw": "not reached"} for op in lost[1:]]
    return rows


def ask(command: Sequence[str], env: dict[str, str], timeout: float, each: bool = False) -> tuple[list[str], str]:
    """(the lines that a child printed, how it died or nothing). Past its time it goes, with all that it started.

    Args:
        timeout: seconds for the child; with `each`, for each line that it prints.
    """
    # To files: what a child left running would keep a pipe open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(command, env=env, stdout=out, stderr=err, start_new_session=True)
        code, died, printed, end = None, "", 0, time.monotonic() + timeout
        try:
            while code is None and not died:
                with suppress(subprocess.TimeoutExpired):
                    code = child.wait(0.1)
                size = os.fstat(out.fileno()).st_size
                if each and size > printed:
                    printed, end = size, time.monotonic() + timeout
                if code is None and time.monotonic() > end:
                    died = f"no answer within {timeout:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    if code:
        last = (texts[1].strip().splitlines() or ["no message"])[-1]
        died = f"the child died with exit code {code}: {last}"
    whole, _, _ = texts[0].rpartition("\n")
    return whole.splitlines(), died


def _show(rows: Sequence[dict[str, Any]], notes: Sequence[str]) -> None:
    console = Console()
    marks = {True: "ok", False: "wrong", None: "-"}
    cells = [(r["op"], r["backend"], r["lane"], marks[r["ok"]], r["saw"]) for r in rows]
    console.print(Grid("", ("op", "backend", "lane", "", "saw"), cells, ("",)).rich())
    for note in notes:
        console.print(note, markup=False)


def _notes() -> list[str]:
    """Who owns the folder `triton`, since two distributions install one."""
    owners = sorted(d for d in ("triton", "triton-ascend") if _is_installed(d))
    if len(owners) == 2:
        return [
            "triton and triton-ascend are both installed and share the folder `triton`: whichever came last owns it. "
            "Uninstall both, then install the one you need (docs/ascend.md)."
        ]
    return [f"the folder `triton` belongs to {owners[0]} {metadata.version(owners[0])}"] if owners else []


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _run(backend: str, lane: str, ops: Sequence[str], out: TextIO | None = None) -> None:
    """In the child: each op on a small input, called by its public name and judged by the contract's own truth."""
    from hal._devices import lane_on
    from hal._remote.target import RegistryTarget
    from hal.conformance.execute import DISPATCHED, Failure, execute
    from hal.registry import current

    target = RegistryTarget.of(backend, lane)
    lane = lane_on(lane, target.device)
    for op in ops:
        spec = current().spec(op)
        row: dict[str, Any] = {"backend": backend, "lane": lane, "op": op, "ok": True, "saw": "right"}
        begin = time.perf_counter()
        try:
            execute(spec, spec.make(**spec.samples[0].params), target, how=DISPATCHED)
        except Exception as e:
            saw = (str(e) if isinstance(e, Failure) else f"{type(e).__name__}: {e}").splitlines()
            row.update(ok=False, saw=saw[0], detail=saw[1:20])
        row["seconds"] = round(time.perf_counter() - begin, 3)
        print(json.dumps(row), file=out, flush=True)


if __name__ == "__main__":
    with data_output() as stdout:
        _run(sys.argv[1], sys.argv[2], sys.argv[3:], stdout)
