"""``hal bench``: ours against eager torch, torch.compile, memcpy and every importable peer, in one run.

A table is a list of rows. A row has ``op``, the fields that name its case, and measures: dicts implementation ->
number, under names that end in ``_us`` (less is better) or ``_gbs`` (more is better). ``ratios``, where the
row has them, say how many times faster ``hal`` was than each other implementation, best call against best
call; else they are those of the measures. ``failed``, where a row has it: implementation -> why it was not timed. Every
output is checked before it is timed.
"""

from __future__ import annotations

import functools
import importlib
import json as _json
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from hal import _progress
from hal._errors import HalError
from hal._output import data_output

Row = dict[str, Any]
Tables = Mapping[str, Callable[[bool], list[Row]]]
"""Table -> what makes its rows, quick or not: one for each op, by the op's name, and some others."""
OURS = "hal"


class Stopped(KeyboardInterrupt):
    """Raised by a table that is told to stop, with the rows that it has."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__()
        self.rows = rows


def kept(rows: Iterable[Row]) -> list[Row]:
    """All of them.

    Raises:
        Stopped: it is told to stop, with those that are made.
    """
    made: list[Row] = []
    try:
        for row in rows:
            made.append(row)
    except KeyboardInterrupt:
        raise Stopped(made) from None
    return made


def table(rows: Callable[[bool], Iterator[Row]]) -> Callable[[bool], list[Row]]:
    """A table of what yields its rows, quick or not."""

    @functools.wraps(rows)
    def made(quick: bool = False) -> list[Row]:
        return kept(rows(quick))

    return made


def main(
    names: Sequence[str] = (),
    device: str = "cpu",
    json: bool = False,
    plot: str | None = None,
    save: str | None = None,
    quick: bool = False,
    models: bool = False,
) -> int:
    """Runs the tables of a device and shows them.

    Args:
        names: some of the device's tables (ops, and of a CPU ``dispatch``, of a GPU ``launcher``,
            ``programmatic_launch``, ``host_calls``, ``mla_decode_attention``, ``mla_extend_attention``,
            ``extend_attention_hopper``, ``decode_by_block_table``, ``hicache``); empty for all.
        device: ``cpu`` or ``cuda``.
        json: print the run as JSON instead of tables.
        plot: a file for the picture, as of `hal.bench.plot.draw`.
        save: a folder for the run's JSON, named by device, tables, date and commit.
        quick: few rounds and sizes, to see that everything runs: no numbers to quote.
        models: other tables, of attention as real models have it, on a GPU.

    Stopped by Ctrl-C or SIGTERM (which ``timeout`` sends), it shows and keeps the tables that are done, and the rows of
    the one that is not.

    Returns:
        0; 1 where ours was wrong, a table broke, which keeps no other from running, or was stopped; 3 if nothing was
        measured.

    Raises:
        HalError: no such table or device, the device's backend is not ready, or what `plot` asks for can't be drawn.
    """
    with data_output() if json else nullcontext(sys.stdout) as out:
        return _main(names, device, json, plot, save, quick, models, out)


def _main(
    names: Sequence[str], device: str, json: bool, plot: str | None, save: str | None, quick: bool, models: bool,
    out: TextIO,
) -> int:  # fmt: skip
    from hal.bench import report
    from hal.bench.plot import check_plot, draw

    check_backend(device)
    tables = tables_of_models(device) if models else tables_of(device)
    for name in names:
        if name not in tables:
            hint = (
                "; --json prints: to keep the run, `--json > FILE` or --save FOLDER" if name.endswith(".json") else ""
            )
            of = " of models" if models else ""
            raise HalError(f"hal: bench: no table{of} {name!r} for {device}; there are {', '.join(tables)}{hint}")
    if plot:
        check_plot(kind_of(device), names, Path(plot))
    with _progress.show(quiet=json) as bar, _stopped_by_sigterm():
        run = run_tables(device, {name: tables[name] for name in names or tables}, quick, bar)
    if json:
        print(_json.dumps(run, indent=1), file=out)
    else:
        report.show(run)
    if save:
        about = run["machine"]
        which = "-".join(names) if len(names) <= 3 else f"{names[0]}-and-{len(names) - 1}-more"
        which = "models-" * models + (which or "all")
        file = Path(save, f"{device}-{which}-{about['date'][:10]}-{about['commit'][:8] or 'nogit'}.json")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_json.dumps(run, indent=1) + "\n")
    if plot:
        draw(run, plot)
    return exit_code(run)


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """As by Ctrl-C. In another thread than the first one Python takes no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_tables(device: str, tables: Tables, quick: bool, bar: _progress.Bar | None = None) -> Row:
    """The rows of all tables with what they were measured on; ``broken``: table -> why it has none, or not all."""
    import torch

    from hal.bench.report import machine

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise HalError(f"hal: bench: no CUDA device (torch {torch.__version__})")
    rows: list[Row] = []
    broken: dict[str, str] = {}
    bar = bar or _progress.Bar()
    bar.size(len(tables))
    for i, (name, table) in enumerate(tables.items()):
        bar.at(i, name)
        try:
            rows += table(quick)
        except Exception as e:
            traceback.print_exc()
            broken[name] = f"{type(e).__name__}: {e}"
        except KeyboardInterrupt as e:
            rows += e.rows if isinstance(e, Stopped) else []
            broken[name] = "stopped"
            broken |= dict.fromkeys(list(tables)[i + 1 :], "stopped before it")
            break
    run = {"machine": machine(device), "quick": quick, "rows": rows}
    return {**run, "broken": broken} if broken else run


def exit_code(run: Row) -> int:
    """As of `main`."""
    if run.get("broken") or any(OURS in row.get("failed", ()) for row in run["rows"]):
        return 1
    return 0 if run["rows"] else 3


def tables_of(device: str) -> Tables:
    """The tables of a device."""
    modules = ["cpu", "cpu_engine"]
    if kind_of(device) == "cuda":
        modules = [f"cuda.{name}" for name in importlib.import_module("hal.bench.cuda").MODULES]
    found: dict[str, Callable[[bool], list[Row]]] = {}
    for module in modules:
        found |= importlib.import_module(f"hal.bench.{module}").TABLES
    return found


def tables_of_models(device: str) -> Tables:
    """Those of attention as real models have it."""
    if kind_of(device) != "cuda":
        raise HalError(f"hal: bench: models: device {device!r}: expected cuda: these tables are a GPU's")
    tables: Tables = importlib.import_module("hal.bench.cuda.models").TABLES
    return tables


def kind_of(device: str) -> str:
    kind = device.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise HalError(f"hal: bench: device {device!r}: expected cpu or cuda; for an NPU, hal inspect counts the work")
    return kind


def check_backend(device: str) -> None:
    """Raises where the backend to be timed can't run at all: a line, instead of one for each table."""
    from hal.registry import current

    kind = kind_of(device)
    state = current().entries[kind].state("device")
    if not state.ready:
        raise HalError(f"hal: bench: what would be timed, the backend {kind}, is {state}")


def launcher(backend: str, op: str) -> Callable[..., Any]:
    """Our backend's own function for an op: nothing selects or checks."""
    found: Callable[..., Any] = getattr(importlib.import_module(f"hal.backends.{backend}.{op}"), op)
    return found
