"""The verdict of a run, and its report on the terminal."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hal.conformance._cases import PROOFS
from hal.conformance._result import FAILED, NOT_APPLICABLE, NOT_RUN, OUTCOMES, PASSED, REFUSED, SIMULATED, Case
from hal.conformance._waivers import Waiver, faults

SCHEMA = "hal-conformance/2"
NOTE = (
    "A report guards against mistakes, not against forgery: --verify shows that it is consistent, "
    "not that the run took place; --rerun executes cases of it again."
)
ITS_WORD = {
    "whose code ran (no secret fallback, its own launcher)": "value",
    "that an implementation which refuses a call would not have run it right": "supports",
    "that a bad argument raised, and what": "errors",
    "what the process holds after many calls": "leak",
    "that the stream was busy after the call, and nothing asked for it to be waited for": "sync",
    "that a call ran on the stream, in the graph, or between the kernels that it should": "stream",
    "what device memory a call holds": "memory",
}
"""What the process of the backend says, and nobody else has seen -> a proof that rests on it."""
CAN_NOT_SHOW = (
    "Values, and bytes that must stay as they were, are compared outside of the process that the backend runs in, with "
    "an answer that was never in it. A backend that recognises the suite, by its inputs, its memory or the processes "
    "around it, and does right for it alone, is not found out; nor is one that changes files of hal or of Python, or "
    "other processes of its user. This tests that code is right; it is no fence around code that means harm."
)
SHOWN = 12
"""Kinds of failures that the terminal shows."""
MARKS = {
    PASSED: "ok",
    FAILED: "FAILED",
    REFUSED: "refused",
    NOT_APPLICABLE: "n/a",
    NOT_RUN: "not run",
    SIMULATED: "simulated",
}


def verdict(
    cases: Sequence[Case],
    outcomes: Mapping[str, str],
    waivers: Sequence[Waiver],
    *,
    core: Iterable[str],
    certify: bool,
    today: str,
    reasons: Mapping[str, str],
) -> dict[str, Any]:
    """What the outcomes come to. A pure function: `--verify` calls it again.

    Certified is: every required case of every core op passed or does not apply, nothing has failed, no
    waiver is at fault. What is waived counts as failed for a core op; `simulated` counts neither way.
    """
    waived = {c.id for c in cases if any(w.covers(c.id) for w in waivers)}
    counts = Counter(outcomes.get(c.id, NOT_RUN) for c in cases)
    ops = list(dict.fromkeys(c.op for c in cases))
    wrong = faults(waivers, {c.id: outcomes.get(c.id, NOT_RUN) for c in cases}, today, ops)
    failed = [c.id for c in cases if outcomes.get(c.id) == FAILED and c.id not in waived]
    lacking: list[str] = []
    for op in core:
        mine = [c for c in cases if c.op == op]
        if not mine:
            lacking.append(f"{op}: not part of this run")
            continue
        required = [c for c in mine if c.tag == "required"]
        bad = [c for c in required if outcomes.get(c.id, NOT_RUN) not in (PASSED, NOT_APPLICABLE, SIMULATED)]
        if bad and all(outcomes.get(c.id, NOT_RUN) == NOT_RUN for c in mine):
            lacking.append(
                f"{op}: not run ({reasons.get(mine[0].id) or 'no reason given'}), all {len(required)} required cases"
            )
            continue
        for outcome in (FAILED, REFUSED, NOT_RUN):
            some = [c for c in bad if outcomes.get(c.id, NOT_RUN) == outcome]
            if some:
                why = f" ({reasons.get(some[0].id, '').splitlines()[0]})" if reasons.get(some[0].id) else ""
                many = f"{len(some)} required case{'s' * (len(some) > 1)}"
                lacking.append(f"{op}: {many} {MARKS[outcome].lower()}, first {some[0].id}{why}")
    optional = [i for i in failed if i not in {c.id for c in cases if c.tag == "required" and c.op in set(core)}]
    if optional:
        lacking.append(f"{len(optional)} other case{'s' * (len(optional) > 1)} failed, first {optional[0]}")
    lacking += wrong
    if not certify:
        lacking.append("the run was not made with --certify")
    ran = sum(counts[o] for o in (PASSED, FAILED, REFUSED, SIMULATED))
    return {
        "certified": not lacking,
        "lacking": lacking,
        "failed": failed,
        "waiver_faults": wrong,
        "counts": {o: counts[o] for o in OUTCOMES},
        "ran": ran,
        "features": features(cases, outcomes),
    }


def trust(own: Sequence[str]) -> dict[str, Any]:
    """What the report rests on.

    Args:
        own: the ops whose contracts, and so whose truth, are the plugin's own code.
    """
    return {"own_oracle": list(own), "its_word": list(ITS_WORD), "can_not_show": CAN_NOT_SHOW}


def features(cases: Sequence[Case], outcomes: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """op -> feature -> ``yes``, ``no`` (refused), ``FAILED``, or ``not run``: the columns of the certificate."""
    out: dict[str, dict[str, str]] = {}
    for case in cases:
        if case.tag == "required":
            continue
        row = out.setdefault(case.op, {})
        name = case.tag.removeprefix("feature:")
        outcome = outcomes.get(case.id, NOT_RUN)
        if case.proof == "supports" and outcome == PASSED:
            continue
        now = {PASSED: "yes", SIMULATED: "yes", REFUSED: "no", FAILED: "FAILED"}.get(outcome, "not run")
        before = row.get(name, now)
        order = ("FAILED", "not run", "no", "yes")
        row[name] = min(before, now, key=order.index)
    return out


def exit_code(result: Mapping[str, Any], certify: bool) -> int:
    """0 ok, 1 failed (or not certified, when that was asked for), 3 nothing ran."""
    if not result["ran"]:
        return 3
    if result["failed"] or result["waiver_faults"]:
        return 1
    return int(certify and not result["certified"])


def matrix(cases: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Counter[str]]]:
    """op -> proof -> how many of each outcome."""
    out: dict[str, dict[str, Counter[str]]] = {}
    for case in cases:
        out.setdefault(case["op"], {}).setdefault(case["proof"], Counter())[case["outcome"]] += 1
    return out


def proofs_of(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """The proofs of `cases`, in the suite's order."""
    return [p for p in PROOFS if any(c["proof"] == p for c in cases)]


