"""`hal bench`: it measures what it says, refuses wrong outputs, and its runs can be read back."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hal
from hal import HalError, _complete, bench
from hal.bench import cpu_engine, judge, plot, report, timing
from hal.bench.cli import draw
from hal.ops import BUILTIN, get_spec
from hal.registry import current
from hal.registry._isolate import State


def test_a_run_is_json_with_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["get_last_loc"], json=True, quick=True, save=str(tmp_path)) == 0
    run = json.loads(capsys.readouterr().out)
    (file,) = tmp_path.glob("cpu-get_last_loc-*.json")
    assert json.loads(file.read_text()) == run
    assert run["machine"]["versions"]["torch"] == torch.__version__
    assert run["machine"]["threads"] == torch.get_num_threads()
    assert run["quick"] is True
    for row in run["rows"]:
        assert set(row["wall_us"]) == {"hal", "eager", "reference"}
        assert set(row["ratios"]) == {"eager", "reference"}
        assert all(row["best"][n] <= row["wall_us"][n] for n in row["best"])


def test_a_file_behind_json_is_told_how_to_be_written() -> None:
    with pytest.raises(HalError, match=r"no table 'run.json' for cpu; there are .*--json > FILE` or --save FOLDER"):
        bench.main(["get_last_loc", "run.json"], json=True)
    with pytest.raises(HalError, match=r"no table 'nope' for cpu; there are [a-z_, ]+$"):
        bench.main(["nope"])


def test_a_run_of_many_tables_has_a_short_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = list(bench.tables_of("cpu"))
    about = {
        "cpu": "x",
        "threads": 1,
        "cores": 1,
        "load": [0.0],
        "versions": {},
        "date": "2026-01-02T03:04",
        "commit": "",
    }
    rows = [{"op": "x", "bs": 1, "share": 0.123456789, "wall_us": {"hal": 2.0, "eager": 4.0}}]
    monkeypatch.setattr(bench, "run_tables", lambda *_: {"machine": about, "rows": rows, "quick": False})
    assert bench.main(tables, save=str(tmp_path)) == 0
    (file,) = tmp_path.iterdir()
    assert file.name == f"cpu-{tables[0]}-and-{len(tables) - 1}-more-2026-01-02-nogit.json"
    shown = capsys.readouterr().out
    assert "0.1235" in shown
    assert "2.00 x" in shown


def test_a_copy_without_a_history_says_of_which_commit_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_COMMIT", "abc1234")
    assert report.machine("cpu")["commit"] == "abc1234"


def test_tables_show_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["assign_extend_cache_locs"], quick=True) == 0
    shown = capsys.readouterr().out
    assert "ragged to 64" in shown
    assert "vs eager, sliced" in shown
    assert "no numbers to quote" in shown


def test_rows_of_a_device_show_without_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"op": "an_op", "bs": 8, "host_us": {"hal": 2.0, "peer": 5.0}, "copy_gbs": {"hal": 30.0, "peer": 20.0}}
    report.show({"machine": report.machine("cpu"), "quick": False, "rows": [row]})
    shown = capsys.readouterr().out
    assert "an_op: host µs" in shown
    assert "2.50 x" in shown
    assert "an_op: copy GB/s" in shown
    assert "1.50 x" in shown


@pytest.mark.parametrize("table", ["kv_transfer", "rope_kv_write", *cpu_engine.ENGINE, "dispatch"])
def test_every_table_runs(table: str) -> None:
    assert bench.main([table], quick=True, json=True) == 0


@pytest.mark.parametrize(("op", "device"), [("rope", "cpu"), ("kv_write", "npu"), ("engine", "cpu")])
def test_what_it_does_not_have(op: str, device: str) -> None:
    with pytest.raises(HalError, match="hal: bench"):
        bench.main([op], device=device)


def test_a_wrong_output_is_never_timed() -> None:
    s = get_spec("get_last_loc")
    with pytest.raises(AssertionError, match="off by one"):
        judge.check("get_last_loc", "off by one", lambda a: s.reference(**a) + 1, s.make)
    a = get_spec("kv_transfer").make(src_page=1, dst_page=1)
    with pytest.raises(AssertionError, match="wrong rows"):
        judge.check_transfer("idle", lambda: None, a["src"], a["dst"], torch.arange(4), torch.arange(4))


def test_a_form_is_proven_where_it_runs(fresh: None) -> None:
    judge.prove("get_last_loc", {"bs": 7}, "cpu")
    hal.register("get_last_loc", backend="idle")(lambda req_to_token, req_pool_indices, prefix_lens: prefix_lens)
    with pytest.raises(AssertionError, match=r"get_last_loc: value of .* failed"):
        judge.prove("get_last_loc", {"bs": 7}, "idle")


def test_every_op_has_a_table() -> None:
    assert {*bench.tables_of("cpu")} == {*BUILTIN, "dispatch"}


def test_the_shell_knows_every_table() -> None:
    pytest.importorskip("triton", reason="Triton is not installed here")
    every = {*bench.tables_of("cpu"), *bench.tables_of("cuda")}
    assert {*_complete.tables("")} == every


def test_attention_is_timed_beside_torchs_own() -> None:
    (row,) = cpu_engine.engine("decode_attention", quick=True)
    assert set(row["wall_us"]) == {"hal", "reference", "eager, fused"}


def test_without_its_backend_it_says_so_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an environment without ``hal-kernels[cpu]``: before any table, not once for each."""
    entry = current().entries["cpu"]
    state = State("absent", "needs numba>=0.62.1", 'pip install "hal-kernels[cpu]"')
    monkeypatch.setattr(type(entry), "state", lambda self, lane="device": state)
    with pytest.raises(HalError) as told:
        bench.main()
    assert str(told.value) == (
        "hal: bench: what would be timed, the backend cpu, is absent: needs numba>=0.62.1 — "
        'pip install "hal-kernels[cpu]"'
    )


