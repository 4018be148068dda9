"""What a run was measured on, and its rows as tables."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from hal.bench import OURS, Row


def machine(device: str) -> dict[str, Any]:
    """What the numbers depend on: hardware, versions, load, commit."""
    import torch

    found: dict[str, Any] = {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {n: version(n) for n in ("torch", "numba", "llvmlite", "triton", "numpy", "hal-kernels")},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
    }
    if device.startswith("cuda"):
        from hal.bench import peers
        from hal.triton.launch import status

        found |= {
            "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
            "cuda": torch.version.cuda,
            "launcher": status(),
            "peers": peers.available(),
        }
    return found


def version(name: str) -> str | None:
    """Of an installed distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    model = " ".join(found.get(k, "") for k in ("model name", "model")) if "model name" in found else ""
    return model.strip() or platform.machine()


def _commit() -> str:
    """Of this checkout; where it is a copy without one of its own, what ``GIT_COMMIT`` says."""
    if named := os.environ.get("GIT_COMMIT"):
        return named

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("-dirty" if commit and git("status", "--porcelain", "--", ".", "../backends") else "")
    except OSError:
        return ""


def show(run: dict[str, Any]) -> None:
    """Prints a run as tables: one for each op and measure."""
    from rich.console import Console
    from rich.table import Column, Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=180)
    about = run["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if v)
    console.print(
        f"{about['cpu']}, {about['threads']} of {about['cores']} threads, load {about['load'][0]}; {versions}",
        highlight=False,
    )
    if run["quick"]:
        console.print("[yellow]quick: few rounds; no numbers to quote[/]")
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in run["rows"]:
        for measure in (k for k in row if k.endswith(("_us", "_gbs"))):
            names = [k for k, v in row.items() if k != "op" and not isinstance(v, dict)]
            kinds.setdefault((row["op"], measure, *names), []).append(row)
    for (op, measure, *fields), rows in kinds.items():
        if all(not isinstance(r[measure], dict) for r in rows):
            continue
        impls = list(dict.fromkeys(i for r in rows for i in r[measure]))
        others = [i for i in impls if i != OURS] if OURS in impls else []
        heads = (*fields, *impls, *(f"vs {i}" for i in others))
        table = Table(
            *(Column(h, overflow="fold") for h in heads), title=f"{op}: {_unit(measure)}", title_justify="left"
        )
        for row in rows:
            values = row[measure]
            cells = [f"{v:.4g}" if isinstance(v := row[f], float) else str(v) for f in fields]
            cells += [f"{values[i]:.4g}" if i in values else "" for i in impls]
            cells += [_ratio(row, measure, i) for i in others]
            table.add_row(*cells)
        console.print(table)
    for row in run["rows"]:
        case = " ".join(str(v) for v in row.values() if not isinstance(v, dict))
        for name, why in row.get("failed", {}).items():
            console.print(f"{case}: {name} was not timed: {why}", markup=False, highlight=False)
    for name, why in run.get("broken", {}).items():
        said = f"was {why}" if why.startswith("stopped") else f"broke: {why}"
        console.print(f"the table {name} {said}", markup=False, highlight=False)


def _unit(measure: str) -> str:
    name, _, unit = measure.rpartition("_")
    return f"{name} {'µs' if unit == 'us' else 'GB/s'}"


def _ratio(row: Row, measure: str, other: str) -> str:
    values = row[measure]
    if OURS not in values or other not in values:
        return ""
    ratio = row.get("ratios", {}).get(other)
    if ratio is None:
        ratio = values[other] / values[OURS] if measure.endswith("_us") else values[OURS] / values[other]
    return f"{ratio:.2f} x"
