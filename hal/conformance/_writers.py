"""The files of a report: JSON, JUnit, one HTML page."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from hal._errors import HalError
from hal.conformance._picture import svg
from hal.conformance._report import (
    MARKS,
    NOTE,
    SHOWN,
    beyond,
    cell,
    count_outcomes,
    failure_text,
    matrix,
    ops_run,
    proofs_of,
    room,
    tell_case,
)
from hal.conformance._result import FAILED, NOT_APPLICABLE, NOT_RUN, PASSED, REFUSED, SIMULATED
from hal.conformance._waivers import Waiver


class Report(dict[str, Any]):
    """A run's report: plain data, as report.json holds it; a notebook shows it as a picture.

    Example:
        >>> import hal.conformance
        >>> report = hal.conformance.Report.read("docs/conformance/cpu/report.json")  # doctest: +SKIP
    """

    @classmethod
    def read(cls, path: str | Path) -> Report:
        """A report.json.

        Raises:
            HalError: it can't be read, or is no report.
        """
        from hal.conformance import _verify

        try:
            return cls(_verify.read(Path(path)))
        except (OSError, ValueError) as e:
            raise HalError(f"hal: conformance: {path}: not a report: {e}") from None

    def _repr_html_(self) -> str:
        e = html.escape
        failed = [c for c in self["cases"] if c["outcome"] == FAILED]
        return (
            f"<p><b>{e(self['backend'])}</b>, lane {e(self['lane'])}, {e(self['device'])}, {e(self['date'])}: "
            f"{e(count_outcomes(self['verdict']))}</p>"
            + "".join(map(_failure, failed[:SHOWN]))
            + (f"<p>and {len(failed) - SHOWN} more</p>" if len(failed) > SHOWN else "")
            + svg(self["cases"])
        )


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
            root,
            "testsuite",
            name=op,
            tests=str(len(mine)),
            failures=str(sum(c["outcome"] == FAILED for c in mine)),
            skipped=str(sum(c["outcome"] in (REFUSED, NOT_RUN, NOT_APPLICABLE, SIMULATED) for c in mine)),
            time=f"{sum(c['seconds'] for c in mine):.3f}",
        )
        for c in mine:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=f"{op}.{c['proof']}",
                name=c["id"].split("/", 2)[2],
                time=f"{c['seconds']:.4f}",
            )
            if c["outcome"] == FAILED:
                body = ElementTree.SubElement(case, "failure", message=_plain(tell_case(c)[0]))
                body.text = _plain(failure_text(c))
            elif c["outcome"] != PASSED:
                ElementTree.SubElement(case, "skipped", message=_plain(f"{MARKS[c['outcome']]}: {c['reason']}"))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _plain(text: str) -> str:
    """`text` without what XML 1.0 can't hold."""
    return "".join(c for c in text if c in "\n\t" or ord(c) >= 32)


_STYLE = """
:root{--ink:#1c1c1a;--soft:#6b6a66;--line:#dcdad4;--paper:#fbfaf7;
  --good:#2f6f4f;--good-soft:#8fbfa4;--bad:#b3261e;--mark:#c98a1b}
@media(prefers-color-scheme:dark){:root{--ink:#e8e6e1;--soft:#a09d96;--line:#3a3936;--paper:#171715;
  --good:#3f8f68;--good-soft:#2c5a45;--bad:#d9534a;--mark:#b9862f}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);
  max-width:70rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .5rem}p{margin:.3rem 0}.soft,summary{color:var(--soft)}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.25rem .8rem .25rem 0;border-bottom:1px solid var(--line);
  vertical-align:top;white-space:nowrap}
td.why,.why{white-space:pre-wrap;overflow-wrap:anywhere}.good{color:var(--good)}.bad{color:var(--bad);font-weight:600}.dim{color:var(--soft)}
code,pre{font:13px/1.45 ui-monospace,monospace}
pre{background:color-mix(in srgb,var(--ink) 6%,transparent);padding:.6rem;overflow-x:auto}
svg text{fill:var(--ink);font:13px system-ui,sans-serif}
"""


