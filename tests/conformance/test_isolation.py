"""Where a plugin's code runs while it is judged: in a process that decides nothing. And what a report says of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins import Plugins, manifest

from hal._remote.memory import Placed
from hal._remote.perform import Hands
from hal._remote.target import RegistryTarget
from hal._remote.wire import Task
from hal.conformance import main
from hal.conformance._arena import Arena, Room, place
from hal.conformance._cases import cases_of
from hal.conformance._find import Fatal, find, job_for
from hal.conformance._result import FAILED
from hal.conformance._run import run_backend
from hal.conformance._sources import code_of
from hal.conformance._truths import TRUTHS, Truths
from hal.conformance._verdict import Ret
from hal.conformance._worker import _doing, _tail, _ticks, last_line
from hal.conformance.proofs.run import run_case
from hal.ops import get_spec

OP = "get_last_loc"
NOTES_PID = """
import os, pathlib
with open(pathlib.Path(__file__).with_name("pids"), "a") as f:
    f.write(f"{{__name__}} {{os.getpid()}}\\n")
"""
GOOD = """
import torch

def get_last_loc(req_to_token, req_pool_indices, prefix_lens):
    rows, width = req_to_token.shape
    ok = (req_pool_indices >= 0) & (req_pool_indices < rows) & (prefix_lens > 0) & (prefix_lens <= width)
    if not rows or not width:
        return torch.full_like(prefix_lens, -1)
    at = req_to_token[torch.where(ok, req_pool_indices, 0).long(), torch.where(ok, prefix_lens, 1).long() - 1]
    return torch.where(ok, at.to(prefix_lens.dtype), -1)
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugins:
    monkeypatch.syspath_prepend(str(tmp_path))
    return Plugins(tmp_path)


def values(op: str = OP) -> list[Any]:
    return [c for c in cases_of(get_spec(op)) if c.proof == "value"]


def test_a_plugin_runs_in_its_worker_alone(plugins: Plugins, tmp_path: Path) -> None:
    note = NOTES_PID.format()
    plugins.add("acme", note + manifest("acme"), note + GOOD)
    plugins.add("other", note + manifest("other"))
    assert main("acme", ops=[OP], report=tmp_path / "out", quiet=True) == 0
    ran = [line.split() for line in (tmp_path / "pids").read_text().splitlines()]
    assert {name for name, _ in ran} == {"acme", "acme_kernels"}
    assert str(os.getpid()) not in {pid for _, pid in ran}
    assert not {"acme", "acme_kernels", "other"} & set(sys.modules)
    (tmp_path / "pids").unlink()
    assert not run_backend("reference", "device", [OP], values()[:1]).fatal
    assert not (tmp_path / "pids").exists()


def test_a_foreign_plugin_decides_nothing(plugins: Plugins) -> None:
    """It would set the environment, end the process, and hang; nobody asks it."""
    plugins.add("meddler", "import os\nos.environ['HAL_BACKEND'] = 'reference'\nos._exit(0)\n")
    plugins.add("acme", manifest("acme"), GOOD)
    plugins.add("wrong", manifest("wrong"))
    right = run_backend("acme", "device", [OP], values())
    assert {r.outcome for r in right.results.values()} == {"passed"}, right.fatal
    wrong = run_backend("wrong", "device", [OP], values())
    assert FAILED in {r.outcome for r in wrong.results.values()}


def test_a_backend_is_found_whatever_its_entry_point_is_called(plugins: Plugins) -> None:
    plugins.add("acme", manifest("acme"), GOOD, entry="zebra")
    with find(job_for("acme", "device", ops=[OP])) as worker:
        assert worker.about["states"] == {OP: None}
        assert worker.about["declared"][OP][0]["impl"] == "acme"


