"""The command line: what it prints, its exit codes, and no traceback for a user's mistake."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins import Plugins, hal_command, manifest

import hal
from hal import _doctor, _tools, cli
from hal._notation import parse_argument
from hal.ops.spec import PoolSig, TensorSig

ROOT = Path(hal.__file__).parents[1]
pytestmark = pytest.mark.usefixtures("fresh")


run = functools.partial(hal_command, columns=200)


def test_as_a_module() -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("HAL_")}

    def hal_(*args: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hal", *args]
        return subprocess.run(
            command, capture_output=True, text=True, env=env | more, cwd=ROOT, timeout=600, check=False
        )

    assert hal_("--version").stdout == f"hal {hal.__version__}\n"
    bad = hal_("explain", "get_last_lok")
    assert bad.returncode == 2
    assert bad.stderr.startswith("hal: unknown op get_last_lok (did you mean get_last_loc?)")
    assert "Traceback" not in bad.stderr
    typo = hal_("info", HAL_BACKNED="cpu")
    assert (typo.returncode, typo.stderr) == (
        2,
        "hal: unknown environment variable HAL_BACKNED; did you mean HAL_BACKEND?\n",
    )


def test_help_teaches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    for command in ("info", "explain", "doctor", "warmup", "demo"):
        assert command in text
    assert run(monkeypatch, "explain", "-h") == 0
    assert "hal explain rope_kv_write" in capsys.readouterr().out
    assert run(monkeypatch, "nothing") == 2
    assert run(monkeypatch) in (0, 2)  # 0 by click before 8.2
    assert "explain" in "".join(capsys.readouterr())


def test_info(plugins: Plugins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plugins.add("acme", manifest("acme", requires='("acme_rt>=2",)'))
    plugins.add("shut", manifest("shut"))
    monkeypatch.setenv("HAL_PLUGINS", "cpu,cuda,acme")
    monkeypatch.setenv("HAL_OF_FAME", "[red]")
    assert run(monkeypatch, "info") == 0
    text = capsys.readouterr().out
    assert 'needs acme_rt>=2 — pip install "acme_rt>=2"' in text
    assert "HAL_OF_FAME" in text
    assert "not ours: ignored" in text
    assert "kept from loading by HAL_PLUGINS: ascend, shut" in text
    for word in (*hal.ops.BUILTIN, "reference", "unimplemented", "HAL_CACHE_DIR"):
        assert word in text
    assert run(monkeypatch, "info", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data == json.loads(json.dumps(hal.info()))
    acme = next(b for b in data["backends"] if b["name"] == "acme")
    assert acme["lanes"]["device"]["state"] == "absent"


def test_explain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(
            monkeypatch,
            "explain",
            "rope_kv_write",
            "q=bf16[64,32,128]@cpu",
            "interleaved=True",
            "--backend",
            "reference",
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "q=bf16[64,32,128]@cpu, k=bf16[64,2,128]@cpu" in text
    assert "runs on reference" in text
    assert run(monkeypatch, "explain", "rope_kv_write", "q=bf16[64,32,192]@npu:0", "--backend", "cuda") == 1
    text = capsys.readouterr().out
    assert text.startswith("hal: no backend for rope_kv_write(q=bf16[64,32,192]@npu:0, ")
    assert (
        run(monkeypatch, "explain", "kv_transfer", "src=KVPool(layer_first,bf16[2x16]@cpu)", "--backend", "reference")
        == 0
    )
    for args, said in [
        (["rope_kv_write", "q=i64[3,4,5]"], "rope_kv_write: q: expected"),
        (["rope_kv_write", "q=i64[3,4,5]@cpu"], "q: expected dtype fp16 or bf16 or fp32; got i64[3,4,5]@cpu"),
        (["rope_kv_write", "q=bf17[3,4,5]@cpu"], "did you mean bf16"),
        (["rope_kv_write", "q=bf16[3]@cpu"], "q: expected [n q_heads head_dim]; got bf16[3]@cpu"),
        (["rope_kv_write", "q=5"], "q: expected a tensor such as"),
        (["rope_kv_write", "qq=5"], "no such argument (did you mean q?)"),
        (["rope_kv_write", "q"], "expected NAME=DTYPE[SIZES]@DEVICE"),
        (["rope_kv_write", "q=%%"], "expected NAME=DTYPE[SIZES]@DEVICE"),
        (["rope_kv_write", "q=bf16[3,4,64]@cpu", "k=bf16[3,2,32]@cpu"], "k: expected head_dim = 64, as in q"),
        (["rope_kv_write", "interleaved=maybe"], "interleaved: expected one of False, True; got 'maybe'"),
        (["rope_kv_write", "k_scale=fp32[1]@cpu"], "k_scale: expected a plain value"),
        (["kv_transfer", "src=3"], "src: expected KVPool"),
        (["kv_transfer", "method=KVPool(layer_first,bf16[2x16]@cpu)"], "method: expected a plain value"),
        (["kv_transfer", "method=fast"], "method: expected one of"),
        (["get_last_loc", "--backend", "cdua"], "did you mean cuda"),
    ]:
        assert run(monkeypatch, "explain", *args) == 2, args
        assert said in capsys.readouterr().err


def test_notation() -> None:
    assert parse_argument("op", "q = bfloat16[2, 3]@cuda:1") == (
        "q",
        TensorSig(torch.bfloat16, "cuda", (2, 3), "contiguous", True, 1),
    )
    assert parse_argument("op", "v=None") == ("v", None)
    assert parse_argument("op", "scale=0.5") == ("scale", 0.5)
    assert parse_argument("op", "method=direct") == ("method", "direct")
    name, pool = parse_argument("op", "src=KVPool(page_first,e4m3[8x128]@cuda:0)")
    assert name == "src"
    assert isinstance(pool, PoolSig)
    assert (pool.layout, pool.dtype, pool.row_shape, pool.device) == (
        "page_first",
        torch.float8_e4m3fn,
        (8, 128),
        "cuda",
    )


def test_warmup(plugins: Plugins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HAL_PLUGINS", "acme")
    plugins.add("acme", manifest("acme", warmup='"acme_kernels:warm"'), "def warm(ops, device): pass")
    assert run(monkeypatch, "warmup") == 0
    assert "acme: 0.0" in capsys.readouterr().out
    assert run(monkeypatch, "warmup", "--device", "meta") == 3
    assert "no ready backend for meta" in capsys.readouterr().out
    assert run(monkeypatch, "warmup", "--device", "meta", "--backend", "acme") == 1
    assert "hal: warmup: acme is ready for meta" in capsys.readouterr().err


def test_a_part_that_needs_an_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name="transformers.models")

    monkeypatch.setattr("importlib.import_module", absent)
    assert run(monkeypatch, "demo") == 1
    assert "hal demo needs transformers.models — pip install 'hal-kernels[demo]'" in capsys.readouterr().err


def test_our_own_missing_module_is_a_bug_not_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name="hal.demo.lost")

    monkeypatch.setattr("importlib.import_module", absent)
    with pytest.raises(ModuleNotFoundError):
        _tools.run_part("hal.demo.cli", "main", "hal demo", "demo")


def test_closed_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed() -> None:
        raise BrokenPipeError

    monkeypatch.setattr(cli, "app", closed)
    with pytest.raises(SystemExit) as e:
        cli.main()
    assert e.value.code == 0


# --- doctor -----------------------------------------------------------------------------------------

KERNELS = """
import os, time, torch
def get_last_loc(req_to_token, req_pool_indices, prefix_lens): {last}
def assign_extend_cache_locs(req_to_token, req_pool_indices, start_offsets, end_offsets, out):
    spans = zip(req_pool_indices.tolist(), start_offsets.tolist(), end_offsets.tolist())
    found = torch.cat([req_to_token[r, start:end] for r, start, end in spans])
    out[:len(found)] = found
    out[len(found):] = -1
    return out
