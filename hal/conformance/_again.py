"""A report that was made before: checked, some of its cases run again, and taken for a run that it is of."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hal.conformance import _report
from hal.conformance._cases import case_list
from hal.conformance._find import Fatal, find, job_for
from hal.conformance._result import NOT_RUN, PASSED, SIMULATED, Case
from hal.conformance._run import list_cases, ops_of, run, surroundings
from hal.conformance._sources import changed
from hal.conformance._verify import inconsistencies, read
from hal.conformance._worker import Worker
from hal.ops import BUILTIN, get_spec

Say = Callable[[str], None]


# --- checking a report ------------------------------------------------------------------------------


def check(path: Path, rerun: int, say: Say, seed: int | None = None) -> int:
    """``--verify``, and ``--rerun``: 0 where the report holds, 1 where not, 2 where it can't be read."""
    try:
        report = read(path)
    except (OSError, ValueError) as e:
        print(f"hal: conformance: {path}: not a report: {e}", file=sys.stderr)
        return 2
    worker: Worker | None = None
    own = [op for op in report["suite"]["ops"] if op not in BUILTIN]
    try:
        if own or rerun:
            drawn, fixed = report["beyond_samples"]["seed"], report["certify"]
            ops = report["suite"]["ops"]
            worker = find(job_for(report["backend"], report["lane"], None, (), ops, fixed=fixed, seed=drawn))
        theirs = list_cases(worker, own) if worker else []
        wrong, remarks = inconsistencies(report, theirs)
        for problem in wrong:
            say(f"inconsistent: {problem}")
        if wrong:
            return 1
        state = "certified" if report["verdict"]["certified"] else "not certified"
        say(f"{path}: consistent; {report['backend']}, lane {report['lane']}: {state}. {_report.NOTE}")
        for remark in remarks:
            say(remark)
        return _again(report, theirs, worker, rerun, say, _seed(seed)) if worker and rerun else 0
    except Fatal as e:
        print(f"hal: conformance: {e}", file=sys.stderr)
        return 3
    finally:
        if worker:
            worker.close()


def drawn(report: Mapping[str, Any], count: int, seed: int) -> dict[str, Mapping[str, Any]]:
    """`count` of the cases that have run, by their names: a pure function, so that a run can be repeated."""
    ran = [r for r in report["cases"] if r["outcome"] != NOT_RUN]
    return {r["id"]: r for r in random.Random(seed).sample(ran, min(count, len(ran)))}


def _again(
    report: Mapping[str, Any], theirs: Sequence[Case], worker: Worker, count: int, say: Say, seed: int, jobs: int = 1
) -> int:
    some = drawn(report, count, seed)
    ours = case_list({op: get_spec(op) for op in report["suite"]["ops"] if op in BUILTIN})
    cases = [c for c in [*ours, *theirs] if c.id in some]
    outcome = run(worker, cases, jobs=jobs)
    differing = 0
    for case in cases:
        result = outcome.results[case.id]
        was = PASSED if some[case.id]["outcome"] == SIMULATED else some[case.id]["outcome"]
        if result.outcome != was:
            differing += 1
            say(f"{case.id}: reported {was}, now {result.outcome}: {result.reason}")
    say(f"ran {len(cases)} cases again (seed {seed}), {differing} differ")
    return int(differing > 0)


def _seed(given: int | None) -> int:
    return random.SystemRandom().randrange(2**32) if given is None else given


# --- in a run's place -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """The run that a report may stand for: `hal.conformance.main`'s own arguments."""

    backend: str
    lane: str
    device: str | None
    imports: tuple[str, ...]
    ops: Sequence[str] | None
    silence: float | None
    certify: bool


def still(path: Path, asked: Asked, every: int, say: Say, jobs: int = 1, seed: int | None = None) -> int | None:
    """``--against``: where the report is of the code, versions and device at hand, and of what is asked for, one in
    `every` of its cases runs again, with inputs drawn anew: 0 where each comes to what the report says, else 1.

    Returns:
        None where the report proves nothing of what is here: why was said.
    """
    seed = _seed(seed)
    try:
        report = read(path)
    except (OSError, ValueError) as e:
        say(f"{path}: not a report: {e}; all cases run")
        return None
    ops = tuple(asked.ops or ()) or None
    job = job_for(
        asked.backend, asked.lane, asked.device, asked.imports, ops, asked.silence, fixed=asked.certify, seed=seed
    )
    with find(job) as worker:
        theirs = list_cases(worker, [op for op in ops_of(worker, ops) if op not in BUILTIN])
        why = differences(report, asked, worker, theirs)
        if why:
            say("\n  ".join([f"{path} proves nothing of what is here; all cases run:", *why]))
            return None
        count = -(-len(report["cases"]) // every)
        say(
            f"{path}, of {report['date']}, is of this code, these versions and such a device: it stands for the run; "
            f"1 in {every} of its cases runs again (the same ones: --sample {every} --seed {seed})"
        )
        return _again(report, theirs, worker, count, say, seed, jobs)


def differences(report: Mapping[str, Any], asked: Asked, worker: Worker, theirs: Sequence[Case] = ()) -> list[str]:
    """Why a report does not stand for the run that is asked for: nothing, where it does."""
    now = surroundings(str(worker.about["distribution"]))
    pairs: dict[str, tuple[Any, Any]] = {
        "backend": (report["backend"], asked.backend),
        "lane": (report["lane"], worker.lane),
        "ops": (report["suite"]["ops"], ops_of(worker, asked.ops)),
        "--certify": (report["certify"], asked.certify),
        "exit code": (_report.exit_code(report["verdict"], asked.certify), 0),
        "device": (report["device"], str(worker.about["device"])),
        "python": (report["environment"]["python"], now["python"]),
        "versions": (_versions(report["environment"]), _versions(now)),
    }
    other = [f"{what}: the report's {was}, expected {due}" for what, (was, due) in pairs.items() if was != due]
    wrong, remarks = inconsistencies(report, theirs)
    return [*other, *wrong, *remarks]


def made_of(files: Mapping[str, str]) -> dict[str, Any]:
    """What stands in a file that is to prove as much as a report does: the code, a hash a file, and the versions."""
    now = surroundings("")
    return {"python": now["python"], "versions": _versions(now), "files": dict(files)}


def unlike(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What of `made_of` was another then."""
    files = changed(was, now)
    said = [f"{x}: was {was[x]}, is {now[x]}" for x in ("python", "versions") if was[x] != now[x]]
    return said + [f"the code is not what was judged: {', '.join(files[:4])}, in all {len(files)}"] * bool(files)


def _versions(environment: Mapping[str, Any]) -> str:
    return ", ".join(f"{d['name']} {d['version']}" for d in environment["distributions"])