def test_the_user_s_allow_list_holds(plugins: Plugins, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    plugins.add("acme", manifest("acme"), GOOD)
    monkeypatch.setenv("HAL_PLUGINS", "cpu")
    assert main("acme", ops=[OP]) == 2
    assert "HAL_PLUGINS keeps acme from loading" in capsys.readouterr().err


OWN_OP = """
from hal.registry import Backend, Impl, hookimpl

@hookimpl
def hal_backend():
    return Backend("acme", lanes={"device": ("cpu",)}, ops={"double": Impl("acme_kernels:double")})

@hookimpl
def hal_ops():
    from acme_kernels import SPEC
    return [SPEC]
"""
OWN_KERNELS = """
import torch
from hal.ops.proofs.judge import Candidate, Want
from hal.ops.spec import OpSpec, Sample, TensorArg

def reference(x, out):
    out.copy_(2 * x)
reference.__name__ = "double"

def double(x, out):
    out.copy_(x + x)

def oracle(a):
    return {"out": Want(torch.ones_like(a["out"], dtype=torch.bool), (Candidate(2 * a["x"]),))}

def make(seed=0, n=5):
    return {"x": torch.arange(n) + seed, "out": torch.zeros(n, dtype=torch.int64)}

INT = (torch.int64,)
SPEC = OpSpec(
    reference=reference, args={"x": TensorArg("n", INT), "out": TensorArg("n", INT, mutated=True)}, oracle=oracle,
    make=make, samples=[Sample("plain"), Sample("more", {"n": 64}), Sample("much", {"n": 100})], ragged={"n": (1, 40)},
)
"""


def test_an_op_of_the_plugin_s_own_is_judged_where_its_contract_is_loaded(
    plugins: Plugins, tmp_path: Path, capsys: Any
) -> None:
    plugins.add("acme", OWN_OP, OWN_KERNELS)
    assert main("acme", ops=["double"], report=tmp_path / "out") == 0
    assert "judged by the plugin's own contracts, where its code runs: double" in capsys.readouterr().out
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["trust"]["own_oracle"] == ["double"]
    outcomes = {c["id"]: c["outcome"] for c in report["cases"]}
    assert outcomes["double/value/plain"] == outcomes["double/ragged/all"] == "passed"
    assert "acme_kernels" not in sys.modules
    assert main(verify=tmp_path / "out/report.json", rerun=3) == 0
    assert "ran 3 cases again" in capsys.readouterr().out


# --- the code that was judged -----------------------------------------------------------------------


def test_an_edited_kernel_is_noticed(plugins: Plugins, tmp_path: Path, capsys: Any) -> None:
    plugins.add("acme", manifest("acme", ops='{"get_last_loc": Impl("acme:kernel")}'), GOOD)
    source = tmp_path / "acme.py"
    source.write_text(source.read_text() + GOOD.replace("def get_last_loc", "def kernel"))
    before = code_of("acme")
    assert before["complete"]
    assert {"acme.py", "hal/kv/pool.py", "hal/registry/_dispatch.py", "hal/triton/_launch.c"} <= set(before["files"])
    assert not any(name.startswith(("hal/backends/", "hal/conformance/")) for name in before["files"])
    assert main("acme", ops=[OP], report=tmp_path / "out", quiet=True) == 0
    path = tmp_path / "out/report.json"
    assert main(verify=path) == 0
    source.write_text(source.read_text() + "# faster\n")
    capsys.readouterr()
    assert main(verify=path) == 1
    assert "the code is not what was judged: acme.py" in capsys.readouterr().out
    (tmp_path / "hal_acme-1.2.dist-info/entry_points.txt").unlink()
    assert main(verify=path) == 0
    assert "the sources of acme are not here" in capsys.readouterr().out


def test_the_pins_of_ours_are_their_own_files_and_what_they_share() -> None:
    cpu, cuda = code_of("cpu")["files"], code_of("cuda")["files"]
    assert "hal/backends/cpu/get_last_loc.py" in cpu
    assert not any(name.startswith("hal/backends/cuda/") for name in cpu)
    assert {n for n in cpu if "backends" not in n} == {n for n in cuda if "backends" not in n}
    assert code_of("cpu")["sha256"] != code_of("cuda")["sha256"]


# --- deaths -----------------------------------------------------------------------------------------

MINE = """
import hal

def touch(n):
    {body}

@hal.register("get_last_loc", backend="mine")
def get_last_loc(req_to_token, req_pool_indices, prefix_lens):
    touch(len(prefix_lens))
    return prefix_lens.clone()
"""


def mine(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch, case: str, silence: float | None = None) -> Any:
    (folder / "mine.py").write_text(MINE.format(body=body))
    monkeypatch.chdir(folder)
    cases = [c for c in cases_of(get_spec(OP)) if c.id == case]
    return run_backend("mine", "device", [OP], cases, imports=["mine"], silence=silence).results[case]


def test_a_crash_names_the_author_s_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "import ctypes; ctypes.string_at(0)"
    result = mine(tmp_path, body, monkeypatch, "get_last_loc/value/one")
    first = result.reason.splitlines()[0]
    assert first == f"the process died (SIGSEGV) at {tmp_path / 'mine.py'}:5 in touch"
    assert "replay('get_last_loc', backend='mine'" in result.snippet


def test_a_hang_names_the_author_s_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = mine(tmp_path, "import time; time.sleep(999)", monkeypatch, "get_last_loc/value/one", 20.0)
    first, second, *_ = result.reason.splitlines()
    assert first == f"hung: no call ended for 20 s at {tmp_path / 'mine.py'}:5 in touch"
    assert second.startswith("it waits, using no processor")


def test_slow_is_not_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "import time; time.sleep(0.3)"
    source = "get_last_loc/leak/all"
    (tmp_path / "mine.py").write_text(MINE.format(body=body).replace("prefix_lens.clone()", "good(**locals())"))
    good = GOOD.replace("def get_last_loc", "def good")
    (tmp_path / "mine.py").write_text(good + (tmp_path / "mine.py").read_text())
    monkeypatch.chdir(tmp_path)
    cases = [c for c in cases_of(get_spec(OP)) if c.id == source]
    result = run_backend("mine", "device", [OP], cases, imports=["mine"], silence=8.0).results[source]
    assert result.outcome == FAILED
    assert result.reason.startswith("slow: not done after 32 s, though its calls end: ")
    assert "--timeout gives them longer" in result.reason


def test_what_hangs_is_said_to_wait_or_to_compute() -> None:
    assert "lock" in _doing(0.0)
    assert "using 99% of a processor" in _doing(0.99)
    assert "--timeout" in _doing(0.99)
    assert _doing(None) == ""
    before = _ticks(os.getpid())
    if before is None:
        pytest.skip("no /proc here")
    while (now := _ticks(os.getpid())) == before:
        pass
    assert now is not None
    assert now > before
    assert _ticks(2**31 - 1) is None


def test_the_innermost_line_that_is_the_author_s(tmp_path: Path) -> None:
    hal = Path(__file__).parents[2] / "hal"
    said = [
        "Fatal Python error: Segmentation fault",
        "Stack (most recent call first):",
        f'  File "{torch.__file__}", line 3 in empty',
        '  File "/their/kernel.py", line 7 in load',
        '  File "/their/plugin.py", line 9 in get_last_loc',
        f'  File "{hal}/_remote/perform.py", line 1 in call',
    ]
    assert last_line(said) == " at /their/kernel.py:7 in load"
    ours = [f'  File "{hal}/_remote/perform.py", line 1 in call']
    assert last_line([*ours, f'  File "{hal}/backends/cpu/_jit.py", line 2 in run']).endswith("_jit.py:2 in run")
    assert last_line(ours).endswith("perform.py:1 in call")
    package = tmp_path / "acme"
    (package / "kernels").mkdir(parents=True)
    (tmp_path / "numpy" / "core").mkdir(parents=True)
    for folder in (package, package / "kernels", tmp_path / "numpy", tmp_path / "numpy/core"):
        (folder / "__init__.py").touch()
    frames = [
        f'  File "{tmp_path / f}.py", line {i} in f{i}'
        for i, f in enumerate(("numpy/core/take", "acme/kernels/tile", "acme/kernels/last", "acme/api"))
    ]
    assert last_line(["Fatal Python error: Aborted", *frames, *ours]).endswith("acme/kernels/tile.py:1 in f1")
    assert _tail(["Fatal Python error: Aborted", *frames, *ours]) == ["Fatal Python error: Aborted", *frames]
    assert _tail(ours) == ours
    assert last_line(["nothing"]) == ""


# --- what crosses -----------------------------------------------------------------------------------


def test_a_worker_that_says_nonsense_fails_its_case_alone(plugins: Plugins) -> None:
    """Answers are data: what is no answer is a failure, not an error of the judge."""
    lie = """
import sys
import hal._remote.perform as perform
SAYS = iter([[], {}, {"outcome": "returned", "own": True, "others": [], "ret": {"kind": "tensor", "shape": ["x"]}}, 7])
perform.Hands.do = lambda hands, task: next(SAYS, {"outcome": "broke", "type": "T", "text": "t", "trace": ""})
"""
    plugins.add("acme", manifest("acme"), GOOD + lie)
    cases = values()[:6]
    outcome = run_backend("acme", "device", [OP], cases)
    assert {r.outcome for r in outcome.results.values()} == {FAILED}
    assert len(outcome.results) == len(cases)


def test_what_is_returned_is_read_from_the_memory_and_not_from_the_answer() -> None:
    arena = Arena(1 << 24)
    placed = place({"x": torch.arange(4)}, Room(arena))
    said = {"kind": "tensor", "dtype": "i64", "shape": [4], "device": "cpu", "shown": "", "stored": True, "is": []}
    start, _ = placed.arguments.result
    arena.memory.raw(start, start + 32).copy_(torch.arange(4).view(torch.uint8))
    got = Ret.of(said, placed).values
    assert got is not None
    assert got.tolist() == [0, 1, 2, 3]
    for change in ({"shape": [2**40]}, {"shape": [-4]}, {"stored": 1}, {"dtype": "moon"}):
        assert Ret.of({**said, **change}, placed).values is None


def test_both_processes_see_the_same_tensors() -> None:
    arena = Arena(1 << 24)
    arguments = get_spec("rope_kv_write").make()
    placed = place(arguments, Room(arena))
    there = Placed(arena.memory, placed.arguments, torch.device("cpu"))
    for name, value in arguments.items():
        got = there.values[name]
        if isinstance(value, torch.Tensor):
            assert torch.equal(got, value)
            assert (got.stride(), got.data_ptr() % 16) == (value.stride(), value.data_ptr() % 16)
        else:
            assert got == value
    there.values["q"].zero_()
    assert not placed.values["q"].any()


def test_a_task_that_breaks_is_an_answer() -> None:
    hands = Hands(RegistryTarget.of("reference", "device"), Arena(1 << 20).memory)
    assert hands.do(Task("nothing", OP))["outcome"] == "broke"


def test_truths_are_kept_while_there_is_room() -> None:
    kept = Truths(room=1 << 20)
    first = kept.get(get_spec(OP), {"bs": 3})
    assert kept.get(get_spec(OP), {"bs": 3}) is first
    assert kept.get(get_spec(OP), {"bs": 4}) is not first
    for bs in range(5, 400):
        kept.get(get_spec(OP), {"bs": bs})
    assert kept.get(get_spec(OP), {"bs": 3}) is not first
    assert TRUTHS.room > kept.room


def test_what_can_not_be_found_is_said(plugins: Plugins) -> None:
    plugins.add("acme", "raise RuntimeError('boom')\n")
    with pytest.raises(Fatal, match="acme is broken: importing acme raised RuntimeError: boom"):
        find(job_for("acme", "device"))


def test_arguments_are_copied_to_a_device_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the memory itself can't be taken; here the device is other memory of the same machine."""
    monkeypatch.setattr(
        Placed, "_raw", lambda self, span, device: torch.zeros(span.stop - span.start, dtype=torch.uint8)
    )
    arena = Arena(1 << 24)
    first, second = (place({"x": torch.arange(6) + i, "y": torch.zeros(3)}, Room(arena)) for i in (0, 10))
    there = Placed(arena.memory, first.arguments, torch.device("cpu"))
    assert there.values["x"].tolist() == [0, 1, 2, 3, 4, 5]
    there.values["x"] += 1
    assert first.values["x"].tolist() == [0, 1, 2, 3, 4, 5]
    there.pull()
    assert first.values["x"].tolist() == [1, 2, 3, 4, 5, 6]
    there.push(second.arguments)
    assert there.values["x"].tolist() == [10, 11, 12, 13, 14, 15]
    there.values["x"] *= 2
    there.pull(second.arguments)
    assert second.values["x"].tolist() == [20, 22, 24, 26, 28, 30]
    assert first.values["x"].tolist() == [1, 2, 3, 4, 5, 6]
    assert second.blocks["y"][0].changes(None) is None
    for name, count in (("value", 2), ("later", 1), ("threads", 1)):
        cases = [c for c in cases_of(get_spec("rope_kv_write")) if c.proof == name][:count]
        for case in cases:
            result = run_case(case, RegistryTarget.of("reference", "device"), get_spec("rope_kv_write"))
            assert result.outcome == "passed", result.reason
