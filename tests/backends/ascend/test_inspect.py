"""The lint finds what it names, the compiler's answers are read right, and our kernels are clean."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import ascend_inspect
import pytest
import torch
from ascend import sabotage

from hal import lowered
from hal._errors import HalError
from hal.backends.ascend import hal_backend, inspect
from hal.lowered import compile as compiler
from hal.lowered.lint import Lint, lint

I32 = torch.int32
TARGETS = tuple(compiler.TARGETS)


def lowered_form(name: str, *args: object, **constexprs: int) -> str:
    return lowered.lower(getattr(sabotage, name).jit, args, constexprs).ttadapter


def test_lint_finds_a_gather() -> None:
    t = torch.zeros(8, dtype=I32)
    assert lint(lowered_form("last_loc_masked", t.view(1, 8), t, t, t, 8, 8, BLOCK=16)) == Lint(1, 0, 0)


def test_a_part_of_a_tile_is_no_gather() -> None:
    """triton-ascend marks it as it marks an access by element; that one's place is a value."""
    part = "%9 = tensor.extract_slice %8{} [4, 16] [1, 1] {{DiscreteMemAccess}} : tensor<32x16xf32> to tensor<4x16xf32>"
    assert lint(part.format("#1[12, 0]")).clean
    assert lint(part.format("[12, 0]")).clean
    assert lint(part.format("[%7, 0]")) == Lint(1, 0, 0)


def test_lint_finds_a_read_modify_write() -> None:
    t = torch.zeros(37, dtype=I32)
    assert lint(lowered_form("store_where", t, t, t, 37, BLOCK=16)) == Lint(0, 1, 0)


def test_lint_finds_int64_vectors() -> None:
    t = torch.zeros(37, dtype=torch.int64)
    assert lint(lowered_form("overlapping", t, t, 37, BLOCK=16)).int64_vectors > 0


def test_lint_is_silent_where_there_is_nothing() -> None:
    t = torch.zeros(37, dtype=I32)
    assert lint(lowered_form("overlapping", t, t, 37, BLOCK=16)).clean


def test_a_kernel_that_does_not_fit_is_refused_with_the_reason() -> None:
    t = torch.zeros(4, dtype=I32)
    form = lowered_form("overlapping", t, t, 4, BLOCK=65536)
    got = compiler.compile_for(form, "Ascend910B3")
    assert got.reason is not None
    assert "ub overflow, requires" in got.reason


def test_buffers_are_counted_with_what_the_compiler_adds() -> None:
    t = torch.zeros(4, dtype=I32)
    got = compiler.compile_for(lowered_form("overlapping", t, t, 4, BLOCK=1024), "Ascend910B3")
    assert got.reason is None
    assert got.ub_available == 192 * 1024 * 8
    # A block of 1024 int32, at least once.
    assert 1024 * 32 <= got.ub_bits <= 3 * 1024 * 32
    assert not got.binary


def test_what_the_compiler_said_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path))
    t = torch.zeros(4, dtype=I32)
    form = lowered_form("overlapping", t, t, 4, BLOCK=1024)
    first = compiler.compile_for(form, "Ascend910B3")
    monkeypatch.setattr(compiler, "_compile", lambda *a: pytest.fail("compiled again"))
    assert compiler.compile_for(form, "Ascend910B3") == first
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        compiler.compile_for(form, "Ascend910_9391")


