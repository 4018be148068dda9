"""``hal doctor --report``: what is in it, what is not, and that no step keeps another from running."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins import Plugins, manifest

import hal
from hal import _doctor, _private, _report, _report_steps, cli
from hal.conformance._schema import misfits
from hal.ops.proofs.inputs import on_device

SECRETS = ("janedoe", "gpu-box-17", "corp.example", "10.20.30.40", "fe80:", "gguf", "models", "hunter2", "Vault")
SAID = (
    "janedoe@corp.example on gpu-box-17.corp.example (10.20.30.40, fe80:0:1:2:3:4:5:6) read "
    "/home/janedoe/models/Vault/big.gguf and http://gpu-box-17/x of /opt/Vault/kernel.py"
)
STEPS: dict[str, Callable[..., None]] = {n: getattr(_report_steps, n) for n in ("machine", "states", "device", "times")}


@pytest.fixture
def jane(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("USER", "janedoe"), ("HOSTNAME", "gpu-box-17.corp.example"), ("HOME", "/home/janedoe")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HAL_CACHE_DIR", "/home/janedoe/Vault/hunter2")
    monkeypatch.setenv("ASCEND_HOME_PATH", "/home/janedoe/models/ascend")
    monkeypatch.setenv("ASCEND_SECRET", "hunter2")
    monkeypatch.setenv("API_KEY", "hunter2")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box-17")
    _private.names.cache_clear()
    yield
    _private.names.cache_clear()


def here(command: list[str], env: dict[str, str], timeout: float, each: bool) -> tuple[list[str], str]:
    """`_doctor.ask` in this process: a child would spend seconds on importing torch."""
    module, *arguments = command[2:]
    text, died = io.StringIO(), ""
    try:
        if module == "hal._doctor":
            _doctor._run(arguments[0], arguments[1], arguments[2:], text)
        else:
            _report_steps.out = text
            STEPS[arguments[0]](*arguments[1:])
    except SystemExit as e:
        died = f"no answer within {timeout:g} s" if e.code == "hangs" else f"the child died with exit code {e.code}"
    return text.getvalue().splitlines(), died


KERNELS = f"""
def get_last_loc(req_to_token, req_pool_indices, prefix_lens):
    raise OSError({SAID!r} + chr(10) + {SAID!r})
def alloc_decode(seq_lens, last_loc, free_pages, page_size, out):
    raise SystemExit("hangs")
def alloc_extend(prefix_lens, seq_lens, last_loc, free_pages, page_size, out):
    raise SystemExit(41)
def assign_extend_cache_locs(req_to_token, req_pool_indices, start_offsets, end_offsets, out):
    spans = zip(req_pool_indices.tolist(), start_offsets.tolist(), end_offsets.tolist())
    found = __import__("torch").cat([req_to_token[r, start:end] for r, start, end in spans])
    out[:len(found)] = found
    out[len(found):] = -1
    return out
