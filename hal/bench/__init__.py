"""``hal bench``: ours against eager torch, torch.compile, memcpy and every importable peer, in one run.

A table is a list of rows. A row has ``op``, the fields that name its case, and measures: dicts implementation ->
number, under names that end in ``_us`` (less is better) or ``_gbs`` (more is better). ``ratios``, where the
row has them, say how many times faster ``hal`` was than each other implementation, best call against best
call; else they are those of the measures. ``failed``, where a row has it: implementation -> why it was not timed. Every
output is checked before it is timed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json as _json
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from hal import _progress
from hal._errors import HalError
from hal._output import check_folder, data_output

Row = dict[str, Any]
OURS = "hal"


def main(
    op: str | None = None,
    device: str = "cpu",
    json: bool = False,
    plot: str | None = None,
    save: str | None = None,
    quick: bool = False,
) -> int:
    """Runs the tables of a device and shows them.

    Args:
        op: one of the device's tables (an op, or of a CPU ``dispatch``, of a GPU ``launcher``,
            ``programmatic_launch``, ``mla_decode_attention``); None for all.
        device: ``cpu`` or ``cuda``.
        json: print the run as JSON instead of tables.
        plot: a file for the roofline: of rope_kv_write on a CPU a PNG, which needs matplotlib; on CUDA an SVG.
        save: a folder for the run's JSON, named by device, date and commit.
        quick: few rounds and sizes, to see that everything runs: no numbers to quote.

    Returns:
        0; 1 where ours was wrong or a table broke, which keeps no other from running; 3 if nothing was measured.

    Raises:
        HalError: no such table or device, the device's backend is not ready, or what `plot` asks for can't be drawn.
    """
    with data_output() if json else nullcontext(sys.stdout) as out:
        return _main(op, device, json, plot, save, quick, out)


def _main(
    op: str | None, device: str, json: bool, plot: str | None, save: str | None, quick: bool, out: TextIO
) -> int:
    _check_backend(device)
    tables = _tables(device)
    if op is not None and op not in tables:
        raise HalError(f"hal: bench: no table {op!r} for {device}; there are {', '.join(tables) or 'none'}")
    if plot:
        _check_plot(device, op, Path(plot))
    with _progress.shown(quiet=json) as bar:
        run = run_of(device, {name: tables[name] for name in ([op] if op else tables)}, quick, bar)
    if json:
        print(_json.dumps(run, indent=1), file=out)
    else:
        show(run)
    if save:
        folder = Path(save)
        folder.mkdir(parents=True, exist_ok=True)
        about = run["machine"]
        file = folder / f"{device}-{op or 'all'}-{about['date'][:10]}-{about['commit'][:8] or 'nogit'}.json"
        file.write_text(_json.dumps(run, indent=1) + "\n")
    if plot:
        draw(run, plot)
    return exit_code(run)


def run_of(
    device: str,
    tables: dict[str, Callable[..., list[Row]]],
    quick: bool,
    bar: _progress.Bar | None = None,
) -> Row:
    """The rows of all tables with what they were measured on; ``broken``: table -> why it has none."""
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise HalError(f"hal: bench: no CUDA device (torch {torch.__version__})")
    rows: list[Row] = []
    broken: dict[str, str] = {}
    bar = bar or _progress.Bar()
    bar.size(len(tables))
    for i, (name, table) in enumerate(tables.items()):
        bar.at(i, name)
        try:
            rows += table(**({"quick": quick} if "quick" in inspect.signature(table).parameters else {}))
        except Exception as e:
            traceback.print_exc()
            broken[name] = f"{type(e).__name__}: {e}"
    run = {"machine": machine(device), "quick": quick, "rows": rows}
    return {**run, "broken": broken} if broken else run


def exit_code(run: Row) -> int:
    """As of `main`."""
    if run.get("broken") or any(OURS in row.get("failed", ()) for row in run["rows"]):
        return 1
    return 0 if run["rows"] else 3


def draw(run: Row, file: str) -> None:
    """The roofline of a run: a PNG of a CPU's, an SVG of a GPU's."""
    if run["machine"]["device"] == "cpu":
        from hal.bench.plot import roofline

        roofline(run, file)
    else:
        from hal.bench.cuda import plot

        plot(run, file)


_BOOKKEEPING = (
    "write_req_to_token", "compute_positions", "build_kv_indices", "build_page_table", "alloc_extend", "alloc_decode",
)  # fmt: skip
_CUDA = {
    "hal.bench.cuda": ("get_last_loc", "assign_extend_cache_locs", "rope_kv_write", "kv_transfer"),
    "hal.bench.cuda_kv": (
        "kv_write",
        "mla_kv_write",
        "mla_rope_kv_write",
        "qk_norm_rope_kv_write",
        "kv_move",
    ),
    "hal.bench.attention": ("decode_attention", "extend_attention"),
    "hal.bench.mla": ("mla_decode_attention",),
}
_CUDA_HOST = ("launcher", "programmatic_launch")
_DRAWN = {"cpu": ("rope_kv_write",), "cuda": ("rope_kv_write", *_CUDA["hal.bench.cuda_kv"])}
"""The tables that have a roofline."""
_FORMATS = {"cpu": (".png", ".pdf", ".svg"), "cuda": (".svg",)}


def _kind(device: str) -> str:
    kind = device.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise HalError(
            f"hal: bench: device {device!r}: expected cpu or cuda; for an NPU, hal inspect counts the work"
        )
    return kind


def _check_backend(device: str) -> None:
    """Raises where the backend to be timed can't run at all: a line, instead of one for each table."""
    from hal.registry import current

    kind = _kind(device)
    state = current().entries[kind].state("device")
    if not state.ready:
        raise HalError(f"hal: bench: what would be timed, the backend {kind}, is {state}")


