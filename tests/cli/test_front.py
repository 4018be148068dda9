"""What people see: tables that cut no name, bars on a terminal alone, what a shell completes, what a notebook shows."""

from __future__ import annotations

import html.parser
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins import Plugins, manifest
from plugins import hal_command as run
from rich.console import Console

import hal
from hal import _complete, _doctor, _progress, bench, cli
from hal._show import Grid, info_grids
from hal.bench import report
from hal.conformance import Report
from hal.conformance._bar import teller
from hal.conformance._result import FAILED, PASSED, Case, Result
from hal.ops import BUILTIN

pytestmark = pytest.mark.usefixtures("fresh")
ARGS = torch.tensor([[7, 8]], dtype=torch.int32), torch.tensor([0]), torch.tensor([2])


# --- tables -----------------------------------------------------------------------------------------


def test_no_op_is_cut_at_80_columns(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("acme_of_the_first_kind", "acme_of_the_second_kind"):
        plugins.add(name, manifest(name, ops="{}"))
    monkeypatch.setenv("COLUMNS", "80")
    assert run(monkeypatch, "info") == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines()[1:60])) <= 80
    words = shown.replace("│", " ").split()
    assert set(BUILTIN) <= set(words)
    assert "…" not in shown
    row = {
        "backend": "a" * 30,
        "lane": "interpreter",
        "op": "build_kv_indices_from_blocks",
        "ok": True,
        "saw": "x" * 40,
    }
    _doctor._show([row], [])
    assert "build_kv_indices_from_blocks" in capsys.readouterr().out


def test_a_bench_of_a_long_op_is_whole_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    impls = ("hal", "a peer with quite a name", "another_that_has_no_spaces")
    row = {"op": "build_kv_indices_from_blocks", "shape": "s" * 30, "n": 1, "wall_us": dict.fromkeys(impls, 2.5)}
    monkeypatch.setattr("rich.console.Console.is_terminal", property(lambda self: True))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    report.show({"machine": report.machine("cpu"), "quick": False, "rows": [row]})
    shown = capsys.readouterr().out
    assert "build_kv_indices_from_blocks" in shown
    assert "…" not in shown


def test_states_have_colours() -> None:
    grid = Grid("t", ("op", "state"), [("a", "ready"), ("b", "fast: absent, when named"), ("[red]", "odd")])
    assert [grid.tone("state", row[1]) for row in grid.rows] == ["green", "yellow", ""]
    assert grid.tone("op", "ready") == ""
    out = io.StringIO()
    Console(file=out, width=60).print(grid.rich())
    assert "[red]" in out.getvalue()


# --- bars -------------------------------------------------------------------------------------------


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Tty:
    """stdout and stderr are a terminal from here on; what stderr gets."""
    err = Tty()
    monkeypatch.setattr(sys, "stdout", Tty())
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return err


WARM = """
def warm(ops, device, progress):
    for i, op in enumerate(ops):
        progress(i / len(ops), op)
        {wait}
"""


DRAWN = """
import sys
import time

def drawn(op):
    end = time.monotonic() + 100
    while op == "kv_write" and "acme: kv_write" not in sys.stderr.getvalue() and time.monotonic() < end:
        time.sleep(0.01)
"""


