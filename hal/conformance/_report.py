"""The verdict of a run, and its reports: terminal, JSON, JUnit, one HTML page."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from hal.conformance._cases import PROOFS
from hal.conformance._result import (
    FAILED,
    NOT_APPLICABLE,
    NOT_RUN,
    OUTCOMES,
    PASSED,
    REFUSED,
    SIMULATED,
    Case,
)
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
MARKS = {PASSED: "ok", FAILED: "FAILED", REFUSED: "refused", NOT_APPLICABLE: "n/a", NOT_RUN: "not run",
         SIMULATED: "simulated"}  # fmt: skip


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
    optional = [
        i for i in failed if i not in {c.id for c in cases if c.tag == "required" and c.op in set(core)}
    ]
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


def _proofs(cases: Sequence[Mapping[str, Any]]) -> list[str]:
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


# --- writers ----------------------------------------------------------------------------------------


def terminal(report: Mapping[str, Any]) -> str:
    """The report as text: a table per op x proof, headroom, what failed and what is missing."""
    result = report["verdict"]
    table = matrix(report["cases"])
    proofs = _proofs(report["cases"])
    ops = list(table)
    width = max([len(p) for p in proofs] + [8])
    columns = [max(len(op), *(len(cell(table[op].get(p, {}))) for p in proofs)) for op in ops]
    lines = [
        f"hal conformance: {report['backend']}, lane {report['lane']}, {report['device']}",
        f"suite {report['suite']['hash'][:12]}, hal-kernels {report['suite']['version']}, {report['seconds']:.0f} s",
        beyond(report),
        "",
        " " * width + "  " + "  ".join(op.ljust(n) for op, n in zip(ops, columns, strict=True)),
    ]
    for proof in proofs:
        cells = (cell(table[op].get(proof, {})).ljust(n) if proof in table[op] else "".ljust(n)
               for op, n in zip(ops, columns, strict=True))  # fmt: skip
        lines.append(f"{proof.ljust(width)}  {'  '.join(cells)}".rstrip())
    lines.append("")
    for op, worst in room(report["cases"]).items():
        lines.append(f"error / bound of {op}: " + ", ".join(f"{d} {v:.3f}" for d, v in sorted(worst.items())))
    for op, row in result["features"].items():
        lines.append(f"features of {op}: " + ", ".join(f"{f} {v}" for f, v in sorted(row.items())))
    for waiver in report["waivers"]:
        lines.append(f"waived: {Waiver(**waiver)}")
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for case in report["cases"]:
        if case["outcome"] == FAILED:
            alike.setdefault((case["op"], case["reason"].split("\n")[0]), []).append(case)
    for (first, *others), _ in zip(alike.values(), range(SHOWN), strict=False):
        says, *more = first["reason"].splitlines() or [""]
        lines += ["", f"FAILED {first['id']}: {says}"]
        if others:
            lines.append(f"  and {len(others)} more in the same words, e.g. {others[0]['id']}")
        if first["snippet"]:
            lines += ["  run it again:"] + ["    " + s for s in first["snippet"].splitlines()]
        lines += ["  " + line for line in more]
    if len(alike) > SHOWN:
        lines += ["", f"and {len(alike) - SHOWN} other kinds of failures; --report has them all"]
    skipped: dict[tuple[str, str, str], int] = {}
    for case in report["cases"]:
        if case["outcome"] in (NOT_RUN, REFUSED, SIMULATED):
            why = case["reason"].splitlines()[0] if case["reason"] else ""
            key = (MARKS[case["outcome"]], case["op"], why)
            skipped[key] = skipped.get(key, 0) + 1
    if skipped:
        lines.append("")
    lines += [f"{mark}: {op}, {n} case{'s' * (n > 1)}: {why}" for (mark, op, why), n in skipped.items()]
    counts = ", ".join(f"{n} {MARKS[o].lower()}" for o, n in result["counts"].items() if n)
    lines += ["", counts.replace(" ok", " passed")]
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


def write(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """report.json, report.xml (JUnit) and report.html in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    out = []
    for name, text in (
        ("report.json", json.dumps(report, indent=1) + "\n"),
        ("report.xml", junit(report)),
        ("report.html", page(report)),
    ):
        path = folder / name
        path.write_text(text, encoding="utf-8")
        out.append(path)
    return out


