"""Running the suite on a backend: the process that certifies, in which no code of a plugin ever runs."""

from __future__ import annotations

import datetime
import hashlib
import platform
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from hal import _env, _progress
from hal._devices import EMULATED
from hal._errors import HalError, SelectionError
from hal._version import __version__
from hal.conformance import _report, _waivers, _writers
from hal.conformance._bar import Progress, teller, weight
from hal.conformance._cases import ALONE, case_list
from hal.conformance._find import Fatal, find, job_for
from hal.conformance._judge import GIVEN_UP, Apart, judge
from hal.conformance._result import NOT_RUN, PASSED, SIMULATED, Case, Result
from hal.conformance._sources import code_of, suite_hash
from hal.conformance._verify import beyond_samples, core_ops, simulates
from hal.conformance._worker import Worker
from hal.conformance._writers import Report
from hal.ops import BUILTIN, get_spec


@dataclass
class Outcome:
    """What came of the cases."""

    results: dict[str, Result] = field(default_factory=dict)
    device: str = "?"
    declared: dict[str, Any] = field(default_factory=dict)
    fatal: str = ""


def run_backend(
    backend: str,
    lane: str,
    ops: Sequence[str],
    cases: Sequence[Case],
    *,
    imports: Sequence[str] = (),
    silence: float | None = None,
    jobs: int = 1,
    seed: int = 0,
) -> Outcome:
    """Runs cases on a backend in processes of its own; one that dies or hangs fails the case it was in."""
    job = job_for(backend, lane, None, imports, ops, silence, seed=seed)
    with Worker(job) as worker:
        if worker.failed:
            return Outcome(fatal=worker.failed)
        return run(worker, cases, jobs=jobs)


def run(worker: Worker, cases: Sequence[Case], progress: Progress = lambda r, i, n: None, jobs: int = 1) -> Outcome:
    """Judges cases on a worker, and, with `jobs`, on as many more at a time; what measures time, memory or threads
    comes last, alone. The ops that a plugin brings are judged where their contracts are loaded, last of all."""
    outcome = Outcome({}, str(worker.about["device"]), dict(worker.about["declared"]))
    lock = threading.Lock()

    def tell(result: Result) -> None:
        with lock:
            outcome.results[result.id] = result
            progress(result, len(outcome.results), len(cases))

    ours = [c for c in cases if c.op in BUILTIN]
    theirs = [c for c in cases if c.op not in BUILTIN]
    if jobs > 1:
        _at_once(worker, [c for c in ours if c.proof not in ALONE], jobs, tell)
        ours = [c for c in ours if c.proof in ALONE]
    judge(worker, ours, {op: get_spec(op) for op in dict.fromkeys(c.op for c in ours)}, tell)
    if theirs:
        job = replace(worker.job, ops=tuple(dict.fromkeys(c.op for c in theirs)))
        Apart(job, plugin=True).results(theirs, tell)
    return outcome


def _at_once(worker: Worker, cases: Sequence[Case], jobs: int, tell: Callable[[Result], None]) -> None:
    """Each of `jobs` judges takes the next case as soon as it is done with one; the longest begin first, so that none
    is alone at the end."""
    left = deque(sorted(cases, key=weight, reverse=True))
    lock = threading.Lock()

    def take(judge: Apart) -> Case | None:
        with lock:
            return left.popleft() if left and judge not in gave_up else None

    def told(judge: Apart, result: Result) -> None:
        if result.outcome == NOT_RUN and result.reason.startswith(GIVEN_UP):
            gave_up.add(judge)
        tell(result)

    gave_up: set[Apart] = set()
    job = replace(worker.job, ops=tuple(dict.fromkeys(c.op for c in cases)))
    judges = [Apart(job) for _ in range(min(jobs, len(cases)))]
    try:
        crew = [
            threading.Thread(target=j.prove, args=(partial(take, j), partial(told, j)), daemon=True) for j in judges
        ]
        for t in crew:
            t.start()
        for t in crew:
            t.join()
    finally:
        for j in judges:
            j.end()
    for case in left:
        tell(Result(case.id, NOT_RUN, "no judge was left for it"))


# --- a whole run ------------------------------------------------------------------------------------