"""
OPS = ("alloc_decode", "alloc_extend", "get_last_loc", "assign_extend_cache_locs")


@pytest.fixture
def report(
    plugins: Plugins, jane: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Any:
    """(the report of a backend whose ops raise, die, hang and work; its texts)."""
    ops = f'{{op: Impl(f"acme_kernels:{{op}}") for op in {OPS}}}'
    plugins.add("acme", manifest("acme", ops=ops), KERNELS)
    monkeypatch.setenv("HAL_PLUGINS", "acme")
    monkeypatch.setattr(_doctor, "ask", here)
    monkeypatch.setattr(_report_steps, "COPIES", (1 << 10,))
    file = tmp_path / "out" / "mine.json"
    assert _report.main(file, None, ["acme"], 120) == 1
    texts = file.read_text("utf-8"), file.with_suffix(".txt").read_text("utf-8"), capsys.readouterr().out
    return json.loads(texts[0]), texts


def test_a_report(report: Any) -> None:
    data, texts = report
    assert misfits(data, json.loads(_report.SCHEMA.read_text())) == []
    steps = {s["step"]: s for s in data["steps"]}
    assert [*steps] == ["machine", "states", "device cpu", "ops acme device", "times acme"]
    rows = {r["name"]: r for r in steps["machine"]["rows"]}
    assert rows["torch"]["saw"] == rows["import torch"]["saw"]
    assert {"date", "python", "system", "cpu", "commit", "triton-ascend", "torch-npu", "npu-smi"} <= {*rows}
    assert "ASCEND_SECRET" not in rows
    assert rows["HAL_CACHE_DIR"]["saw"] == "…"
    (acme,) = (r for r in steps["states"]["rows"] if r["backend"] == "acme")
    assert (acme["state"], acme["lane"], acme["devices"]) == ("ready", "device", ["cpu"])
    (copy, *_) = (r for r in steps["device cpu"]["rows"] if r["name"] == "device to device, 1024 bytes")
    assert {*copy["saw"]} == {"median_us", "best_us", "GB/s"}
    assert any(r["name"].startswith("peak memory") for r in steps["times acme"]["rows"])
    # To read: every step and op.
    for text in (*steps, *OPS):
        assert text in texts[1]


def test_a_step_that_fails_or_hangs_does_not_stop_it(report: Any) -> None:
    steps = {s["step"]: s for s in report[0]["steps"]}
    saw = {r["op"]: (r["ok"], r["saw"]) for r in steps["ops acme device"]["rows"]}
    assert saw["alloc_decode"] == (False, "no answer within 120 s")
    assert saw["alloc_extend"] == (False, "the child died with exit code 41")
    assert saw["get_last_loc"][0] is False
    assert "raised OSError: " in saw["get_last_loc"][1]
    assert saw["assign_extend_cache_locs"] == (True, "right")
    # What was right is timed, and nothing else.
    assert [r["name"] for r in steps["times acme"]["rows"]][:1] == ["assign_extend_cache_locs"]
    assert steps["times acme"]["ok"]
    assert steps["machine"]["ok"]


def test_nothing_private_is_in_it(report: Any) -> None:
    for text in report[1]:
        for secret in SECRETS:
            assert secret.lower() not in text.lower(), secret
    (row,) = (r for r in report[0]["steps"][3]["rows"] if r["op"] == "get_last_loc")
    assert "[mail] on [name]" in row["saw"]
    assert "…/kernel.py" in row["detail"][0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/home/janedoe/x y/z.bin", "… y/z.bin"),
        ('File "/home/janedoe/v/lib/python3.11/site-packages/triton/a.py", line 3', 'File "…/triton/a.py", line 3'),
        ("either and/or 3/4 of q[2,4]@npu:0", "either and/or 3/4 of q[2,4]@npu:0"),
        ("Version=25.1.0.3; at 1.2.3.4:80", "Version=25.1.0.3; at [address]:80"),
        ("JaneDoe's janedoes", "[name]'s janedoes"),
        ("aa:bb:cc:dd:ee:ff at 12:34:56", "[address] at 12:34:56"),
        ("../up/here and ~/there", "… and …"),
    ],
)
def test_redaction(text: str, told: str, jane: None) -> None:
    assert _private.redact({"a": [text, 3, None]}) == {"a": [told, 3, None]}


def test_a_child_that_hangs_goes_with_what_it_started() -> None:
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(p.pid, flush=True)\nprint('half', end='', flush=True)\ntime.sleep(600)"
    )
    begin = time.monotonic()
    lines, died = _doctor.ask([sys.executable, "-c", code], {**os.environ}, 4, each=True)
    assert died == "no answer within 4 s"
    assert time.monotonic() - begin < 300
    if lines:
        (pid,) = lines
        for _ in range(600):
            state = Path(f"/proc/{pid}/stat")
            if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
                break
            time.sleep(0.1)
        else:
            raise AssertionError("what the child started still runs")


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In processes of its own, the first step alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_report, "run", lambda ops, backends, timeout: iter([_report._step("machine", timeout)]))
    monkeypatch.setattr(sys, "argv", ["hal", "doctor", "--report"])
    with pytest.raises(SystemExit) as e:
        cli.main()
    assert e.value.code == 0
    assert json.loads((tmp_path / "hal-report.json").read_text())["steps"][0]["ok"]
    monkeypatch.setattr(sys, "argv", ["hal", "doctor", "out.json"])
    with pytest.raises(SystemExit) as e:
        cli.main()
    assert e.value.code == 2
    monkeypatch.setattr(sys, "argv", ["hal", "doctor", "--report", "/proc/nowhere/x.json"])
    with pytest.raises(SystemExit) as e:
        cli.main()
    assert e.value.code == 2


@pytest.mark.parametrize("layout", ["layer_first", "page_head"])
def test_samples_are_placed(layout: str) -> None:
    """Pools keep their layout and page size, other values stay what they are."""
    shape = (2, 8, 2, 4) if layout == "layer_first" else (2, 2, 4, 2, 4)
    made = [torch.zeros(shape, dtype=torch.float32, device="cpu") for _ in range(2)]
    apart = hal.KVPool(*(tuple(torch.zeros(2, 8, 2, 4)) for _ in range(2)), page_size=4)
    pool = hal.KVPool(*made, layout=layout, page_size=4)
    found = on_device({"pool": pool, "apart": apart, "scale": 3.5}, "cpu")
    assert (found["pool"].layout, found["pool"].page_size, found["scale"]) == (layout, 4, 3.5)
    assert found["apart"].num_layers == 2
    meta = on_device({"whole": made[0], "part": made[0][1]}, "meta")
    assert meta["part"].is_meta
    assert meta["part"].shape == made[0][1].shape
    assert meta["part"].stride() == made[0][1].stride()