def page(report: Mapping[str, Any]) -> str:
    """One HTML page that needs nothing beside it."""
    e = html.escape
    result, cases = report["verdict"], report["cases"]
    state = (
        "certified"
        if result["certified"]
        else "failed"
        if result["failed"]
        else "not certified"
        if report["certify"]
        else "passed, not a certificate"
    )
    tone = "good" if result["certified"] or state.startswith("passed") else "bad"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>hal conformance: {e(report['backend'])}</title><style>{_STYLE}</style>",
        f"<h1>{e(report['backend'])}: <span class={tone}>{e(state)}</span></h1>",
        f"<p>lane {e(report['lane'])}, {e(report['device'])}, {e(report['date'])}: {e(count_outcomes(result))}</p>",
    ]
    failed = [c for c in cases if c["outcome"] == FAILED]
    if failed:
        parts.append(f"<h2>Failed: {len(failed)}</h2>" + "".join(map(_failure, failed)))
    parts.append("<h2>Ops and their features</h2><div class=wide>" + svg(cases) + "</div>")
    if result["lacking"]:
        lacking = "".join(f"<li>{e(r)}" for r in result["lacking"])
        parts.append(f"<h2>What certification lacks</h2><ul>{lacking}</ul>")
    ran = ops_run(cases)
    shown = matrix([c for c in cases if c["op"] in ran])
    parts.append("<h2>Cases by op and proof</h2><div class=wide><table><tr><th>")
    parts.append("".join(f"<th>{e(proof)}" for proof in proofs_of(cases)))
    for op, row in shown.items():
        parts.append(f"<tr><th>{e(op)}")
        for proof in proofs_of(cases):
            text = cell(row[proof]) if proof in row else ""
            look = "bad" if "FAILED" in text else "dim" if not text or text[0] == "n" else "good"
            parts.append(f"<td class={look}>{e(text)}")
    parts.append("</table></div>")
    worst = [(op, d, v) for op, row in room(cases).items() for d, v in sorted(row.items())]
    if worst:
        parts.append("<h2>Largest error, in units of the bound</h2>" + _bars(worst))
    waivers = "".join(f"<li>{e(str(Waiver(**w)))}" for w in report["waivers"])
    parts.append("<h2>Waivers</h2>" + (f"<ul>{waivers}</ul>" if waivers else "<p class=soft>none</p>"))
    for title, outcome in (("Refused", REFUSED), ("Simulated", SIMULATED), ("Not run", NOT_RUN)):
        some = [c for c in cases if c["outcome"] == outcome]
        if some:
            rows = "".join(f"<tr><td><code>{e(c['id'])}</code><td class=why>{e(c['reason'])}" for c in some)
            parts.append(f"<h2>{title}: {len(some)}</h2>" + _fold(rows, "the cases, each with its reason"))
    parts.append("<h2>What it ran with, and what it rests on</h2>")
    parts += [
        f"<p class=soft>{e(line)}</p>"
        for line in (
            f"suite {report['suite']['hash']}, hal-kernels {report['suite']['version']}",
            f"code {report['code']['sha256']}, {len(report['code']['files'])} files",
            beyond(report),
            NOTE,
            report["trust"]["can_not_show"],
        )
    ]
    if report["trust"]["own_oracle"]:
        own = ", ".join(report["trust"]["own_oracle"])
        parts.append(f"<p>Judged by the plugin's own contracts, where its code runs: {e(own)}.</p>")
    word = "".join(f"<li>{e(w)}</li>" for w in report["trust"]["its_word"])
    parts.append(f"<details><summary>The word of the backend's own process</summary><ul>{word}</ul></details>")
    parts.append("<div class=wide><table>")
    for d in report["environment"]["distributions"]:
        record = e(d["record_sha256"] or "no RECORD")
        parts.append(f"<tr><td>{e(d['name'])}<td>{e(d['version'])}<td class=dim><code>{record}</code>")
    for name in ("python", "platform"):
        parts.append(f"<tr><td>{name}<td colspan=2>{e(report['environment'][name])}")
    parts.append("</table></div></html>")
    return "\n".join(parts) + "\n"


def _failure(case: Mapping[str, Any]) -> str:
    """What failed and how to run it again; the rest to unfold."""
    says, again, more = map(html.escape, tell_case(case))
    return (
        f"<section><p><code>{html.escape(case['id'])}</code> <span class='bad why'>{says}</span></p>"
        + (f"<pre>{again}</pre>" if again else "")
        + (f"<details><summary>more</summary><pre>{more}</pre></details>" if more else "")
        + "</section>"
    )


def _fold(rows: str, title: str) -> str:
    return f"<details><summary>{title}</summary><div class=wide><table>{rows}</table></div></details>"


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
