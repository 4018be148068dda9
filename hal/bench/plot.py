"""A run as a picture: bytes moved per second over the size of a call, with a plain copy as the roof."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hal._errors import HalError
from hal._output import check_folder

NEEDS = "needs matplotlib — pip install 'hal-kernels[bench]'"
FORMATS = (".png", ".pdf", ".svg")
DRAWN = {
    "cpu": ("rope_kv_write",),
    "cuda": ("rope_kv_write", "kv_write", "mla_kv_write", "mla_rope_kv_write", "qk_norm_rope_kv_write", "kv_move"),
}
"""The tables that have a roofline."""
_COLOURS = {
    "hal": "#d1495b",
    "torch.compile": "#edae49",
    "eager": "#66a182",
    "reference": "#8d96a3",
    "memcpy": "#2e4057",
    "copy": "#2e4057",
}
_ROOFS = ("memcpy", "copy")
MODEL = "llama3-8b"
Panels = dict[str, dict[str, list[tuple[int, float]]]]
"""Title -> line -> (size of the call, GB/s)."""


def check_plot(kind: str, names: Sequence[str], file: Path) -> None:
    """Raises for a plot that can't be drawn, before hours of work and not after."""
    for name in names:
        if name not in DRAWN[kind]:
            raise HalError(f"hal: bench: --plot: {name} on {kind} has no roofline; expected {', '.join(DRAWN[kind])}")
    if file.suffix not in FORMATS:
        raise HalError(f"hal: bench: --plot: expected a file that ends in {', '.join(FORMATS)}; got {file}")
    if importlib.util.find_spec("matplotlib") is None:
        raise HalError(f"hal: bench: --plot {NEEDS}")
    check_folder("bench", "--plot", file.parent)


def draw(run: dict[str, Any], file: str) -> None:
    """Draws a panel for each table, and on a CPU for each shape of it, as PNG, PDF or SVG by the file's name.

    Raises:
        HalError: matplotlib is not installed, or the run has no table with bytes over sizes.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise HalError(f"hal: bench: --plot {NEEDS}") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = _cpu_panels(run) if run["machine"]["device"] == "cpu" else _gpu_panels(run)
    if not panels:
        tables = ", ".join(DRAWN["cpu" if run["machine"]["device"] == "cpu" else "cuda"])
        raise HalError(f"hal: bench: --plot needs a table with GB/s by tokens, such as {tables}")
    inches = 4.2 * len(panels)
    figure, axes = plt.subplots(1, len(panels), figsize=(inches, 4.2), sharey=True, squeeze=False, layout="constrained")
    for axis, (name, lines) in zip(axes[0], panels.items(), strict=True):
        for line, points in lines.items():
            sizes, speeds = zip(*sorted(points), strict=True)
            roof = line in _ROOFS
            axis.plot(
                sizes,
                speeds,
                "--" if roof else "o-",
                color=_COLOURS.get(line),
                label=f"{line}: the roof" if roof else line,
                linewidth=2.5 if line == "hal" else 1.5,
            )
        ticks = sorted({size for points in lines.values() for size, _ in points})
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=name, xticks=ticks)
        axis.set_xticklabels(map(str, ticks))
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8)
    axes[0][0].set_ylabel("GB/s read and written")
    figure.suptitle(title(run, inches), fontsize=11)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _cpu_panels(run: dict[str, Any]) -> Panels:
    """By the best of all calls; a shape with one size alone has none."""
    panels: Panels = {}
    for row in run["rows"]:
        if row["op"] == "rope_kv_write" and "memcpy" in row.get("wall_us", ()):
            lines = panels.setdefault(f"{row['model']}, {row['dtype']}", {})
            for name in filter(row["best"].__contains__, _COLOURS):
                lines.setdefault(name, []).append((row["tokens"], row["work"]["bytes"] / row["best"][name] / 1e3))
    return {name: lines for name, lines in panels.items() if len(lines["memcpy"]) > 1}


def _gpu_panels(run: dict[str, Any]) -> Panels:
    """Of one model's shapes; the copies of all rows are one line."""
    panels: Panels = {}
    for row in run["rows"]:
        if row.get("model", MODEL) != MODEL:
            continue
        size = row.get("tokens", row.get("rows"))
        for name, gbs in row.get("device_gbs", {}).items():
            kinds = () if name in _ROOFS else (row.get("cache"), row.get("slots"))
            line = ", ".join([name, *filter(None, kinds)])
            points = panels.setdefault(row["op"], {}).setdefault(line, [])
            if size not in (s for s, _ in points):
                points.append((size, gbs))
    return panels


def title(run: dict[str, Any], inches: float) -> str:
    """What was measured where, in lines that fit a figure of that width at 11 points."""
    about = run["machine"]
    if about["device"] == "cpu":
        where = f"{about['cpu']}, {about['threads']} threads, best of all calls"
    else:
        where = f"{about['device']}, medians"
    what = ", ".join(dict.fromkeys(r["op"] for r in run["rows"]))
    quick = ["quick: few rounds, no numbers to quote"] if run.get("quick") else []
    return "\n".join([*textwrap.wrap(f"{what} on {where}", int(inches * 11)), *quick])
