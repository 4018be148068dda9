"""``python -m sabotage``: the kill score, and an exit code of 1 under 100 %.

With ``--against`` a score that was written before stands for the run where it is of this very code: one fault in some,
drawn by a seed, has to be killed again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from hal.conformance._again import made_of, unlike
from hal.conformance._sources import code_of, hashes, suite_files
from hal.ops import BUILTIN
from sabotage import faults
from sabotage._healthy import Fault
from sabotage._run import Kill, false_alarm, kill


def main() -> int:
    parser = argparse.ArgumentParser(prog="sabotage", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", help="faults whose name or op contains this")
    parser.add_argument("--op", choices=BUILTIN, help="this op's alone")
    parser.add_argument("--jobs", type=int, default=1, help="ops at a time, in processes of their own")
    parser.add_argument("--json", type=Path, help="write the kills here")
    parser.add_argument("--against", type=Path, help="a score that may stand for the run")
    parser.add_argument("--sample", type=int, default=10, help="with --against: one fault in so many")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32), help="which ones")
    args = parser.parse_args()
    chosen = [f for f in faults() if args.only in f"{f.op} {f.name}" and args.op in (None, f.op)]
    if args.against:
        why = differences(args.against, chosen, args.device)
        if not why:
            return again(chosen, args)
        print("\n  ".join([f"{args.against} proves nothing of what is here; all faults run:", *why]), flush=True)
    ops = [op for op in BUILTIN if any(f.op == op for f in chosen)]
    if args.jobs > 1 and len(ops) > 1:
        kills = spread(ops, args)
    else:
        kills = [k.to_json() for k in run(chosen, args.device)]
    if len(kills) < len(chosen):
        print("\nkill score: none, not all was run")
        return 1
    ran = [k for k in kills if k["outcome"] != "not run"]
    killed = [k for k in ran if k["outcome"] == "killed"]
    print(f"\nkill score on {args.device}: {len(killed)} / {len(ran)}; {len(kills) - len(ran)} not run here")
    if args.json:
        report = {"device": args.device, "killed": len(killed), "run": len(ran), "of": what(), "faults": kills}
        # Messages name files of this checkout, wherever it lies.
        root = f"{Path(__file__).parents[2]}{os.sep}"
        args.json.write_text(json.dumps(report, indent=1).replace(root, "") + "\n", encoding="utf-8")
    return int(len(killed) < len(ran) or not ran)


def what() -> dict[str, Any]:
    """What a score is of: the suite, the code under the faults, and the faults."""
    faulty = {f"tests/sabotage/{p.name}": p for p in Path(__file__).parent.glob("*.py")}
    return made_of(code_of("reference")["files"] | hashes(suite_files() | faulty))


def differences(path: Path, chosen: Sequence[Fault], device: str) -> list[str]:
    """Why a score does not stand for the run: nothing, where it does."""
    try:
        report = json.loads(path.read_text("utf-8"))
        said = unlike(report["of"], what())
        outcomes = {(k["op"], k["fault"]): k["outcome"] for k in report["faults"]}
        if report["device"] != device:
            said.append(f"device: was {report['device']}, is {device}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        return [f"not a score of known code: {type(e).__name__}: {e}"]
    if outcomes != {(f.op, f.name): "killed" if device in f.device else "not run" for f in chosen}:
        said.append("its faults are not these, each of them killed")
    return said


def again(chosen: Sequence[Fault], args: argparse.Namespace) -> int:
    """One fault in `args.sample`; each is killed, or the score was wrong."""
    can = [f for f in chosen if args.device in f.device]
    some = random.Random(args.seed).sample(can, -(-len(can) // args.sample))
    how = f"--sample {args.sample} --seed {args.seed}"
    print(f"{args.against} is of this code and these versions: it stands for the run; of its faults run again: {how}")
    kills = run(some, args.device)
    killed = sum(k.outcome == "killed" for k in kills)
    print(f"\nkill score on {args.device}: {len(can)} / {len(can)} by {args.against}; again {killed} / {len(kills)}")
    return int(killed < len(kills))


def run(chosen: Sequence[Fault], device: str) -> list[Kill]:
    """One fault after the other. No kill by a case that accuses a healthy backend too."""
    kills = []
    for fault in chosen:
        got = kill(fault, device)
        if got.outcome == "killed" and (alarm := false_alarm(fault.op, got.case, device)):
            got = replace(got, outcome="survived", message=f"a healthy backend is accused: {alarm}")
        kills.append(got)
        first = got.message.splitlines()[0] if got.message else ""
        print(
            f"{got.outcome:<9} {fault.op}: {fault.name}  [{got.case or '-'}, {got.seconds:.1f} s] {first:.150}",
            flush=True,
        )
    return kills


def spread(ops: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each op in a process of its own, `args.jobs` at a time."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:

        def one(op: str) -> list[dict[str, Any]]:
            file = Path(folder, op)
            command = [sys.executable, "-m", "sabotage", "--device", args.device, "--only", args.only]
            done = subprocess.run([*command, "--op", op, "--json", file], capture_output=True, text=True, check=False)
            print(done.stdout.partition("\nkill score")[0], end="", flush=True)
            if not file.exists():
                print(done.stderr, file=sys.stderr)
                return []
            kills: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))["faults"]
            return kills

        return [k for kills in pool.map(one, ops) for k in kills]


if __name__ == "__main__":
    sys.exit(main())