@pytest.mark.parametrize(
    ("op", "file", "why"),
    [
        (None, "a.png", r"needs matplotlib — pip install 'hal-kernels\[bench\]'"),
        ("kv_write", "a.png", "kv_write on cpu has no roofline"),
        (None, "a.jpeg", r"ends in \.png"),
        (None, "no/folder/a.png", "a folder that can be written"),
    ],
)
def test_a_plot_is_refused_before_the_run(
    op: str | None, file: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "run_tables", lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if "matplotlib" in why else object())
    (tmp_path / "no").touch()
    with pytest.raises(HalError, match=why):
        bench.main([op] if op else [], plot=str(tmp_path / file))


def test_a_plot_says_what_it_is() -> None:
    from hal.bench.plot import title

    about = {"cpu": "A very long name of a processor, " * 3, "threads": 2, "device": "cpu"}
    run = {"machine": about, "quick": True, "rows": [{"op": "rope_kv_write"}]}
    lines = title(run, 4.2).splitlines()
    assert lines[-1] == "quick: few rounds, no numbers to quote"
    assert all(len(line) <= 46 for line in lines)
    assert "quick" not in title({**run, "quick": False}, 4.2)
    assert title({**run, "machine": {"device": "Some GPU"}}, 9).startswith("rope_kv_write on Some GPU, medians")


