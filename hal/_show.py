"""What hal tells of itself as tables: on a terminal by rich, in a notebook as HTML. Light until asked."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

TONES = {
    "ready": "green",
    "chosen": "green",
    "on": "green",
    "ok": "green",
    "absent": "yellow",
    "unavailable": "yellow",
    "rejected": "yellow",
    "broken": "red",
    "incompatible": "red",
    "error": "red",
    "wrong": "red",
    "off": "bright_black",
    "unimplemented": "bright_black",
}
_HTML = {"green": "#2f8f5b", "yellow": "#b5851a", "red": "#c0392b", "bright_black": "#8a8a86"}


@dataclass(frozen=True)
class Grid:
    """A table of texts. The first column of it is never cut or wrapped, and no other one is cut."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    toned: Sequence[str] = ()
    """The columns whose states have colours; empty: those called ``state``."""

    def tone(self, head: str, line: str) -> str:
        """The colour of a line of a cell: that of the state it names, ``cpu: ready, when named``, or none."""
        if head not in (self.toned or ("state",)):
            return ""
        word = line.rpartition(": ")[2].replace(",", " ").split(" ")[0]
        return TONES.get(word, "")

    def rich(self) -> Table:
        from rich.table import Column, Table
        from rich.text import Text

        columns = (
            Column(h, no_wrap=i == 0, overflow="ellipsis" if i == 0 else "fold") for i, h in enumerate(self.heads)
        )
        table = Table(*columns, title=self.title or None, title_justify="left")
        for row in self.rows:
            cells = []
            for head, cell in zip(self.heads, row, strict=True):
                lines = [Text(line, style=self.tone(head, line)) for line in cell.split("\n")]
                cells.append(Text("\n").join(lines))
            table.add_row(*cells)
        return table

    def html(self) -> str:
        e = html.escape
        out = [f"<h4>{e(self.title)}</h4>" if self.title else "", "<table><thead><tr>"]
        out += [f"<th style='text-align:left'>{e(h)}</th>" for h in self.heads]
        out.append("</tr></thead><tbody>")
        for row in self.rows:
            out.append("<tr>")
            for head, cell in zip(self.heads, row, strict=True):
                lines = "<br>".join(_set_tone(line, self.tone(head, line)) for line in cell.split("\n"))
                out.append(f"<td style='text-align:left;vertical-align:top'>{lines}</td>")
            out.append("</tr>")
        return "".join(out) + "</tbody></table>"


def _set_tone(text: str, tone: str) -> str:
    shown = html.escape(text)
    return f"<span style='color:{_HTML[tone]}'>{shown}</span>" if tone else shown


def info_grids(data: Mapping[str, Any]) -> list[Grid]:
    """The tables of ``hal info``."""
    backends = [["reference", "built-in", "device", "ready", "plain torch on any device; always there"]]
    for b in data["backends"]:
        for lane, s in b["lanes"].items():
            why = s["reason"] + (f" — {s['remedy']}" if s["remedy"] else "")
            backends.append([b["name"], b["distribution"], lane, s["state"], why])
    names = ["reference", *(b["name"] for b in data["backends"])]
    ops = [[op, *("\n".join(row[n]) for n in names)] for op, row in data["ops"].items()]
    engines = [
        [e["name"], f"{e['distribution']} {e['version']}".strip() or "no", e["tested"], e["state"], e["reason"]]
        for e in data["engines"]
    ]
    environment = [[v["name"], v["value"], v["source"]] for v in data["environment"]]
    environment += [[name, "", "not ours: ignored"] for name in data["foreign_variables"]]
    return [
        Grid("Backends", ["backend", "from", "lane", "state", "why, and what would help"], backends),
        Grid("Ops", ["op", *names], ops, names),
        Grid("Engines", ["engine", "installed", "tested with", "state", "why"], engines),
        Grid("Environment", ["variable", "value", "source"], environment),
    ]


def info_head(data: Mapping[str, Any]) -> str:
    return f"hal {data['hal']}, torch {data['torch']}, python {data['python']}, lane {data['lane']}"


def info_notes(data: Mapping[str, Any]) -> list[str]:
    """What stands below the tables: kernels that can't be imported, what backends say of themselves."""
    out = []
    for reason in dict.fromkeys(f["reason"] for f in data["failures"]):
        which = [f"{f['op']}={f['backend']}" for f in data["failures"] if f["reason"] == reason]
        out.append(f"broken: {', '.join(which)}: {reason}")
    out += [f"{b['name']}: {what}: {said}" for b in data["backends"] for what, said in b["status"].items()]
    if data["blocked_plugins"]:
        out.append(f"kept from loading by HAL_PLUGINS: {', '.join(data['blocked_plugins'])}")
    return out


def page(head: str, grids: Iterable[Grid], notes: Iterable[str] = ()) -> str:
    """A fragment of HTML for a notebook."""
    e = html.escape
    parts = [f"<p><b>{e(head)}</b></p>", *(g.html() for g in grids), *(f"<p>{e(n)}</p>" for n in notes)]
    return f"<div>{''.join(parts)}</div>"