def test_a_terminal_sees_what_is_warmed_up(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    # A bar is drawn ten times a second, or when a busy machine comes to it.
    plugins.add("acme", manifest("acme", warmup='"acme_kernels:warm"'), WARM.format(wait="drawn(op)") + DRAWN)
    monkeypatch.setenv("HAL_PLUGINS", "acme")
    err = terminal(monkeypatch)
    assert run(monkeypatch, "warmup") == 0
    assert "acme: kv_write" in err.getvalue()
    assert "left:" in err.getvalue()


def test_a_pipe_sees_no_bar(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins.add("acme", manifest("acme", warmup='"acme_kernels:warm"'), WARM.format(wait="pass"))
    monkeypatch.setenv("HAL_PLUGINS", "acme")
    assert run(monkeypatch, "warmup") == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith("acme: 0.0")


def test_no_bar_beside_data(monkeypatch: pytest.MonkeyPatch) -> None:
    err = terminal(monkeypatch)
    with _progress.show(2, quiet=True) as bar:
        bar.at(1, "something")
    assert err.getvalue() == ""
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # piped
    with _progress.show(2) as bar:
        bar.at(1, "something")
    assert err.getvalue() == ""


def test_the_progress_of_a_warm_up_is_of_the_whole(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_PLUGINS", "acme,calm")
    plugins.add("acme", manifest("acme", warmup='"acme_kernels:warm"'), WARM.format(wait="pass"))
    plugins.add("calm", manifest("calm", warmup='"calm_kernels:warm"'), "def warm(ops, device): pass")
    plugins.load()
    told: list[tuple[float, str]] = []
    hal.warmup("cpu", ops=["kv_write", "kv_move"], progress=lambda done, what: told.append((done, what)))
    assert told == [(0.0, "acme"), (0.0, "acme: kv_write"), (0.25, "acme: kv_move"), (0.5, "calm")]


class Noted(_progress.Bar):
    def __init__(self) -> None:
        self.told: list[tuple[float, str]] = []
        self.whole = 0.0

    def at(self, done: float, what: str) -> None:
        self.told.append((done, what))

    def size(self, total: float) -> None:
        self.whole = total


def test_a_bench_tells_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = Noted()
    bench.run_tables("cpu", {"one": lambda quick: [{"op": "one"}], "two": lambda quick: []}, True, bar)
    assert (bar.whole, bar.told) == (2, [(0, "one"), (1, "two")])


def test_a_run_tells_what_runs_now(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Noted()
    cases = [Case("a", "value", "x"), Case("a", "soak", "all"), Case("b", "value", "y")]
    tell = teller(bar, cases)
    for i, (case, outcome) in enumerate(zip(cases, (PASSED, FAILED, PASSED), strict=True)):
        tell(Result(case.id, outcome), i + 1, 3)
    assert bar.whole == bar.told[-1][0] == 102
    assert bar.told == [(0, "a/value/x"), (1, "a/soak/all"), (101, "1 failed, now b/value/y"), (102, "1 failed, now ")]
    assert capsys.readouterr().err == "a ...\nb ...\n"


# --- the shell --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "incomplete", "expected"),
    [
        (["explain"], "alloc", ["alloc_extend", "alloc_decode"]),
        (["conformance"], "ref", ["reference"]),
        (["conformance"], "ac", ["acme"]),
        (["conformance", "cpu", "--op"], "kv_m", ["kv_move"]),
        (["conformance", "cpu", "--lane"], "", ["device", "interpreter", "lowered"]),
        (["explain", "kv_move", "--backend"], "acme>c", ["acme>cpu", "acme>cuda"]),
        (["bench"], "disp", ["dispatch"]),
        (["warmup", "--device"], "c", ["cpu", "cuda"]),
        (["inspect"], "asc", ["ascend"]),
        (["new-backend", "x", "--op"], "get", ["get_last_loc"]),
    ],
)
def test_what_the_shell_completes(
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    incomplete: str,
    expected: list[str],
) -> None:
    plugins.add("acme", "raise SystemError('must not be imported')")
    words = ["hal", *args, incomplete]
    monkeypatch.setenv("_HAL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    with pytest.raises(SystemExit):
        cli.app(prog_name="hal")
    assert capsys.readouterr().out.split() == expected
    assert "acme" not in sys.modules


def test_a_chain_is_completed_with_others() -> None:
    assert "cpu>cpu" not in _complete.backends("cpu>")
    assert "cpu>reference" in _complete.backends("cpu>")


# --- notebooks --------------------------------------------------------------------------------------


class Balanced(html.parser.HTMLParser):
    """Every element that is opened is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_notebook_shows_info(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.add("acme", manifest("acme", requires='("acme_rt<2",)'))
    plugins.load()
    told = hal.info()
    shown = told._repr_html_()
    Balanced(shown)
    assert "needs acme_rt&lt;2" in shown
    assert all(f">{op}<" in shown for op in BUILTIN)
    assert json.loads(json.dumps(told)) == told
    assert [g.title for g in info_grids(told)] == ["Backends", "Ops", "Engines", "Environment"]


def test_a_notebook_shows_an_explanation() -> None:
    told = hal.explain("get_last_loc", *ARGS, backend="reference")
    shown = told._repr_html_()
    Balanced(shown)
    assert "runs on reference" in shown
    assert "chosen by backend=" in shown
    assert "<td" in shown


def test_a_notebook_shows_what_ran(capsys: pytest.CaptureFixture[str]) -> None:
    hal.trace(reset=True)
    assert "no op was called" in hal.trace()._repr_html_()
    hal.configure(trace="1")
    hal.get_last_loc(*ARGS, backend="reference")
    shown = hal.trace()._repr_html_()
    Balanced(shown)
    assert "reference ran 1 of 1 calls" in shown
    hal.configure(trace="0")
    hal.trace(reset=True)


def test_a_notebook_shows_a_report(tmp_path: Path) -> None:
    cases = [
        {
            "id": "a/value/x",
            "op": "a",
            "proof": "value",
            "tag": "required",
            "outcome": outcome,
            "reason": "x < y\nmore",
            "snippet": "again()",
        }
        for outcome in [PASSED] + [FAILED] * 15
    ]
    counts = {PASSED: 1, FAILED: 15}
    report = Report(backend="b<", lane="device", device="cpu", date="d", cases=cases, verdict={"counts": counts})
    shown = report._repr_html_()
    assert "b&lt;" in shown
    assert "1 passed, 15 failed" in shown
    assert shown.count("<pre>again()</pre>") == 12
    assert "and 3 more" in shown
    assert "<svg" in shown
    (tmp_path / "r.json").write_text("{}")
    for name in ("r.json", "none.json"):
        with pytest.raises(hal.HalError, match="not a report"):
            Report.read(tmp_path / name)