def test_measure_tells_fast_from_slow() -> None:
    calls: dict[str, Any] = {"hal": lambda: None, "slow": lambda: time.sleep(0.002)}
    row = timing.measure(calls, quick=True)
    assert row["best"]["slow"] >= 2000 > row["best"]["hal"]
    assert row["ratios"]["slow"] == row["best"]["slow"] / row["best"]["hal"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Else SIGINT is ignored by what a shell without job control has started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_who_is_stopped_keeps_what_was_measured(
    by: signal.Signals, device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def row(i: int) -> bench.Row:
        if i == 2:
            os.kill(os.getpid(), by)
        return {"op": "an_op", "bs": i, "host_us": {"hal": 4.0, "peer": 5.0}}

    if device == "cuda":
        pytest.importorskip("triton", reason="Triton is not installed here")
        from hal.bench.cuda.harness import table_of

        def two(quick: bool) -> list[bench.Row]:
            return table_of(partial(row, i) for i in (1, 2, 3))
    else:

        @bench.table
        def two(quick: bool) -> Iterator[bench.Row]:
            yield from map(row, (1, 2, 3))

    tables = {"one": lambda quick: [row(0)], "two": two}
    monkeypatch.setattr(bench, "tables_of", lambda device: {**tables, "three": lambda quick: [row(4)]})
    before = signal.getsignal(signal.SIGTERM)
    assert bench.main(json=True, save=str(tmp_path)) == 1
    assert signal.getsignal(signal.SIGTERM) == before
    run = json.loads(capsys.readouterr().out)
    assert [row["bs"] for row in run["rows"]] == [0, 1]
    assert run["broken"] == {"two": "stopped", "three": "stopped before it"}
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text()) == run
    assert bench.main() == 1
    assert "the table two was stopped" in capsys.readouterr().out


def test_a_table_that_breaks_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(quick: bool) -> list[bench.Row]:
        raise OSError("lost")

    good = {"op": "an_op", "bs": 8, "host_us": {"peer": 5.0}, "failed": {"other": "wrong rows"}}
    monkeypatch.setattr(bench, "tables_of", lambda device: {"bad": broken, "good": lambda quick: [good]})
    assert bench.main() == 1
    told = capsys.readouterr()
    assert "the table bad broke: OSError: lost" in told.out
    assert "an_op 8: other was not timed: wrong rows" in told.out
    assert "peer" in told.out
    assert "Traceback" in told.err
    assert bench.main(["good"], json=True) == 0
    good["failed"] = {"hal": "wrong rows"}
    assert bench.main(["good"], json=True) == 1


def rows_of(device: str) -> list[bench.Row]:
    if device == "cpu":
        return [
            {
                "op": "rope_kv_write",
                "model": "m",
                "dtype": "bf16",
                "tokens": t,
                "work": {"bytes": 1000 * t},
                "wall_us": dict.fromkeys(("hal", "eager", "memcpy"), 1.0),
                "best": {"hal": 1.0, "eager": 4.0, "memcpy": 0.5},
            }
            for t in (1, 16)
        ]
    return [
        {"op": "kv_write", "tokens": t, "cache": "bf16", "device_gbs": {"hal": 9.0, "eager": 2.0, "copy": 10.0}}
        for t in (1, 16)
    ]


def test_panels_of_a_run() -> None:
    assert plot._cpu_panels({"rows": rows_of("cpu")}) == {
        "m, bf16": {"hal": [(1, 1.0), (16, 16.0)], "eager": [(1, 0.25), (16, 4.0)], "memcpy": [(1, 2.0), (16, 32.0)]}
    }
    assert plot._cpu_panels({"rows": rows_of("cpu")[:1]}) == {}
    other = {"op": "rope_kv_write", "model": "llama3-70b", "tokens": 1, "device_gbs": {"hal": 1.0}}
    assert plot._gpu_panels({"rows": [*rows_of("cuda"), other, {"op": "launch", "host_us": {"hal": 1.0}}]}) == {
        "kv_write": {
            "hal, bf16": [(1, 9.0), (16, 9.0)],
            "eager, bf16": [(1, 2.0), (16, 2.0)],
            "copy": [(1, 10.0), (16, 10.0)],
        }
    }


@pytest.mark.parametrize("device", ["cpu", "Some GPU"])
def test_a_saved_run_is_drawn(device: str, tmp_path: Path) -> None:
    run = {"machine": {**report.machine("cpu"), "device": device}, "rows": rows_of(device)}
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run))
    picture = tmp_path / "a.svg"
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        with pytest.raises(HalError, match="hal-kernels"):
            draw(file, picture)
        return
    draw(file, picture)
    assert "<svg" in picture.read_text()
    with pytest.raises(HalError, match="kv_write" if device != "cpu" else "rope_kv_write"):
        plot.draw({**run, "rows": []}, str(picture))


@pytest.mark.parametrize("text", ["[]", "{}", "", '{"rows": []}'])
def test_what_is_no_run_is_not_drawn(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(HalError, match=r"RUN: expected the JSON of a run"):
        draw(tmp_path / "run.json", tmp_path / "a.png")