def cell(counts: Mapping[str, int]) -> str:
    """``12``, ``11/12``, ``n/a``, ``not run``: passed of what should have run."""
    total = sum(n for o, n in counts.items() if o != NOT_APPLICABLE)
    good = counts.get(PASSED, 0) + counts.get(SIMULATED, 0)
    if not total:
        return "n/a"
    if counts.get(NOT_RUN, 0) == total:
        return "not run"
    text = str(good) if good == total else f"{good}/{total}"
    if counts.get(FAILED):
        text += f" {counts[FAILED]} FAILED"
    if counts.get(REFUSED):
        text += f" ({counts[REFUSED]} refused)"
    return text


def room(cases: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """op -> dtype -> the largest error, in units of the bound."""
    out: dict[str, dict[str, float]] = {}
    for case in cases:
        for dtype, worst in case["headroom"].items():
            row = out.setdefault(case["op"], {})
            row[dtype] = max(row.get(dtype, 0.0), worst)
    return out


def beyond(report: Mapping[str, Any]) -> str:
    """What was tried beyond the fixed samples, and on a slow lane how much less."""
    told = report["beyond_samples"]
    fresh, soak = told["fresh"], told["soak"]
    fewer = "".join(
        f"; {c['op']}: {c['reason']}"
        for c in report["cases"]
        if c["proof"] in ("soak", "leak") and c["outcome"] == "passed" and c["reason"]
    )
    return (
        f"beyond the samples: seed {told['seed']}, sizes {fresh['scale']}, {fresh['pairs']} pairs, "
        f"{fresh['mixed']} mixtures; {soak['calls']:,} calls in a row, memory after {soak['leak_calls']:,}, "
        f"seen again {soak['later_seconds']:g} s later{fewer}"
    )


# --- the terminal -----------------------------------------------------------------------------------


def terminal(report: Mapping[str, Any]) -> str:
    """The report as text: a table per op x proof, headroom, what failed and what is missing."""
    result = report["verdict"]
    lines = [
        f"hal conformance: {report['backend']}, lane {report['lane']}, {report['device']}",
        f"suite {report['suite']['hash'][:12]}, hal-kernels {report['suite']['version']}, {report['seconds']:.0f} s",
        beyond(report),
    ]
    # A pipe is as wide as what comes.
    lines += _matrix(report["cases"], shutil.get_terminal_size((10_000, 24)).columns)
    lines.append("")
    for op, worst in room(report["cases"]).items():
        lines.append(f"error / bound of {op}: " + ", ".join(f"{d} {v:.3f}" for d, v in sorted(worst.items())))
    ran = ops_run(report["cases"])
    for op, row in ((op, row) for op, row in result["features"].items() if op in ran):
        lines.append(f"features of {op}: " + ", ".join(f"{f} {v}" for f, v in sorted(row.items())))
    for waiver in report["waivers"]:
        lines.append(f"waived: {Waiver(**waiver)}")
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for case in report["cases"]:
        if case["outcome"] == FAILED:
            alike.setdefault((case["op"], case["reason"].split("\n")[0]), []).append(case)
    for (first, *others), _ in zip(alike.values(), range(SHOWN), strict=False):
        says, again, more = tell_case(first)
        lines += ["", f"FAILED {first['id']}: {says}"]
        if others:
            lines.append(f"  and {len(others)} more in the same words, e.g. {others[0]['id']}")
        if again:
            lines += ["  run it again:"] + ["    " + s for s in again.splitlines()]
        lines += ["  " + line for line in more.splitlines()]
    if len(alike) > SHOWN:
        lines += ["", f"and {len(alike) - SHOWN} other kinds of failures; --report has them all"]
    lines += _skip_lines(report["cases"])
    lines += ["", count_outcomes(result)]
    own = report["trust"]["own_oracle"]
    if own:
        lines.append(f"judged by the plugin's own contracts, where its code runs: {', '.join(own)}")
    if report["certify"]:
        lines.append("CERTIFIED" if result["certified"] else "NOT CERTIFIED")
        lines += [f"  {r}" for r in result["lacking"]]
    elif len(result["lacking"]) > 1:
        lines.append("for certification it lacks:")
        lines += [f"  {r}" for r in result["lacking"][:-1]]
    return "\n".join(lines)


def ops_run(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """The ops of which anything ran; all, where nothing did."""
    ran = dict.fromkeys(c["op"] for c in cases if c["outcome"] != NOT_RUN)
    return list(ran) or list(dict.fromkeys(c["op"] for c in cases))


def _matrix(cases: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """Lines: proofs x ops, as many ops beside each other as `width` holds."""
    proofs = proofs_of(cases)
    table = {op: row for op, row in matrix(cases).items() if op in ops_run(cases)}
    first = max([len(p) for p in proofs] + [8])
    sizes = {op: max(len(op), *(len(cell(row.get(p, {}))) for p in proofs)) for op, row in table.items()}
    lines: list[str] = []
    todo = list(table)
    while todo:
        block = [todo.pop(0)]
        while todo and first + sum(2 + sizes[op] for op in [*block, todo[0]]) <= width:
            block.append(todo.pop(0))
        lines += ["", " " * first + "".join(f"  {op:<{sizes[op]}}" for op in block).rstrip()]
        for proof in proofs:
            cells = (cell(table[op][proof]) if proof in table[op] else "" for op in block)
            text = "".join(f"  {c:<{sizes[op]}}" for c, op in zip(cells, block, strict=True))
            lines.append(f"{proof:<{first}}{text}".rstrip())
    return lines


def _skip_lines(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines: what was refused or has not run, and why; ops of which the same is said but for their name in one."""
    found: dict[tuple[str, str, bool], Counter[str]] = {}
    ran = ops_run(cases)
    for case in cases:
        if case["outcome"] in (NOT_RUN, REFUSED, SIMULATED):
            op, why = case["op"], case["reason"].partition("\n")[0]
            whole = op not in ran
            key = (MARKS[case["outcome"]], why.replace(op, "…") if whole else why, whole)
            found.setdefault(key, Counter())[op] += 1
    lines = [""] if found else []
    for (mark, why, whole), counts in found.items():
        if whole and len(counts) > 1:
            said = why.replace("no …", "none of these").replace("…", "these")
            lines.append(f"{mark}: {len(counts)} ops, {counts.total()} cases: {said}: {', '.join(counts)}")
            continue
        for op, n in counts.items():
            lines.append(f"{mark}: {op}, {n} case{'s' * (n > 1)}: {why.replace('…', op)}")
    return lines


def count_outcomes(result: Mapping[str, Any]) -> str:
    """``72 passed, 5 n/a``"""
    counts = ", ".join(f"{n} {MARKS[o].lower()}" for o, n in result["counts"].items() if n)
    return counts.replace(" ok", " passed")


def tell_case(case: Mapping[str, Any]) -> tuple[str, str, str]:
    """What failed in a line, the program that runs it again, and the rest: in the order in which one wants to read."""
    says, _, more = case["reason"].partition("\n")
    return says, case["snippet"], more


def failure_text(case: Mapping[str, Any]) -> str:
    """`told` as plain text."""
    says, again, more = tell_case(case)
    return "\n\n".join(filter(None, (says, again and f"run it again:\n{again.rstrip()}", more)))
