"""The lint finds what it names, the compiler's answers are read right, and our kernels are clean."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ascend import sabotage

from hal import lowered
from hal._errors import HalError
from hal.backends.ascend import inspect
from hal.lowered import compile as compiler
from hal.lowered.lint import Lint, lint

I32 = torch.int32


def lowered_form(name: str, *args: object, **constexprs: int) -> str:
    return lowered.lower(getattr(sabotage, name).jit, args, constexprs).ttadapter


def test_lint_finds_a_gather() -> None:
    t = torch.zeros(8, dtype=I32)
    assert lint(lowered_form("last_loc_masked", t.view(1, 8), t, t, t, 8, 8, BLOCK=16)) == Lint(1, 0, 0)


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


def test_a_real_hivmc_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With CANN the stand-in hands over: whoever is called hivmc on PATH makes the binary."""
    fake = tmp_path / "hivmc"
    fake.write_text(
        '#!/bin/sh\nwhile [ $# -gt 0 ]; do case "$1" in -o) echo made > "$2";; esac; shift; done\necho "hivmc 1.0"\n'
    )
    fake.chmod(0o755)
    import os

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    t = torch.zeros(4, dtype=I32)
    assert compiler.compile_for(lowered_form("overlapping", t, t, 4, BLOCK=64), "Ascend910B3").binary


def test_every_kernel_is_clean_and_compiles_for_every_generation() -> None:
    rows = inspect.inspect()
    assert {r["verdict"] for r in rows} == {"ok"}, inspect.table(rows)
    for r in rows:
        assert set(r["targets"]) == set(compiler.TARGETS)
        assert r["ub_bits"] <= inspect.UB_LIMIT * r["ub_available"]
        assert r["bytes_moved"] <= 1.15 * r["bytes_needed"], r


def test_one_kernel_by_either_name() -> None:
    assert {r["op"] for r in inspect.inspect("get_last_loc")} == {"get_last_loc"}
    assert {r["op"] for r in inspect.inspect("_move_rows")} == {"kv_transfer"}
    with pytest.raises(HalError, match="no kernel called 'nothing'"):
        inspect.inspect("nothing")


def test_a_bad_kernel_changes_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    t = torch.zeros(37, dtype=I32)
    with lowered.recording() as launches:
        sabotage.overlapping((1,), t, t.clone(), 37, BLOCK=16)
    case = inspect.Case("get_last_loc", "x", dict, lambda a: 1, lambda a: 1)
    assert inspect._row(case, {}, launches)["verdict"] == "ok"
    wide = torch.zeros(37, dtype=torch.int64)
    with lowered.recording() as launches:
        sabotage.overlapping((1,), wide, wide.clone(), 37, BLOCK=16)
    assert "int64_vectors" in inspect._row(case, {}, launches)["verdict"]