def junit(report: Mapping[str, Any]) -> str:
    """JUnit XML: a test suite per op; what did not run is skipped, never passed."""
    root = ElementTree.Element("testsuites", name=f"hal conformance {report['backend']} ({report['lane']})")
    for op in matrix(report["cases"]):
        mine = [c for c in report["cases"] if c["op"] == op]
        suite = ElementTree.SubElement(
            root, "testsuite", name=op, tests=str(len(mine)),
            failures=str(sum(c["outcome"] == FAILED for c in mine)),
            skipped=str(sum(c["outcome"] in (REFUSED, NOT_RUN, NOT_APPLICABLE, SIMULATED) for c in mine)),
            time=f"{sum(c['seconds'] for c in mine):.3f}",
        )  # fmt: skip
        for c in mine:
            case = ElementTree.SubElement(
                suite, "testcase", classname=f"{op}.{c['proof']}", name=c["id"].split("/", 2)[2],
                time=f"{c['seconds']:.4f}",
            )  # fmt: skip
            if c["outcome"] == FAILED:
                body = ElementTree.SubElement(
                    case, "failure", message=_plain(c["reason"].splitlines()[0] if c["reason"] else "")
                )
                body.text = _plain(c["reason"] + "\n\n" + c["snippet"])
            elif c["outcome"] != PASSED:
                ElementTree.SubElement(
                    case, "skipped", message=_plain(f"{MARKS[c['outcome']]}: {c['reason']}")
                )
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _plain(text: str) -> str:
    """`text` without what XML 1.0 can't hold."""
    return "".join(c for c in text if c in "\n\t" or ord(c) >= 32)


_STYLE = """
:root{--ink:#1c1c1a;--soft:#6b6a66;--line:#dcdad4;--paper:#fbfaf7;
  --good:#2f6f4f;--bad:#b3261e;--mark:#c98a1b}
@media(prefers-color-scheme:dark){:root{--ink:#e8e6e1;--soft:#a09d96;--line:#3a3936;--paper:#171715;
  --good:#7dc4a0;--bad:#ff8a80;--mark:#e5b25d}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);
  max-width:70rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .5rem}p{margin:.3rem 0}.soft{color:var(--soft)}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.25rem .8rem .25rem 0;border-bottom:1px solid var(--line);
  vertical-align:top;white-space:nowrap}
td.why{white-space:pre-wrap;overflow-wrap:anywhere}.good{color:var(--good)}.bad{color:var(--bad);font-weight:600}.dim{color:var(--soft)}
code,pre{font:13px/1.45 ui-monospace,monospace}
pre{background:color-mix(in srgb,var(--ink) 6%,transparent);padding:.6rem;overflow-x:auto}
svg text{fill:var(--ink);font:13px system-ui,sans-serif}
"""


