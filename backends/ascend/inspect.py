"""What the Ascend kernels are, read from their lowered IR: lint, traffic, buffers, and how far they compile.

No device and no time: everything here is counted. ``hal inspect ascend`` prints it, and CI fails on a
row whose ``verdict`` is not ``ok``, or which costs more than the recorded one (`regressions`).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hal.backends.ascend._shapes import Case, cases

UB_LIMIT = 0.85
"""Of the unified buffer: what is left is the compiler's, for what it adds on the device."""

COSTS = ("dma_per_token", "bytes_moved", "ub_bits")
"""The figures of a row that a change must not raise."""


def inspect(kernel: str | None = None, targets: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A row for each kernel and shape. Runs in the lowered lane (``HAL_LANE=lowered``).

    Args:
        kernel: an op's or a kernel's name; None for all.
        targets: the chips to compile for, of `hal.lowered.compile.TARGETS`; none: all of them.

    Returns:
        Rows with ``op``, ``case``, ``kernel``, ``scalar_gathers``, ``rmw_stores``, ``int64_vectors``,
        ``scalar_accesses``, ``dma_per_token``, ``bytes_moved``, ``bytes_needed``, ``ub_bits`` and
        ``ub_available`` (of the generation where they are tightest), ``targets`` (target -> ``codegen``,
        ``binary`` where CANN is there, or the compiler's reason) and ``verdict`` (``ok`` or what is wrong).

    Raises:
        HalError: another lane, or nothing is called `kernel`, or there is no such target.
        ToolchainError: the tools are missing.

    Example:
        >>> inspect("get_last_loc")[0]["verdict"]                  # doctest: +SKIP
        'ok'
    """
    from importlib import import_module

    from hal._errors import HalError
    from hal.lowered import recording, toolchain
    from hal.lowered.compile import TARGETS
    from hal.triton import launch

    toolchain.require()
    if unknown := sorted(set(targets) - set(TARGETS)):
        raise HalError(f"hal: inspect ascend: no target {unknown[0]}; there are {', '.join(TARGETS)}")
    if launch.lane() != "lowered":
        raise HalError("hal: inspect ascend: kernels are inspected in the lowered lane; set HAL_LANE=lowered")
    rows: list[dict[str, Any]] = []
    compiled: dict[tuple[str, str], Any] = {}
    for case in cases():
        module = import_module(f"hal.backends.ascend.{case.op}")
        names = {n for n in vars(module) if n.strip("_") == (kernel or "").strip("_")}
        if kernel is not None and case.op != kernel and not names:
            continue
        args = case.make()
        with recording() as launches:
            getattr(module, case.op)(**args)
        rows.append(_row(case, args, launches, compiled, targets or tuple(TARGETS)))
    if not rows:
        raise HalError(
            f"hal: inspect ascend: no kernel called {kernel!r}; there are {', '.join(sorted({c.op for c in cases()}))}"
        )
    return rows


def _row(
    case: Case, args: dict[str, Any], launches: list[Any], compiled: dict[tuple[str, str], Any], chips: Sequence[str]
) -> dict[str, Any]:
    from hal.lowered.compile import compile_for
    from hal.lowered.lint import lint

    forms = {launch.lowered.key: launch.lowered for launch in launches}
    found = [lint(f.ttadapter) for f in forms.values()]
    # The compiler is a process of its own: two at once, and none for a form that another case had.
    todo = [(key, target) for key in forms for target in chips]
    fresh = [k for k in todo if k not in compiled]
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda k: compile_for(forms[k[0]].ttadapter, k[1]), fresh)
        compiled.update(zip(fresh, results, strict=True))
    done = [compiled[k] for k in todo]
    traffic = [t for launch in launches for t in launch.traffic.values()]
    copies = sum(t.copies_in + t.copies_out + t.scalar_reads + t.scalar_writes for t in traffic)
    moved = sum(t.bytes_read + t.bytes_written for t in traffic)
    tight = max(done, key=lambda c: c.ub_share)
    targets: dict[str, str] = {}
    for c in done:
        state = c.reason or ("binary" if c.binary else "codegen")
        if targets.get(c.target, "codegen") in ("codegen", "binary"):
            targets[c.target] = state
    row: dict[str, Any] = {
        "op": case.op,
        "case": case.name,
        "kernel": ", ".join(sorted({f.name for f in forms.values()})),
        "scalar_gathers": sum(x.scalar_gathers for x in found),
        "rmw_stores": sum(x.rmw_stores for x in found),
        "int64_vectors": sum(x.int64_vectors for x in found),
        "scalar_accesses": max((c.scalar_accesses for c in done if "950" not in c.target), default=0),
        "dma_per_token": round(copies / max(1, case.tokens(args)), 2),
        "bytes_moved": moved,
        "bytes_needed": case.needed(args),
        "ub_bits": tight.ub_bits,
        "ub_available": tight.ub_available,
        "targets": targets,
    }
    wrong = [f"{row[k]} {k}" for k in ("scalar_gathers", "rmw_stores", "int64_vectors", "scalar_accesses") if row[k]]
    wrong += [f"{t}: {why}" for t, why in targets.items() if why not in ("codegen", "binary")]
    if tight.ub_share > UB_LIMIT:
        wrong.append(f"UB {tight.ub_share:.0%} of {tight.target}, at most {UB_LIMIT:.0%}")
    if moved > case.waste * row["bytes_needed"]:
        wrong.append(f"{moved} bytes moved where {row['bytes_needed']} are needed")
    row["verdict"] = "; ".join(wrong) or "ok"
    return row


def record(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The costs of `rows` by op and case, as the file has them that `regressions` compares with."""
    return {f"{r['op']}/{r['case']}": {c: r[c] for c in COSTS} for r in rows}


def regressions(rows: list[dict[str, Any]], before: dict[str, dict[str, float]]) -> list[str]:
    """What costs more than `before` (of `recorded`) says, and what was recorded and is gone, or is here and was not."""
    now = record(rows)
    out = [f"{case}: not inspected any more" for case in before if case not in now]
    out += [f"{case}: not recorded yet" for case in now if case not in before]
    for case in (c for c in now if c in before):
        out += [f"{case}: {c} {now[case][c]}, was {before[case][c]}" for c in COSTS if now[case][c] > before[case][c]]
    return out


def table(rows: list[dict[str, Any]]) -> str:
    """`inspect`'s rows as text."""
    head = ("op", "case", "gather", "rmw", "i64", "scalar", "dma/token", "bytes x", "UB", "compiles for", "verdict")
    body = []
    for r in rows:
        ok = [t for t, s in r["targets"].items() if s in ("codegen", "binary")]
        body.append(
            (
                r["op"],
                r["case"],
                str(r["scalar_gathers"]),
                str(r["rmw_stores"]),
                str(r["int64_vectors"]),
                str(r["scalar_accesses"]),
                f"{r['dma_per_token']:.2f}",
                f"{r['bytes_moved'] / max(1, r['bytes_needed']):.2f}",
                f"{r['ub_bits'] / max(1, r['ub_available']):.0%}",
                " ".join(ok) or "none",
                r["verdict"],
            )
        )
    width = [max(len(x[i]) for x in (head, *body)) for i in range(len(head))]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(line, width, strict=True)).rstrip() for line in (head, *body))


def main() -> int:
    """``python -m hal.backends.ascend.inspect [KERNEL] [--target CHIP] [--json] [--against FILE] [--record FILE]``.

    Exit status 1 where a verdict is not ok, or a kernel costs more than FILE says.
    """
    parser = argparse.ArgumentParser(prog="hal inspect ascend", description=inspect.__doc__)
    parser.add_argument("kernel", nargs="?")
    parser.add_argument(
        "--target", action="append", default=[], metavar="CHIP", help="compile for this chip alone; repeat for several"
    )
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    parser.add_argument("--against", type=Path, metavar="FILE", help="fail where a kernel costs more than recorded")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the costs, for --against")
    given = parser.parse_args()
    os.environ.setdefault("HAL_LANE", "lowered")
    rows = inspect(given.kernel, given.target)
    print(json.dumps(rows, indent=1) if given.json else table(rows))
    if given.record:
        given.record.write_text(json.dumps(record(rows), indent=1) + "\n")
    worse = regressions(rows, json.loads(given.against.read_text())) if given.against else []
    for line in worse:
        print(f"regressed: {line}")
    return int(bool(worse) or any(r["verdict"] != "ok" for r in rows))


if __name__ == "__main__":
    raise SystemExit(main())