def main(
    backend: str | None = None,
    ops: Sequence[str] | None = None,
    lane: str | None = None,
    report: str | Path | None = None,
    certify: bool = False,
    imports: Sequence[str] = (),
    *,
    device: str | None = None,
    verify: str | Path | None = None,
    rerun: int = 0,
    against: str | Path | None = None,
    sample: int = 10,
    quiet: bool = False,
    timeout: float | None = None,
    jobs: int = 1,
    seed: int | None = None,
) -> int:
    """``hal conformance``: runs the suite on a backend, prints and writes its report.

    Args:
        backend: a backend's name, or ``reference``.
        ops: those to judge; None for all.
        lane: ``device``, ``interpreter`` or ``lowered``; None: ``HAL_LANE``.
        report: a folder for report.json, report.xml (JUnit) and report.html.
        certify: fixed seeds, all ops, and an exit code of 1 unless certified.
        imports: modules that register a backend which is not packaged yet; found from the working directory.
        device: e.g. ``cuda:1``; None: the lane's first device type.
        verify: a report.json to check instead of a run.
        rerun: with `verify`: how many random cases of it to execute again.
        against: a report.json. Where it is of this very code, one in `sample` of its cases runs again, and has to come
            to what it says; where it is not, all run, as without it, and `report` is written.
        sample: with `against`: one in so many cases.
        timeout: seconds in which a call has to end; None: 120, or 900 in a lane that stands in for a device.
        jobs: processes that run cases at a time; those that measure time, memory or threads run alone all the same.
        seed: what fresh inputs are drawn from, to replay a report's, and with `rerun` or `against` which cases run
            again; None: another one every time.

    Returns:
        0 ok, 1 failed, 2 a wrong option, 3 nothing ran.
    """

    from hal.conformance._again import Asked, check, still

    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    try:
        if verify is not None:
            return check(Path(verify), rerun, say, seed)
        if backend is None:
            raise SelectionError("hal: conformance: name a backend: cpu, cuda, ascend, reference, or a plugin's")
        if certify and (ops or imports):
            raise SelectionError(
                "hal: conformance: --certify judges all ops of an installed backend; leave out --op and --import"
            )
        if against is not None:
            asked = Asked(backend, lane or _env.get("HAL_LANE"), device, tuple(imports), ops, timeout, certify)
            held = still(Path(against), asked, sample, say, jobs, seed)
            if held is not None:
                return held
        with _progress.show(quiet=quiet) as bar:
            tell = None if quiet else partial(teller, bar)
            document = judge_backend(backend, ops, lane, certify, imports, device, timeout, tell, jobs, seed)
    except HalError as e:
        print(e, file=sys.stderr)
        return 2
    except Fatal as e:
        print(f"hal: conformance: {str(e).removeprefix('hal: conformance: ')}", file=sys.stderr)
        return 3
    say(_report.terminal(document))
    if report is not None:
        paths = _writers.write(document, Path(report))
        say("\nwrote " + ", ".join(str(p) for p in paths))
    return _report.exit_code(document["verdict"], certify)


def judge_backend(
    backend: str,
    ops: Sequence[str] | None,
    lane: str | None,
    certify: bool,
    imports: Sequence[str],
    device: str | None,
    silence: float | None,
    progress: Callable[[Sequence[Case]], Progress] | None,
    jobs: int = 1,
    seed: int | None = None,
) -> Report:
    """Runs the suite and returns the report as data."""
    began = time.monotonic()
    lane = lane or _env.get("HAL_LANE")
    if "=" in backend or "," in backend or backend == "auto":
        raise SelectionError(f"hal: conformance: {backend!r}: expected one backend's name")
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    suite, code = suite_hash(), code_of(backend, imports)
    with find(
        job_for(backend, lane, device, imports, tuple(ops or ()) or None, silence, fixed=certify, seed=seed)
    ) as worker:
        about, lane = worker.about, worker.lane
        if certify and lane == EMULATED:
            raise Fatal(f"{about['device']}: an emulated device is never certified; leave out --certify")
        names = ops_of(worker, ops)
        mine = [op for op in names if op in BUILTIN]
        own = [op for op in names if op not in BUILTIN]
        cases = case_list({op: get_spec(op) for op in mine}) + list_cases(worker, own)
        outcome = run(worker, cases, progress(cases) if progress else lambda r, i, n: None, jobs)
    if (suite, code) != (suite_hash(), code_of(backend, imports)):
        raise Fatal("the suite's sources or the backend's have changed while it ran: run it again")
    rows = []
    for case in cases:
        result = outcome.results.get(case.id) or Result(case.id, NOT_RUN, "the worker ended before it")
        if result.outcome == PASSED and simulates(case, lane):
            result.outcome, result.reason = SIMULATED, "kernels lowered, copies stand-in"
        rows.append({**asdict(case), **result.to_json()})
    waivers = _declared_waivers(backend, about["waivers"])
    today = datetime.date.today().isoformat()
    document = {
        "schema": SCHEMA,
        "note": _report.NOTE,
        "backend": backend,
        "lane": lane,
        "device": outcome.device,
        "device_type": worker.device,
        "lanes": about["lanes"],
        "date": today,
        "certify": certify,
        "seconds": round(time.monotonic() - began, 2),
        "suite": {"hash": suite, "version": __version__, "ops": list(names), "cases": len(cases)},
        "beyond_samples": {"seed": seed, **beyond_samples(mine, lane)},
        "declared": outcome.declared,
        "environment": surroundings(str(about["distribution"])),
        "code": code,
        "trust": _report.trust(own),
        "waivers": [asdict(w) for w in waivers],
        "cases": rows,
        "verdict": _report.verdict(
            cases,
            {r["id"]: r["outcome"] for r in rows},
            waivers,
            core=core_ops(),
            certify=certify,
            today=today,
            reasons={r["id"]: r["reason"] for r in rows},
        ),
    }
    return Report(document)


