"""Judging: one case after another on a worker, here or in a process of its own.

A process of its own serves two ends: several at a time, and the ops that a plugin brings, whose contracts, and so
whose truth, are the plugin's code: they are judged where it is loaded, which is never the process that certifies.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hal.conformance._cases import case_list
from hal.conformance._result import NOT_RUN, OUTCOMES, Case, Result
from hal.conformance._worker import Job, Worker, environment

DEATHS = 12
"""Processes that a backend may kill before the rest is given up."""
GIVEN_UP = "given up"
"""How the reason begins of what is."""

Tell = Callable[[Result], None]


def judge(
    worker: Worker, cases: Iterable[Case], specs: Mapping[str, Any], tell: Tell, stop: threading.Event | None = None
) -> None:
    """Proves cases in turn; a process that dies or hangs fails the case it was in, and the rest go on in another."""
    from hal.conformance.proofs.run import run_case

    job = worker.job
    for case in cases:
        if stop is not None and stop.is_set():
            return
        if worker.deaths >= DEATHS:
            tell(Result(case.id, NOT_RUN, f"{GIVEN_UP} after {worker.deaths} dead processes"))
            continue
        worker.begin()
        spec = specs[case.op]
        tell(run_case(case, worker, spec, fixed=job.fixed, imports=job.imports, seed=job.seed))


class Apart:
    """A judge in another process.

    Args:
        plugin: the ops are a plugin's own: it is loaded there, and says what the cases are. Else it is told them, one
            after the other (`prove`).
    """

    def __init__(self, job: Job, plugin: bool = False, only_list: bool = False) -> None:
        here, there = os.pipe()
        # A judge whose contracts are ours loads no plugin at all; its worker gets `job.plugins`.
        env = environment(job.lane, job.imports, job.plugins if plugin else ("cpu",))
        order = {"job": job.to_json(), "plugin": plugin, "only_list": only_list, "out": there}
        self._child = subprocess.Popen(
            [sys.executable, "-c", "from hal.conformance._judge import main; main()"],
            env=env,
            pass_fds=(there,),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(there)
        self._lines = open(here, encoding="utf-8")  # noqa: SIM115
        assert self._child.stdin is not None
        self._say(json.dumps(order))
        if plugin:
            self._child.stdin.close()

    def _say(self, line: str) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # of a process that is gone, the other pipe says so
            self._child.stdin.write(f"{line}\n".encode())
            self._child.stdin.flush()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """What it says, line by line."""
        for line in self._lines:
            yield json.loads(line)

    def end(self) -> int:
        if self._child.poll() is None:
            self._child.kill()
        self._lines.close()
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        return self._child.wait()

    def results(self, expected: Sequence[Case], tell: Tell) -> None:
        """Its results; of what is expected of it, and nothing else. What it does not get to has not run."""
        left = {c.id for c in expected}
        try:
            for line in self:
                if "end" not in line:
                    continue
                result = Result(**line["end"])
                if result.id in left and result.outcome in OUTCOMES:
                    left.remove(result.id)
                    tell(result)
        finally:
            code = self.end()
        for case in expected:
            if case.id in left:
                tell(_ended_before(case, code))

    def prove(self, take: Callable[[], Case | None], tell: Tell) -> None:
        """Has it prove what `take` hands out, a case as soon as it is done with the one before, until there is none.
        What it does not get to the end of has not run; what it is not told of is for others."""
        case = take()
        lines = iter(self)
        while case is not None:
            self._say(case.id)
            line = next((x for x in lines if "end" in x), None)
            if line is None:
                tell(_ended_before(case, self.end()))
                return
            result = Result(**line["end"])
            if result.id != case.id or result.outcome not in OUTCOMES:
                result = Result(case.id, NOT_RUN, f"the judge spoke of {result.id!r}, {result.outcome!r}")
            tell(result)
            case = take()
        self.end()


def _ended_before(case: Case, code: int) -> Result:
    return Result(case.id, NOT_RUN, f"the judge's process ended before it (exit code {code})")


def main() -> None:
    """The process of `Apart`: an order on stdin, then cases, if it is not a plugin's; lines of JSON on a pipe."""
    from hal._remote.serve import end_with_parent
    from hal.ops import get_spec

    end_with_parent()
    order = json.loads(sys.stdin.readline())
    job = Job.of_json(order["job"])
    with open(order["out"], "w", encoding="utf-8", buffering=1) as out:

        def say(**line: Any) -> None:
            out.write(json.dumps(line) + "\n")

        if order["plugin"]:
            from hal.registry import current

            specs = {op: current().spec(op) for op in job.ops or ()}
        else:
            specs = {op: get_spec(op) for op in job.ops or ()}
        cases = case_list(specs)
        if order["plugin"]:
            say(cases=[asdict(c) for c in cases])
        if order["only_list"]:
            return
        with Worker(job) as worker:
            if worker.failed:
                return
            known = {c.id: c for c in cases}
            told = cases if order["plugin"] else (known[line.strip()] for line in sys.stdin)
            judge(worker, told, specs, lambda result: say(end=result.to_json()))