def page(report: Mapping[str, Any]) -> str:
    """One HTML page that needs nothing beside it."""
    e = html.escape
    result, cases = report["verdict"], report["cases"]
    table = matrix(cases)
    proofs = _proofs(cases)
    state = (
        "certified" if result["certified"] else "failed" if result["failed"] else "not certified"
        if report["certify"] else "passed, not a certificate"
    )  # fmt: skip
    tone = "good" if result["certified"] or state.startswith("passed") else "bad"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>hal conformance: {e(report['backend'])}</title><style>{_STYLE}</style>",
        f"<h1>{e(report['backend'])}: <span class={tone}>{e(state)}</span></h1>",
        f"<p>lane {e(report['lane'])}, {e(report['device'])}, {e(report['date'])}</p>",
        f"<p class=soft>suite {e(report['suite']['hash'])}, hal-kernels {e(report['suite']['version'])}</p>",
        f"<p class=soft>code {e(report['code']['sha256'])}, {len(report['code']['files'])} files</p>",
        f"<p class=soft>{e(beyond(report))}</p>",
        f"<p class=soft>{e(NOTE)}</p>",
        f"<p class=soft>{e(report['trust']['can_not_show'])}</p>",
        "<details class=soft><summary>The word of the backend's own process</summary><ul>"
        + "".join(f"<li>{e(w)}</li>" for w in report["trust"]["its_word"])
        + "</ul></details>",
    ]
    if report["trust"]["own_oracle"]:
        own = ", ".join(report["trust"]["own_oracle"])
        parts.append(f"<p>Judged by the plugin's own contracts, where its code runs: {e(own)}.</p>")
    if result["lacking"]:
        parts.append(
            "<h2>What certification lacks</h2><ul>"
            + "".join(f"<li>{e(r)}" for r in result["lacking"])
            + "</ul>"
        )
    parts.append(
        "<h2>Cases by op and proof</h2><div class=wide><table><tr><th>"
        + "".join(f"<th>{e(o)}" for o in table)
    )
    for proof in proofs:
        parts.append(f"<tr><th>{e(proof)}")
        for op in table:
            counts = table[op].get(proof)
            text = cell(counts) if counts else ""
            look = "bad" if "FAILED" in text else "dim" if not text or text[0] == "n" else "good"
            parts.append(f"<td class={look}>{e(text)}")
    parts.append("</table></div>")
    worst = [(op, d, v) for op, row in room(cases).items() for d, v in sorted(row.items())]
    if worst:
        parts.append("<h2>Largest error, in units of the bound</h2>" + _bars(worst))
    if result["features"]:
        parts.append("<h2>Optional features</h2><table>")
        for op, row in result["features"].items():
            for name, yes in sorted(row.items()):
                look = {"yes": "good", "FAILED": "bad"}.get(yes, "dim")
                parts.append(f"<tr><td>{e(op)}<td>{e(name)}<td class={look}>{e(yes)}")
        parts.append("</table>")
    parts.append("<h2>Waivers</h2>")
    shown = [str(Waiver(**w)) for w in report["waivers"]]
    parts.append(
        "<ul>" + "".join(f"<li>{e(w)}" for w in shown) + "</ul>" if shown else "<p class=soft>none</p>"
    )
    for title, outcome in (
        ("Failed", FAILED),
        ("Not run", NOT_RUN),
        ("Refused", REFUSED),
        ("Simulated", SIMULATED),
    ):
        some = [c for c in cases if c["outcome"] == outcome]
        if some:
            rows = "".join(
                f"<tr><td><code>{e(c['id'])}</code><td class=why>{e(c['reason'])}"
                + (f"<pre>{e(c['snippet'])}</pre>" if c["snippet"] else "")
                for c in some
            )
            parts.append(f"<h2>{title}: {len(some)}</h2><div class=wide><table>{rows}</table></div>")
    parts.append("<h2>What it ran with</h2><div class=wide><table>")
    for d in report["environment"]["distributions"]:
        record = e(d["record_sha256"] or "no RECORD")
        parts.append(f"<tr><td>{e(d['name'])}<td>{e(d['version'])}<td class=dim><code>{record}</code>")
    for name in ("python", "platform"):
        parts.append(f"<tr><td>{name}<td colspan=2>{e(report['environment'][name])}")
    parts.append("</table></div></html>")
    return "\n".join(parts) + "\n"


def _bars(rows: list[tuple[str, str, float]]) -> str:
    """A bar per op and dtype, with the bound as a line at 1."""
    height, left, span = 22, 230, 420
    out = [
        f"<div class=wide><svg width={left + span + 90} height={height * len(rows) + 30} role=img "
        "aria-label='error over bound'>"
    ]
    for i, (op, dtype, value) in enumerate(rows):
        y = i * height + 4
        color = "var(--good)" if value <= 1 else "var(--bad)"
        out.append(
            f"<text x={left - 10} y={y + 13} text-anchor=end>{html.escape(op)} {html.escape(dtype)}</text>"
            f"<rect x={left} y={y} width={min(value, 1.15) * span:.1f} height=16 fill='{color}'/>"
            f"<text x={left + min(value, 1.15) * span + 6:.1f} y={y + 13}>{value:.3f}</text>"
        )
    x = left + span
    bottom = height * len(rows) + 4
    out.append(
        f"<line x1={x} y1=0 x2={x} y2={bottom} stroke='var(--mark)' stroke-width=1.5/>"
        f"<text x={x} y={bottom + 18} text-anchor=middle>bound</text>"
    )
    return "".join(out) + "</svg></div>"
