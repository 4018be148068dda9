"""A run as one picture: ops x features, a square each; SVG as text, for a page or a notebook."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from hal.conformance._result import FAILED, NOT_APPLICABLE, NOT_RUN, PASSED, REFUSED, SIMULATED

# A page's own colours, and what they are where the picture stands alone.
COLORS = {
    "passed": "var(--good,#2f6f4f)",
    "simulated": "var(--good-soft,#8fbfa4)",
    "refused": "var(--mark,#c98a1b)",
    "failed": "var(--bad,#b3261e)",
    "not run": "var(--line,#c9c6bf)",
}
SIGNS = {"passed": "✓", "simulated": "~", "refused": "–", "failed": "✕", "not run": ""}
"""Beside the colours, for who can't tell them apart."""
CELL, TOP, LEFT = 26, 110, 230


def columns(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """``required``, then the features of all ops, then nothing else."""
    tags = dict.fromkeys(c["tag"] for c in cases)
    return ["required", *sorted(t.removeprefix("feature:") for t in tags if t != "required")]


def squares(cases: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """op -> column -> one of `COLORS`: failed before not run before refused before simulated before passed.

    Of what does not apply, and of features that an op has not, there is no square.
    """
    found: dict[str, dict[str, set[str]]] = {}
    for c in cases:
        if c["outcome"] != NOT_APPLICABLE:
            row = found.setdefault(c["op"], {})
            # `supports` passes where a refusal is right, too.
            if c["tag"] == "required" or c["proof"] != "supports" or c["outcome"] != PASSED:
                row.setdefault(c["tag"].removeprefix("feature:"), set()).add(c["outcome"])
    names = {FAILED: "failed", NOT_RUN: "not run", REFUSED: "refused", SIMULATED: "simulated", PASSED: "passed"}
    return {
        op: {tag: next(name for o, name in names.items() if o in seen) for tag, seen in row.items()}
        for op, row in found.items()
    }


def svg(cases: Sequence[Mapping[str, Any]]) -> str:
    """The picture; each square says in words what it is when pointed at."""
    heads, rows = columns(cases), squares(cases)
    width = LEFT + CELL * len(heads) + 90
    bottom = TOP + CELL * len(rows)
    out = [
        f"<svg width={width} height={bottom + 40} viewBox='0 0 {width} {bottom + 40}' role=img "
        "aria-label='ops and their features' font-family='system-ui,sans-serif' font-size=13 fill=currentColor>"
    ]
    for i, name in enumerate(heads):
        x, y = LEFT + CELL * i + CELL / 2 + 4, TOP - 8
        out.append(f"<text x={x:g} y={y} transform='rotate(-45 {x:g} {y})'>{html.escape(name)}</text>")
    for j, (op, row) in enumerate(rows.items()):
        y = TOP + CELL * j
        out.append(f"<text x={LEFT - 10} y={y + 17} text-anchor=end>{html.escape(op)}</text>")
        for i, name in enumerate(heads):
            if name in row:
                out.append(_square(LEFT + CELL * i, y, row[name], f"{op}, {name}: {row[name]}"))
    x = LEFT
    for name in COLORS:
        if any(name in row.values() for row in rows.values()):
            out.append(_square(x, bottom + 12, name, name))
            out.append(f"<text x={x + CELL + 4} y={bottom + 29}>{name}</text>")
            x += CELL + 20 + 8 * len(name)
    return "".join(out) + "</svg>"


def _square(x: int, y: int, look: str, says: str) -> str:
    size, says = CELL - 4, html.escape(says)
    return (
        f"<g><title>{says}</title><rect x={x} y={y} width={size} height={size} rx=4 fill='{COLORS[look]}'/>"
        f"<text x={x + size / 2:g} y={y + 16} text-anchor=middle style='fill:white'>{SIGNS[look]}</text></g>"
    )