"""
TWO_OPS = '{{op: Impl(f"{name}_kernels:{{op}}") for op in ("assign_extend_cache_locs", "get_last_loc")}}'


def doctor(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], last: str, *args: str
) -> tuple[int, list[dict[str, Any]]]:
    ops = TWO_OPS.format(name="acme")
    plugins.add("acme", manifest("acme", ops=ops), KERNELS.format(last=last))
    monkeypatch.setenv("HAL_PLUGINS", "acme")
    monkeypatch.setenv("PYTHONPATH", f"{plugins.root}{os.pathsep}{ROOT}")
    code = run(monkeypatch, "doctor", "--json", "--backend", "acme", *args)
    return code, json.loads(capsys.readouterr().out)["results"]


@pytest.mark.parametrize(
    ("last", "args", "saw"),
    [
        ("return torch.full_like(prefix_lens, 9)", (), "elements are wrong"),
        ("raise OSError('lost')", (), "OSError: lost"),
        ("os._exit(41)", (), "the child died with exit code 41: no message"),
        ("time.sleep(99)", ("--timeout", "3"), "no answer within 3 s"),
    ],
)
def test_doctor_sees(
    plugins: Plugins,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    last: str,
    args: tuple[str, ...],
    saw: str,
) -> None:
    code, rows = doctor(plugins, monkeypatch, capsys, last, *args)
    assert code == 1
    by_op = {r["op"]: r for r in rows}
    assert set(by_op) == {"get_last_loc", "assign_extend_cache_locs"}
    assert by_op["get_last_loc"]["ok"] is False
    assert saw in by_op["get_last_loc"]["saw"]
    other = by_op["assign_extend_cache_locs"]
    assert other["ok"] or other["saw"] == "not reached"


def test_doctor_on_the_reference(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HAL_PLUGINS", "none")
    assert run(monkeypatch, "doctor") == 0
    text = capsys.readouterr().out
    assert text.count("right") == len(hal.ops.BUILTIN)
    assert "wrong" not in text


def test_doctor_with_nothing_to_run(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins.add("acme", manifest("acme", requires='("acme_rt",)'))
    monkeypatch.setenv("HAL_PLUGINS", "acme")
    assert run(monkeypatch, "doctor", "--backend", "acme") == 3
    assert "absent: needs acme_rt" in capsys.readouterr().out
    assert run(monkeypatch, "doctor", "--op", "get_lost_loc") == 2
    assert run(monkeypatch, "doctor", "--backend", "acmee") == 2
    assert "did you mean acme" in capsys.readouterr().err


def test_doctor_child_in_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    _doctor._run("reference", "device", ["get_last_loc", "rope_kv_write", "kv_transfer"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["op"], r["ok"], r["saw"]) for r in rows] == [
        (op, True, "right") for op in ("get_last_loc", "rope_kv_write", "kv_transfer")
    ]


def test_doctor_child_env(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def fake(command: list[str], env: dict[str, str], timeout: float, each: bool) -> tuple[list[str], str]:
        seen.clear()
        seen.update(env)
        return ['{"backend": "x", "op": "a"}'], f"no answer within {timeout:g} s"

    monkeypatch.setattr(_doctor, "ask", fake)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    rows = _doctor._child("x", "device", ["a", "b"], 1)
    assert [r.get("saw") for r in rows] == [None, "no answer within 1 s"]
    assert "TRITON_INTERPRET" not in seen
    _doctor._child("x", "interpreter", ["a"], 1)
    assert (seen["TRITON_INTERPRET"], seen["HAL_LANE"]) == ("1", "interpreter")


def test_doctor_says_who_owns_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    have: set[str] = set()

    def version(name: str) -> str:
        if name not in have:
            raise _doctor.metadata.PackageNotFoundError(name)
        return "9.9"

    monkeypatch.setattr(_doctor.metadata, "version", version)
    assert _doctor._notes() == []
    have.add("triton")
    assert _doctor._notes() == ["the folder `triton` belongs to triton 9.9"]
    have.add("triton-ascend")
    assert "whichever came last owns it" in _doctor._notes()[0]


TOOLS = """
def inspect(kernel):
    rows = [{"op": "get_last_loc", "registers": 12, "verdict": "ok"}, {"op": "kv_write", "verdict": "spills 8 bytes"}]
    return [r for r in rows if kernel in (None, r["op"])]

