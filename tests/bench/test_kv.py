"""The CUDA tables of KV writes and moves, without their clocks: every implementation is built and judged, none that is
wrong is timed, and one that fails takes no other with it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hal import HalError, bench
from hal.bench import cuda, cuda_kv

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

Tables = Mapping[str, Callable[..., list[bench.Row]]]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Tables:
    """All of it, small, on the CPU; a call instead of a clock."""

    def timed(calls: cuda.Calls, sets: int, *_: Any, **__: Any) -> dict[str, float]:
        for call in calls.values():
            call(0)
            call(sets - 1)
        return {name: 2.0 + i for i, name in enumerate(calls)}

    for name, value in {
        "DEVICE": "cpu", "SIZES": (1, 5), "HEADS": (4, 2, 32), "MLA": (2, 64, 32), "LAYERS": 2, "POOL": 1 << 18,
        "_capture": lambda fn: fn(), "ceiling": lambda: 9.0,
    }.items():  # fmt: skip
        monkeypatch.setattr(cuda_kv, name, value)
    monkeypatch.setattr(cuda, "device_us", timed)
    monkeypatch.setattr(cuda, "host_us", timed)
    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)
    torch.manual_seed(0)
    return {name: getattr(cuda_kv, name) for name in cuda_kv.TABLES}


def test_the_command_has_them() -> None:
    found = bench._tables("cuda")
    assert {name: found[name] for name in cuda_kv.TABLES} == {n: getattr(cuda_kv, n) for n in cuda_kv.TABLES}
    assert {"rope_kv_write", "alloc_decode", "launcher"} < set(found)


OTHERS = {
    "kv_write": {"eager", "torch.compile"},
    "mla_kv_write": {"eager", "torch.compile"},
    "mla_rope_kv_write": {"hal rope, then index_put", "eager", "torch.compile"},
    "qk_norm_rope_kv_write": {"rms_norm, then hal rope_kv_write", "eager", "torch.compile"},
    "kv_move": {"hal, workspace for one layer", "eager by layer", "eager, all layers", "torch.compile"},
}


@pytest.mark.parametrize("op", cuda_kv.TABLES)
def test_every_implementation_is_right(tables: Tables, op: str) -> None:
    rows = tables[op](quick=True)
    assert len(rows) == (4 if op == "kv_write" else 2)
    for row in rows:
        assert not row.get("failed"), row["failed"]
        assert {bench.OURS} | OTHERS[op] == set(row["device_us"]) == set(row["host_us"])
        assert set(row["device_gbs"]) == {*row["device_us"], "copy"}
        moved = {round(row["device_gbs"][n] * us * 1e3) for n, us in row["device_us"].items()}
        assert len(moved) == 1
        assert moved.pop() > 0


@pytest.mark.parametrize("op", cuda_kv.TABLES)
def test_what_is_wrong_is_not_timed(tables: Tables, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that does nothing, one that can't be built, and ours when it is wrong."""
    made = cuda_kv._row

    def with_bad(about: Any, sets: Any, nbytes: int, builds: Any, **kw: Any) -> bench.Row:
        def lost(a: Any) -> Any:
            raise ImportError("no such kernel\nsecond line")

        return made(about, sets, nbytes, {**builds, "idle": lambda a: lambda: None, "lost": lost}, **kw)

    monkeypatch.setattr(cuda_kv, "_row", with_bad)
    (row, *_) = rows = tables[op](quick=True)
    assert set(row["failed"]) == {"idle", "lost"}
    assert row["failed"]["lost"] == "ImportError: no such kernel"
    assert set(row["device_us"]) == {bench.OURS} | OTHERS[op]
    assert bench.exit_code({"rows": rows}) == 0
    monkeypatch.setattr(cuda_kv, "_hal", lambda name: lambda a: lambda: None)
    monkeypatch.setattr(cuda_kv, "_ours", lambda name: lambda *args, **kwargs: None)
    rows = tables[op](quick=True)
    assert all(bench.OURS in r["failed"] and bench.OURS not in r["device_us"] for r in rows)
    assert bench.exit_code({"rows": rows}) == 1


@pytest.mark.usefixtures("tables")
def test_a_case_or_a_table_that_breaks_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole = cuda_kv._cache

    def scarce(row: Any, dtype: torch.dtype, share: int) -> torch.Tensor:
        if dtype == torch.float8_e4m3fn:
            raise RuntimeError("out of memory")
        return whole(row, dtype, share)

    def broken(quick: bool = False) -> list[bench.Row]:
        raise OSError("lost")

    monkeypatch.setattr(cuda_kv, "_cache", scarce)
    monkeypatch.setattr(cuda_kv, "mla_kv_write", broken)
    files = tmp_path / "a.json", tmp_path / "a.svg"
    command = ["mla_kv_write", "kv_write", "--quick", "--json", str(files[0]), "--plot", str(files[1])]
    drawn: list[Any] = []
    monkeypatch.setattr(bench, "draw", lambda run, file: drawn.append((run, file)))
    assert cuda_kv.main(command) == 1
    told = capsys.readouterr().out
    assert "kv_write 1 e4m3: hal was not timed: RuntimeError: out of memory" in told
    assert "the table mla_kv_write broke: OSError: lost" in told
    assert "vs eager" in told
    run = json.loads(files[0].read_text())
    assert [("device_us" in r, r["cache"]) for r in run["rows"]] == [
        (True, "bf16"), (True, "bf16"), (False, "e4m3"), (False, "e4m3"),
    ]  # fmt: skip
    assert drawn == [({**run, "rows": drawn[0][0]["rows"]}, str(files[1]))]
    cuda.plot(drawn[0][0], drawn[0][1])
    picture = files[1].read_text()
    assert picture.count("<g ") == 1
    assert "kv_write" in picture
    assert "device copy 9 GB/s" in picture
    with pytest.raises(HalError, match="GB/s by tokens"):
        cuda.plot({"rows": [], "machine": {"device": "x"}}, str(files[1]))
    with pytest.raises(SystemExit):
        cuda_kv.main(["kv_wriet"])


@pytest.mark.usefixtures("tables")
def test_inputs_that_change_nothing_are_refused() -> None:
    a = {
        "kv_lora": torch.zeros(2, 8), "k_rope": torch.zeros(2, 8), "kv_cache": torch.zeros(4, 16),
        "slots": torch.tensor([1, 2]),
    }  # fmt: skip
    with pytest.raises(AssertionError, match="nothing would be checked"):
        cuda_kv._wanted("mla_kv_write", a)