def test_a_real_hivmc_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With CANN the stand-in hands over: whoever is called hivmc on PATH makes the binary."""
    fake = tmp_path / "hivmc"
    fake.write_text(
        '#!/bin/sh\nwhile [ $# -gt 0 ]; do case "$1" in -o) echo made > "$2";; esac; shift; done\necho "hivmc 1.0"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    t = torch.zeros(4, dtype=I32)
    assert compiler.compile_for(lowered_form("overlapping", t, t, 4, BLOCK=64), "Ascend910B3").binary


def test_one_kernel_by_either_name() -> None:
    """All of them are inspected, and held against what is recorded, by ``ci/ascend`` itself."""
    rows = inspect.inspect("get_last_loc")
    assert inspect.inspect("_get_last_loc") == rows
    assert {r["op"] for r in rows} == {"get_last_loc"}
    assert {r["verdict"] for r in rows} == {"ok"}, inspect.table(rows)
    assert all(set(r["targets"]) == set(TARGETS) for r in rows)
    assert [set(r["targets"]) for r in inspect.inspect("get_last_loc", TARGETS[:1])] == [set(TARGETS[:1])] * len(rows)
    with pytest.raises(HalError, match="no kernel called 'nothing'"):
        inspect.inspect("nothing")
    with pytest.raises(HalError, match="no target Ascend; there are Ascend910B3, "):
        inspect.inspect("get_last_loc", ["Ascend"])


def test_every_op_is_inspected() -> None:
    assert {c.op for c in inspect.cases()} == set(hal_backend().ops)


ROW = {
    "op": "o",
    "case": "c",
    "dma_per_token": 2.0,
    "bytes_moved": 100,
    "ub_bits": 800,
    "ub_available": 1000,
    "scalar_gathers": 0,
    "rmw_stores": 0,
    "int64_vectors": 0,
    "scalar_accesses": 0,
    "bytes_needed": 100,
    "targets": {"Ascend910B3": "codegen"},
    "verdict": "ok",
}


@pytest.mark.parametrize("cost", inspect.COSTS)
def test_a_kernel_that_costs_more_than_it_did_fails(
    cost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "inspect.json"
    monkeypatch.setattr(inspect, "inspect", lambda *_: [ROW])
    monkeypatch.setattr(sys, "argv", ["inspect", "--record", str(kept)])
    assert inspect.main() == 0
    monkeypatch.setattr(sys, "argv", ["inspect", "--against", str(kept)])
    assert inspect.main() == 0
    monkeypatch.setattr(inspect, "inspect", lambda *_: [{**ROW, cost: ROW[cost] + 1}])
    assert inspect.main() == 1
    assert f"regressed: o/c: {cost} {ROW[cost] + 1}, was {ROW[cost]}" in capsys.readouterr().out


def test_cases_that_come_and_go_are_told() -> None:
    before = inspect.record([ROW])
    assert inspect.regressions([], before) == ["o/c: not inspected any more"]
    assert inspect.regressions([ROW, {**ROW, "case": "d"}], before) == ["o/d: not recorded yet"]


@pytest.mark.parametrize(("verdict", "code"), [("ok", 0), ("1 rmw_stores", 1)])
def test_a_bad_verdict_is_the_exit_status(verdict: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "inspect", lambda *_: [{**ROW, "verdict": verdict}])
    monkeypatch.setattr(sys, "argv", ["inspect", "--json"])
    assert inspect.main() == code


def test_a_bad_kernel_changes_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    t = torch.zeros(37, dtype=I32)
    with lowered.recording() as launches:
        sabotage.overlapping((1,), t, t.clone(), 37, BLOCK=16)
    case = inspect.Case("get_last_loc", "x", dict, lambda a: 1, lambda a: 10**6)
    assert inspect._row(case, {}, launches, {}, TARGETS)["verdict"] == "ok"
    wide = torch.zeros(37, dtype=torch.int64)
    with lowered.recording() as launches:
        sabotage.overlapping((1,), wide, wide.clone(), 37, BLOCK=16)
    assert "int64_vectors" in inspect._row(case, {}, launches, {}, TARGETS)["verdict"]
    wasteful = dataclasses.replace(case, needed=lambda a: 100)
    assert "bytes moved where 100 are needed" in inspect._row(wasteful, {}, launches, {}, TARGETS)["verdict"]


def test_an_inspection_stands_for_one_of_the_same_code(tmp_path: Path) -> None:
    proven, now = tmp_path / "inspect.json", ascend_inspect.what("Ascend910B3")
    kept = ("tests/backends/ascend/inspect.json", "hal/backends/ascend/rope_kv_write.py", "hal/lowered/lint.py")
    assert set(kept) <= now["files"].keys()
    for change, says in (
        ({}, ""),
        ({"chip": "Ascend950"}, "chip: was Ascend950"),
        ({"python": "3.10"}, "python: was 3.10"),
        ({"versions": "triton-ascend 3.1.0"}, "versions: was triton-ascend 3.1.0"),
        ({"files": {}}, "is not what was"),
        ({"files": now["files"] | {kept[1]: "0"}}, f"judged: {kept[1]}"),
        ({"files": None}, "TypeError"),
    ):
        proven.write_text(json.dumps(now | change))
        why = "; ".join(ascend_inspect.differences(proven, now))
        assert says in why
        assert bool(says) == bool(why)
    assert "FileNotFoundError" in ascend_inspect.differences(tmp_path / "absent", now)[0]