def _check_plot(device: str, op: str | None, file: Path) -> None:
    """Raises for a plot that can't be drawn, before hours of work and not after."""
    from hal.bench.plot import NEEDS

    kind = _kind(device)
    drawn, formats = _DRAWN[kind], _FORMATS[kind]
    if op is not None and op not in drawn:
        raise HalError(f"hal: bench: --plot: {op} on {kind} has no roofline; expected {', '.join(drawn)}")
    if file.suffix not in formats:
        raise HalError(f"hal: bench: --plot: expected a file that ends in {', '.join(formats)}; got {file}")
    if kind == "cpu" and importlib.util.find_spec("matplotlib") is None:
        raise HalError(f"hal: bench: --plot {NEEDS}")
    check_folder("bench", "--plot", file.parent)


def _tables(device: str) -> dict[str, Callable[..., list[Row]]]:
    """Table -> what makes its rows: one for each op that the device has peers for, by the op's name."""
    if _kind(device) == "cpu":
        cpu = importlib.import_module("hal.bench.cpu")
        engine = importlib.import_module("hal.bench.cpu_engine")
        several = {op: partial(engine.engine, op) for op in engine.ENGINE}
        return {**{n: getattr(cpu, n) for n in cpu.OPS}, **several, "dispatch": cpu.dispatch}
    cuda = importlib.import_module("hal.bench.cuda")
    found = {n: getattr(importlib.import_module(m), n) for m, names in _CUDA.items() for n in names}
    found["build_kv_indices_from_blocks"] = importlib.import_module("hal.bench.block_table").expand
    found |= {op: partial(cuda.bookkeeping, only=(op,)) for op in _BOOKKEEPING}
    return {**found, **{n: getattr(cuda, n) for n in _CUDA_HOST}}


def machine(device: str) -> dict[str, Any]:
    """What the numbers depend on: hardware, versions, load, commit."""
    import torch

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return {
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


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    found = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    model = " ".join(found.get(k, "") for k in ("model name", "model")) if "model name" in found else ""
    return model.strip() or platform.machine()


def _commit() -> str:
    def git(*args: str) -> str:
        done = subprocess.run(
            ["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "HEAD")
        return commit + (
            "-dirty" if commit and git("status", "--porcelain", "--", ".", "../backends") else ""
        )
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
            *(Column(h, overflow="fold") for h in heads),
            title=f"{op}: {_unit(measure)}",
            title_justify="left",
        )
        for row in rows:
            values = row[measure]
            cells = [str(row[f]) for f in fields]
            cells += [f"{values[i]:.4g}" if i in values else "" for i in impls]
            cells += [_ratio(row, measure, i) for i in others]
            table.add_row(*cells)
        console.print(table)
    for row in run["rows"]:
        case = " ".join(str(v) for v in row.values() if not isinstance(v, dict))
        for name, why in row.get("failed", {}).items():
            console.print(f"{case}: {name} was not timed: {why}", markup=False, highlight=False)
    for name, why in run.get("broken", {}).items():
        console.print(f"the table {name} broke: {why}", markup=False, highlight=False)


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