SCHEMA = _report.SCHEMA


def ops_of(worker: Worker, ops: Sequence[str] | None) -> list[str]:
    """Those that were asked for; else all of ours and the plugin's own; of one implementation, those that it has."""
    if ops:
        return list(dict.fromkeys(ops))
    said = [str(op) for op in worker.about["ops"]]
    if "/" in worker.backend:
        return said
    return [*BUILTIN, *(str(op) for op in worker.about["own_ops"] if op not in BUILTIN)]


def list_cases(worker: Worker, ops: Sequence[str]) -> list[Case]:
    """The cases of a plugin's own ops, as the process says in which their contracts are loaded."""
    if not ops:
        return []
    apart = Apart(replace(worker.job, ops=tuple(ops)), plugin=True, only_list=True)
    try:
        said: list[dict[str, Any]] = next((line["cases"] for line in apart if "cases" in line), [])
        cases = [Case(**c) for c in said]
    except (TypeError, ValueError) as e:
        raise Fatal(f"the cases of {', '.join(ops)}: {e}") from None
    finally:
        apart.end()
    if {c.op for c in cases} != set(ops):
        raise Fatal(f"the contracts of {', '.join(ops)} could not be loaded")
    return cases


def _declared_waivers(backend: str, raw: Any) -> tuple[_waivers.Waiver, ...]:
    """Those that the backend's manifest names, as its process says."""
    if isinstance(raw, str):
        raise SelectionError(f"hal: conformance: the waivers of {backend}: {raw}")
    try:
        return _waivers.read(raw)
    except (ValueError, TypeError, AttributeError) as e:
        raise SelectionError(f"hal: conformance: the waivers of {backend}: {e}") from e


def surroundings(distribution: str) -> dict[str, Any]:
    """Versions and RECORD hashes of what took part."""
    names = [
        "hal-kernels",
        "torch",
        "triton",
        "triton-ascend",
        "ascendnpu-ir",
        "numba",
        "llvmlite",
        "numpy",
        "pluggy",
        "hypothesis",
    ]
    if distribution:
        names.append(distribution)
    found = []
    for name in dict.fromkeys(names):
        try:
            dist = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        record = dist.read_text("RECORD")
        digest = hashlib.sha256(record.encode()).hexdigest() if record else None
        found.append({"name": name, "version": dist.version, "record_sha256": digest})
    return {"python": platform.python_version(), "platform": platform.platform(), "distributions": found}


# --- again -----------------------------------------------------------------------------------------


def replay(op: str, backend: str, lane: str = "device", **params: Any) -> None:
    """Runs one example again in this process and raises `AssertionError` where it is wrong.

    Args:
        op: an op's name.
        backend: a backend's name.
        params: what its contract's `make` takes: what a failing case prints.
    """
    from hal._remote.target import RegistryTarget
    from hal.conformance.execute import Failure, Refused
    from hal.conformance.proofs.run import Run
    from hal.registry import current

    spec = current().spec(op)
    target = RegistryTarget.of(backend, lane)
    try:
        Run(target, spec, Case(op, "value", "replay")).prove(params)
    except (Failure, Refused) as e:
        raise AssertionError(str(e)) from e


def replay_case(case_id: str, backend: str, lane: str = "device", seed: int = 0) -> None:
    """Runs one case again in this process and raises `AssertionError` unless it passes."""
    from hal._remote.target import RegistryTarget
    from hal.conformance.proofs.run import run_case
    from hal.registry import current

    spec = current().spec(case_id.partition("/")[0])
    case = next(c for c in case_list({spec.name: spec}) if c.id == case_id)
    result = run_case(case, RegistryTarget.of(backend, lane), spec, seed=seed)
    if result.outcome != PASSED:
        raise AssertionError(f"{case_id}: {result.outcome}: {result.reason}")
