"""``hal inspect ascend`` against what was recorded: ``ci/ascend_inspect.py CHIP SEED [FOLDER]``, in the lowered lane.

Where PROVEN says that all kernels were as they should for this very code and these versions, those of one op in six are
inspected again, drawn by the seed; else all of them, and FOLDER gets what PROVEN is to be (ci/certificates).
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from hal.backends.ascend._shapes import cases
from hal.backends.ascend.inspect import inspect, regressions, table
from hal.conformance._again import made_of, unlike
from hal.conformance._sources import code_of, hashes

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests/backends/ascend/inspect.json"
PROVEN = ROOT / "docs/conformance/ascend/inspect.json"
EVERY = 6


def what(chip: str) -> dict[str, Any]:
    """What is inspected: the code, the versions, what is compared with, and for which chip."""
    mine = {str(p.relative_to(ROOT)): p for p in (RECORDED, Path(__file__))}
    return {"chip": chip, **made_of(code_of("ascend")["files"] | hashes(mine))}


def differences(proven: Path, now: dict[str, Any]) -> list[str]:
    """Why `proven` does not stand for an inspection: nothing, where it does."""
    try:
        was = json.loads(proven.read_text("utf-8"))
        return unlike(was, now) + [f"chip: was {was['chip']}, is {now['chip']}"] * (was["chip"] != now["chip"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        return [f"{type(e).__name__}: {e}"]


def main(chip: str, seed: str, folder: str = "") -> int:
    now = what(chip)
    before = json.loads(RECORDED.read_text("utf-8"))
    ops = sorted({c.op for c in cases()})
    if why := differences(PROVEN, now):
        print(
            "\n  ".join(
                [f"{PROVEN.relative_to(ROOT)} proves nothing of what is here; all kernels are inspected:", *why]
            )
        )
        rows = inspect(None, [chip])
    else:
        ops = random.Random(int(seed)).sample(ops, -(-len(ops) // EVERY))
        print(f"{PROVEN.relative_to(ROOT)} is of this code and these versions; again, by seed {seed}: {', '.join(ops)}")
        # By a part of a name `inspect` brings other ops too: mla_rope_kv_write where rope_kv_write was drawn.
        rows = [row for op in ops for row in inspect(op, [chip]) if row["op"] == op]
        before = {case: costs for case, costs in before.items() if case.partition("/")[0] in ops}
    print(table(rows))
    worse = regressions(rows, before)
    for line in worse:
        print(f"regressed: {line}")
    bad = bool(worse) or any(r["verdict"] != "ok" for r in rows)
    if why and folder and not bad:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, PROVEN.name).write_text(json.dumps(now, indent=1) + "\n", "utf-8")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
