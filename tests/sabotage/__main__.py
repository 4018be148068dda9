"""``python -m sabotage``: the kill score, and an exit code of 1 under 100 %."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from hal.ops import BUILTIN
from sabotage import faults
from sabotage._run import false_alarms, kill


def main() -> int:
    parser = argparse.ArgumentParser(prog="sabotage", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", help="faults whose name or op contains this")
    parser.add_argument("--json", type=Path, help="write the kills here")
    args = parser.parse_args()
    chosen = [f for f in faults() if args.only in f"{f.op} {f.name}"]
    for op in BUILTIN:
        alarms = false_alarms(op, args.device) if any(f.op == op for f in chosen) else []
        if alarms:
            print(f"a healthy {op} is accused, so no kill of it means anything:", *alarms[:5], sep="\n  ")
            return 1
    kills = []
    for fault in chosen:
        got = kill(fault, args.device)
        kills.append(got)
        first = got.message.splitlines()[0] if got.message else ""
        print(
            f"{got.outcome:<9} {fault.op}: {fault.name}  [{got.case or '-'}, {got.seconds:.1f} s] {first:.150}",
            flush=True,
        )
    ran = [k for k in kills if k.outcome != "not run"]
    killed = [k for k in ran if k.outcome == "killed"]
    print(f"\nkill score on {args.device}: {len(killed)} / {len(ran)}; {len(kills) - len(ran)} not run here")
    if args.json:
        told = {
            "device": args.device, "killed": len(killed), "run": len(ran), "faults": [k.to_json() for k in kills],
        }  # fmt: skip
        # Messages name files of this checkout, wherever it lies.
        root = f"{Path(__file__).parents[2]}{os.sep}"
        args.json.write_text(json.dumps(told, indent=1).replace(root, "") + "\n", encoding="utf-8")
    return int(len(killed) < len(ran) or not ran)


if __name__ == "__main__":
    sys.exit(main())