def tune():
    return [{"op": "kv_transfer", "costs": 3}]
"""


def test_a_backends_own_tools(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins.add("acme", manifest("acme", inspect='"acme_kernels:inspect"', tune='"acme_kernels:tune"'), TOOLS)
    plugins.add("bare", manifest("bare"))
    plugins.add("lost", manifest("lost", requires='("lost_rt>=2",)', inspect='"lost_kernels:inspect"'), TOOLS)
    plugins.add(
        "shut",
        manifest("shut", probe='"shut_kernels:probe"', tune='"shut_kernels:tune"'),
        TOOLS + "def probe():\n    return 'no device'\n",
    )
    plugins.load()
    assert run(monkeypatch, "inspect", "acme") == cli.FAILED
    assert "op=kv_write  verdict=spills 8 bytes" in capsys.readouterr().out
    assert run(monkeypatch, "inspect", "acme", "get_last_loc", "--json") == cli.OK
    (row,) = json.loads(capsys.readouterr().out)
    assert row == {"op": "get_last_loc", "registers": 12, "verdict": "ok"}
    assert run(monkeypatch, "inspect", "acme", "alloc_decode") == cli.NOTHING
    assert run(monkeypatch, "tune", "acme") == cli.OK
    assert "op=kv_transfer  costs=3" in capsys.readouterr().out
    for command, backend, says in (
        ("inspect", "bare", "bare has no such tool; these have: "),
        ("inspect", "lost", "lost is absent"),
        ("tune", "shut", "shut is unavailable"),
        ("inspect", "acm", "did you mean acme"),
    ):
        assert run(monkeypatch, command, backend) in (cli.FAILED, cli.USAGE)
        assert says in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_backend_that_can_not_run_here_is_not_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for backend in ("cuda", "cuda/flashinfer"):
        assert run(monkeypatch, "conformance", backend) == cli.NOTHING
        said = capsys.readouterr().err
        assert said.startswith(f"hal: conformance: {backend}: ")
        assert "Traceback" not in said


@pytest.mark.parametrize(
    ("prefix", "seq", "argument"),
    [
        ([1], [2, 3], "seq_lens"),
        (torch.zeros(1), [2], "prefix_lens"),
        ([0], torch.zeros(1, 1, dtype=torch.int64), "seq_lens"),
        ([0], torch.zeros(1, dtype=torch.int64, device="meta"), "seq_lens"),
    ],
)
def test_num_new_pages_refuses(prefix: Any, seq: Any, argument: str) -> None:
    with pytest.raises(hal.ArgumentError) as e:
        hal.num_new_pages(prefix, seq, page_size=4)
    assert (e.value.op, e.value.argument) == ("num_new_pages", argument)


def test_num_new_pages_of_tensors_and_of_lists() -> None:
    prefix, seq = [2, 0, 4, 9], [5, 3, 4, 1]
    assert hal.num_new_pages(prefix, seq, page_size=4) == 2
    assert hal.num_new_pages(torch.tensor(prefix), torch.tensor(seq, dtype=torch.int32), page_size=4) == 2
