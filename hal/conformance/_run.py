"""Running the suite on a backend: the parent process, which trusts its own case list and nothing else."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal._errors import HalError, SelectionError
from hal._version import __version__
from hal.conformance import _report, _waivers
from hal.conformance._cases import ALONE, case_list, suite_hash
from hal.conformance._result import (
    FAILED,
    NOT_APPLICABLE,
    NOT_RUN,
    OUTCOMES,
    PASSED,
    SIMULATED,
    Case,
    Result,
)

if TYPE_CHECKING:
    from hal.registry._table import Table

SILENCE = {"device": 120.0, "interpreter": 900.0, "lowered": 900.0}
"""Seconds without a word after which a case hangs, by lane."""
START = 120.0
"""Seconds that a worker may take to import torch and the backend, on a machine that is busy."""
DEATHS = 12
"""Processes that a backend may kill before the rest is given up."""
EXAMPLES = 60


@dataclass
class Outcome:
    """What the worker processes said."""

    results: dict[str, Result] = field(default_factory=dict)
    device: str = "?"
    declared: dict[str, Any] = field(default_factory=dict)
    fatal: str = ""


def execute(
    backend: str,
    lane: str,
    ops: Sequence[str],
    cases: Sequence[Case],
    *,
    device: str | None = None,
    imports: Sequence[str] = (),
    fixed: bool = True,
    examples: int = EXAMPLES,
    silence: float | None = None,
    progress: Callable[[Result, int, int], None] = lambda r, i, n: None,
    jobs: int = 1,
) -> Outcome:
    """Runs cases in child processes; a process that dies or falls silent fails the case it was in, and the
    rest go on in another.

    With `jobs`, so many at a time; what measures time, memory or threads comes last, in a process alone.
    """
    stop = threading.Event()

    def run(mine: Sequence[Case], tell: Callable[[Result, int, int], None]) -> Outcome:
        return _one_after_another(
            backend, lane, ops, mine, device, imports, fixed, examples, silence, tell, stop
        )

    if jobs <= 1:
        return run(cases, progress)
    # Drawn shapes are the longest cases: they begin first.
    together = sorted((c for c in cases if c.proof not in ALONE), key=lambda c: c.proof != "ragged")
    shares = [s for s in (together[i::jobs] for i in range(jobs)) if s]
    done, lock = 0, threading.Lock()

    def tell(result: Result, i: int, n: int) -> None:
        nonlocal done
        with lock:
            done += 1
            progress(result, done, len(cases))

    outcome = Outcome()
    with ThreadPoolExecutor(max(1, len(shares))) as pool:
        try:
            found = list(pool.map(lambda share: run(share, tell), shares))
        except BaseException:
            stop.set()
            raise
    if not any(o.fatal for o in found):
        found.append(run([c for c in cases if c.proof in ALONE], tell))
    for one in found:
        outcome.results |= one.results
        outcome.declared |= one.declared
        outcome.device = one.device if one.device != "?" else outcome.device
        outcome.fatal = outcome.fatal or one.fatal
    return outcome


def _one_after_another(
    backend: str,
    lane: str,
    ops: Sequence[str],
    cases: Sequence[Case],
    device: str | None,
    imports: Sequence[str],
    fixed: bool,
    examples: int,
    silence: float | None,
    progress: Callable[[Result, int, int], None],
    stop: threading.Event,
) -> Outcome:
    outcome = Outcome()
    limit = SILENCE.get(lane, 120.0) if silence is None else silence
    todo = [c.id for c in cases]
    deaths = 0
    with tempfile.TemporaryDirectory(prefix="hal-conformance-") as folder:
        # Outside of the child's working directory, so that that one is empty.
        work = Path(folder, "work")
        work.mkdir()
        while todo and not outcome.fatal and not stop.is_set():
            results = Path(folder, f"results-{deaths}.jsonl")
            job = Path(folder, f"job-{deaths}.json")
            job.write_text(
                json.dumps(
                    {
                        "backend": backend, "lane": lane, "device": device, "ops": list(ops), "cases": todo,
                        "imports": list(imports), "fixed": fixed, "examples": examples, "results": str(results),
                    }
                ),
                encoding="utf-8",
            )  # fmt: skip
            results.touch()
            with open(Path(folder, f"stderr-{deaths}"), "w+b") as errors:
                child = subprocess.Popen(
                    [sys.executable, "-c", f"from hal.conformance._worker import main; main({str(job)!r})"],
                    cwd=work,
                    env=environment(lane, imports),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    start_new_session=True,
                )
                listener = _Listener(outcome, todo, len(cases), progress)
                try:
                    ended = listener.listen(child, results, limit, stop)
                finally:
                    _end(child)
                errors.seek(0)
                tail = errors.read().decode(errors="replace").strip().splitlines()
            todo = [i for i in todo if i not in outcome.results]
            if ended in ("done", "stopped") or outcome.fatal:
                break
            why = _death(child.returncode, ended, limit, tail)
            if listener.running is None:
                outcome.fatal = f"the worker {why} before any case"
                break
            died = Result(listener.running, FAILED, why)
            if listener.tried == listener.running and ended == "died":
                # `supports` had said no, and running it all the same killed the process: it was right.
                died = Result(listener.running, PASSED)
            outcome.results[died.id] = died
            progress(died, len(outcome.results), len(cases))
            todo.remove(died.id)
            deaths += 1
            if deaths >= DEATHS:
                for case_id in todo:
                    outcome.results[case_id] = Result(
                        case_id, NOT_RUN, f"given up after {deaths} dead processes"
                    )
                break
    return outcome


class _Listener:
    """Follows the lines of one worker."""

    def __init__(
        self,
        outcome: Outcome,
        expected: Sequence[str],
        total: int,
        progress: Callable[[Result, int, int], None],
    ) -> None:
        self.outcome = outcome
        self.expected = set(expected)
        self.total = total
        self.progress = progress
        self.running: str | None = None
        self.tried: str | None = None
        self.done = False
        self.started = False

    def listen(self, child: subprocess.Popen[bytes], path: Path, limit: float, stop: threading.Event) -> str:
        """``done``, ``died``, ``silent`` or ``stopped``."""
        heard = time.monotonic()
        with open(path, encoding="utf-8") as lines:
            rest = ""
            while True:
                alive = child.poll() is None
                text = lines.read()
                if text:
                    heard = time.monotonic()
                    *whole, rest = (rest + text).split("\n")
                    for line in whole:
                        self._hear(json.loads(line))
                    continue
                if self.done or self.outcome.fatal:
                    return "done"
                if not alive:
                    return "died"
                if stop.is_set():
                    return "stopped"
                if time.monotonic() - heard > (limit if self.started else max(limit, START)):
                    return "silent"
                time.sleep(0.02)

    def _hear(self, line: Mapping[str, Any]) -> None:
        if "fatal" in line:
            self.outcome.fatal = line["fatal"]
        elif "ready" in line:
            self.started = True
            self.outcome.device = line["device"]
            self.outcome.declared.update(line["declared"])
        elif "begin" in line:
            self.running = line["begin"]
        elif "trial" in line:
            self.tried = line["trial"]
        elif "end" in line:
            result = Result(**line["end"])
            if result.id == self.running and result.id in self.expected and result.outcome in OUTCOMES:
                self.outcome.results[result.id] = result
                self.progress(result, len(self.outcome.results), self.total)
            self.running = None
        elif "done" in line:
            self.done = True


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the worker and whatever it started: it leads a session of its own."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _death(code: int, how: str, limit: float, tail: Sequence[str]) -> str:
    said = "\n".join(tail[-6:])
    if how == "silent":
        return f"hung: no word for {limit:.0f} s\n{said}".rstrip()
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"the process died ({name})\n{said}".rstrip()


def environment(lane: str, imports: Sequence[str] = ()) -> dict[str, str]:
    """The child's: this one without what could decide a verdict."""
    dropped = ("PYTEST_", "PYTHONWARNINGS", "PYTHONSTARTUP", "PYTHONOPTIMIZE", "PYTHONHOME", "HYPOTHESIS_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    for name in ("HAL_BACKEND", "HAL_FALLBACK", "HAL_CHECKS", "TRITON_INTERPRET"):
        env.pop(name, None)
    env["HAL_LANE"] = lane
    if lane == "interpreter":
        env["TRITON_INTERPRET"] = "1"
    here = [os.getcwd()] if imports else []
    path = [os.path.abspath(p) for p in sys.path if p] + here
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    return env


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
    quiet: bool = False,
    silence: float | None = None,
    jobs: int = 1,
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
        jobs: processes that run cases at a time; those that measure time, memory or threads run alone all the same.

    Returns:
        0 ok, 1 failed, 2 a wrong option, 3 nothing ran.
    """

    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    try:
        if verify is not None:
            return check(Path(verify), rerun, say)
        if backend is None:
            raise SelectionError(
                "hal: conformance: name a backend: cpu, cuda, ascend, reference, or a plugin's"
            )
        if certify and (ops or imports):
            raise SelectionError(
                "hal: conformance: --certify judges all ops of an installed backend; leave out --op and --import"
            )
        document = judged(
            backend, ops, lane, certify, imports, device, silence, None if quiet else _progress(), jobs
        )
    except HalError as e:
        print(e, file=sys.stderr)
        return 2
    except _Fatal as e:
        print(f"hal: conformance: {str(e).removeprefix('hal: conformance: ')}", file=sys.stderr)
        return 3
    say(_report.terminal(document))
    if report is not None:
        paths = _report.write(document, Path(report))
        say("\nwrote " + ", ".join(str(p) for p in paths))
    return _report.exit_code(document["verdict"], certify)


class _Fatal(Exception):
    """The run could not begin."""


def judged(
    backend: str,
    ops: Sequence[str] | None,
    lane: str | None,
    certify: bool,
    imports: Sequence[str],
    device: str | None,
    silence: float | None,
    progress: Callable[[Result, int, int], None] | None,
    jobs: int = 1,
) -> dict[str, Any]:
    """Runs the suite and returns the report as data."""
    from hal import _env
    from hal.registry._table import live

    table = live.current()
    lane = lane or _env.get("HAL_LANE")
    if not imports and backend != "reference":
        table.parse(backend, "{!r}")
        if "=" in backend or "," in backend or backend == "auto":
            raise SelectionError(f"hal: conformance: {backend!r}: expected one backend's name")
    names = tuple(dict.fromkeys(ops or _ops_of(table, backend)))
    specs = {name: table.spec(name) for name in names}
    cases = case_list(specs)
    began = time.monotonic()
    outcome = execute(
        backend, lane, names, cases, device=device, imports=imports, silence=silence, fixed=certify,
        progress=progress or (lambda r, i, n: None), jobs=jobs,
    )  # fmt: skip
    if outcome.fatal:
        raise _Fatal(outcome.fatal)
    from hal.ops._spec import PoolArg

    rows = []
    for case in cases:
        result = outcome.results.get(case.id) or Result(case.id, NOT_RUN, "the worker ended before it")
        # Between two pools rows may cross from one memory to another, which no kernel does on such a device.
        pools = sum(isinstance(a, PoolArg) for a in specs[case.op].args.values())
        if lane == "lowered" and pools > 1 and result.outcome == PASSED:
            result.outcome, result.reason = SIMULATED, "kernels lowered, copies stand-in"
        rows.append({**asdict(case), **result.to_json()})
    waivers = declared_waivers(backend)
    today = datetime.date.today().isoformat()
    return {
        "schema": SCHEMA,
        "note": _report.NOTE,
        "backend": backend,
        "lane": lane,
        "device": outcome.device,
        "date": today,
        "certify": certify,
        "seconds": round(time.monotonic() - began, 2),
        "suite": {"hash": suite_hash(), "version": __version__, "ops": list(names), "cases": len(cases)},
        "declared": outcome.declared,
        "environment": surroundings(backend),
        "waivers": [asdict(w) for w in waivers],
        "cases": rows,
        "verdict": _report.verdict(
            cases, {r["id"]: r["outcome"] for r in rows}, waivers, core=core_ops(), certify=certify, today=today,
            reasons={r["id"]: r["reason"] for r in rows},
        ),
    }  # fmt: skip


SCHEMA = _report.SCHEMA


def _ops_of(table: Table, backend: str) -> Sequence[str]:
    """All ops; of one implementation that is named (``cuda/flashinfer``), those that it has."""
    name, _, which = backend.partition("/")
    if not which or name not in table.entries:
        return table.op_names
    return [op for op in table.op_names if any(i.name == which for i in table.entries[name].impls(op))]


def core_ops() -> list[str]:
    """The ops that a certified backend must have."""
    from hal.ops import BUILTIN, spec

    return [name for name in BUILTIN if spec(name).core]


def declared_waivers(backend: str) -> tuple[_waivers.Waiver, ...]:
    """Those that the backend's manifest names."""
    from hal.registry._table import live

    entry = live.current().entries.get(backend.partition("/")[0])
    where = entry.manifest.waivers if entry and entry.manifest else None
    if where is None:
        return ()
    module, _, name = where.partition(":")
    try:
        return _waivers.read(getattr(import_module(module), name))
    except (ValueError, ImportError, AttributeError, TypeError) as e:
        raise SelectionError(f"hal: conformance: the waivers of {backend}, {where}: {e}") from e


def surroundings(backend: str) -> dict[str, Any]:
    """Versions and RECORD hashes of what took part."""
    from hal.registry._table import live

    names = ["hal-kernels", "torch", "triton", "triton-ascend", "numba", "numpy", "pluggy", "hypothesis"]
    entry = live.current().entries.get(backend.partition("/")[0])
    if entry is not None and entry.distribution:
        names.append(entry.distribution)
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


def _progress() -> Callable[[Result, int, int], None]:
    """On a terminal a line that moves, elsewhere a line per op."""
    seen: dict[str, int] = {}
    bad = 0

    def tell(result: Result, i: int, n: int) -> None:
        nonlocal bad
        bad += result.outcome == FAILED
        op = result.id.partition("/")[0]
        if sys.stderr.isatty():
            end = "\n" if i == n else ""
            print(f"\r\033[K{i}/{n}  {bad} failed  {result.id}", end=end, file=sys.stderr, flush=True)
        elif op not in seen:
            print(f"{op} ...", file=sys.stderr, flush=True)
        seen[op] = i

    return tell


# --- checking a report ------------------------------------------------------------------------------


def inconsistencies(report: Mapping[str, Any]) -> list[str]:
    """What in a report does not follow from its own raw cases and this suite's case list."""
    from hal.registry._table import live

    wrong: list[str] = []
    if report.get("schema") != SCHEMA:
        return [f"schema {report.get('schema')!r}; expected {SCHEMA}"]
    if report["suite"]["hash"] != suite_hash():
        wrong.append(f"made by another suite: {report['suite']['hash'][:12]}; this is {suite_hash()[:12]}")
    table = live.current()
    unknown = [op for op in report["suite"]["ops"] if op not in table.op_names]
    if unknown:
        return [*wrong, f"unknown ops: {', '.join(unknown)}"]
    cases = case_list({op: table.spec(op) for op in report["suite"]["ops"]})
    rows = {r["id"]: r for r in report["cases"]}
    if len(rows) != len(report["cases"]):
        wrong.append(f"{len(report['cases']) - len(rows)} cases are listed twice")
    lacking = [c.id for c in cases if c.id not in rows]
    extra = sorted(set(rows) - {c.id for c in cases})
    wrong += [
        f"{len(ids)} cases {what}, first {ids[0]}"
        for ids, what in ((lacking, "missing"), (extra, "unknown"))
        if ids
    ]
    for case in cases:
        row = rows.get(case.id)
        if row is None:
            continue
        if row["outcome"] not in OUTCOMES:
            wrong.append(f"{case.id}: unknown outcome {row['outcome']!r}")
        if any(row[k] != v for k, v in asdict(case).items()):
            wrong.append(f"{case.id}: not the case of this suite")
        if row["outcome"] == PASSED and any(v > 1 for v in row["headroom"].values()):
            wrong.append(f"{case.id}: passed with an error beyond the bound")
        if row["outcome"] == NOT_APPLICABLE and case.proof not in _MAY_NOT_APPLY:
            wrong.append(f"{case.id}: {case.proof} always applies")
    waivers = _waivers.read(
        {k: v for k, v in w.items() if v is not None or k != "expires"} for w in report["waivers"]
    )
    again = _report.verdict(
        cases, {i: r["outcome"] for i, r in rows.items()}, waivers, core=core_ops(), certify=report["certify"],
        today=report["date"], reasons={i: r["reason"] for i, r in rows.items()},
    )  # fmt: skip
    for key, value in again.items():
        if report["verdict"].get(key) != value:
            wrong.append(
                f"verdict.{key}: the cases say {_short(value)}, the report {_short(report['verdict'].get(key))}"
            )
    return wrong


_MAY_NOT_APPLY = ("pages", "determinism", "placement", "stream", "sync", "graph", "overlap", "memory")


def _short(value: Any) -> str:
    return f"{value!r:.120}"


def check(path: Path, rerun: int, say: Callable[[str], None]) -> int:
    """``--verify``, and ``--rerun``: 0 where the report holds, 1 where not, 2 where it can't be read."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        wrong = inconsistencies(report)
    except (OSError, ValueError, KeyError, TypeError) as e:
        print(f"hal: conformance: {path}: not a report: {type(e).__name__}: {e}", file=sys.stderr)
        return 2
    for problem in wrong:
        say(f"inconsistent: {problem}")
    if wrong:
        return 1
    state = "certified" if report["verdict"]["certified"] else "not certified"
    say(f"{path}: consistent; {report['backend']}, lane {report['lane']}: {state}. {_report.NOTE}")
    if not rerun:
        return 0
    return _again(report, rerun, say)


def _again(report: Mapping[str, Any], count: int, say: Callable[[str], None]) -> int:
    from hal.registry._table import live

    seed = random.SystemRandom().randrange(2**32)
    ran = [r for r in report["cases"] if r["outcome"] != NOT_RUN]
    some = {r["id"]: r for r in random.Random(seed).sample(ran, min(count, len(ran)))}
    table = live.current()
    ops = report["suite"]["ops"]
    cases = [c for c in case_list({op: table.spec(op) for op in ops}) if c.id in some]
    outcome = execute(report["backend"], report["lane"], ops, cases, fixed=report["certify"])
    if outcome.fatal:
        print(f"hal: conformance: {outcome.fatal}", file=sys.stderr)
        return 3
    differing = 0
    for case in cases:
        result = outcome.results[case.id]
        was = PASSED if some[case.id]["outcome"] == SIMULATED else some[case.id]["outcome"]
        if result.outcome != was:
            differing += 1
            say(f"{case.id}: reported {was}, now {result.outcome}: {result.reason}")
    say(f"ran {len(cases)} cases again (seed {seed}), {differing} differ")
    return int(differing > 0)


def replay(op: str, backend: str, lane: str = "device", **params: Any) -> None:
    """Runs one example again in this process and raises `AssertionError` where it is wrong.

    Args:
        op: an op's name.
        backend: a backend's name.
        params: what its contract's `make` takes: what a failing case prints.
    """
    from hal.conformance._proofs import Refused, Run
    from hal.conformance._target import RegistryTarget
    from hal.conformance._verdict import Failure
    from hal.registry._table import live

    spec = live.current().spec(op)
    target = RegistryTarget.of(backend, lane)
    try:
        Run(target, spec, Case(op, "value", "replay")).prove(params)
    except (Failure, Refused) as e:
        raise AssertionError(str(e)) from e


def replay_case(case_id: str, backend: str, lane: str = "device") -> None:
    """Runs one case again in this process and raises `AssertionError` unless it passes."""
    from hal.conformance._proofs import run_case
    from hal.conformance._target import RegistryTarget
    from hal.registry._table import live

    spec = live.current().spec(case_id.partition("/")[0])
    case = next(c for c in case_list({spec.name: spec}) if c.id == case_id)
    result = run_case(case, RegistryTarget.of(backend, lane), spec)
    if result.outcome != PASSED:
        raise AssertionError(f"{case_id}: {result.outcome}: {result.reason}")
