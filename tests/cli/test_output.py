"""What commands print: JSON that nothing else mixes with, any terminal's encoding, and no traceback for a mistake."""

from __future__ import annotations

import functools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins import Plugins, forget_table, hal_command, manifest

import hal
from hal import cli
from hal.bench import cli as bench_cli
from hal.ops import get_spec

ROOT = Path(hal.__file__).parents[1]
pytestmark = pytest.mark.usefixtures("fresh")

NOISE = """
import atexit, os, subprocess
print("acme says: {")
print("and no newline", end="")
os.write(1, b"from C ")
subprocess.run(["echo", "from a child"])
atexit.register(print, "acme leaves")
"""


def python(folder: Path, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with the plugins of `folder`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HAL_")}
    env.update({"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "HAL_PLUGINS": "acme", "COLUMNS": "150"}, **more)
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, env=env, cwd=folder, timeout=600, check=False
    )


def hal_(folder: Path, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "hal", *args, **more)


run = functools.partial(hal_command, columns=300)


@pytest.mark.parametrize(
    "command",
    [
        ("info", "--json"),
        ("inspect", "acme", "--json"),
        ("doctor", "--json", "--backend", "acme", "--op", "get_last_loc"),
    ],
)
def test_what_plugins_print_is_not_in_the_json(plugins: Plugins, command: tuple[str, ...]) -> None:
    kernels = f"{NOISE}\nfrom torch import where\ndef rows(kernel): print('inside'); return [{{'kernel': 'k'}}]\n"
    kernels += (
        "def get_last_loc(req_to_token, req_pool_indices, prefix_lens):\n"
        "    print('called')\n"
        "    found = prefix_lens.clone()\n"
        "    for i, (r, p) in enumerate(zip(req_pool_indices.tolist(), prefix_lens.tolist())):\n"
        "        there = 0 <= r < req_to_token.shape[0] and 0 < p <= req_to_token.shape[1]\n"
        "        found[i] = req_to_token[r, p - 1] if there else -1\n"
        "    return found\n"
    )
    plugins.add("acme", f"{NOISE}\n{manifest('acme', inspect=repr('acme_kernels:rows'))}", kernels)
    done = hal_(plugins.root, *command)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert "acme says" not in done.stdout
    if command[0] != "doctor":
        assert "acme says: {" in done.stderr
        assert "acme leaves" in done.stderr
    else:
        assert [(r["op"], r["ok"]) for r in data["results"]] == [("get_last_loc", True)]


def test_bench_prints_data_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from hal import bench

    def loud(quick: bool) -> list[dict[str, Any]]:
        print("a plugin that is imported here")
        return [{"op": "loud", "case": "x", "call_us": {"hal": 1.0}}]

    monkeypatch.setattr(bench, "tables_of", lambda device: {"loud": loud})
    assert bench.main(["loud"], json=True) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["rows"][0]["op"] == "loud"
    assert "a plugin that is imported here" in said.err


SEVERAL = """
import sys
from hal import cli
for line in sys.argv[1:]:
    sys.argv = ["hal", *line.split()]
    try:
        cli.main()
    except SystemExit:
        pass
"""


def test_a_terminal_of_ascii(plugins: Plugins) -> None:
    probe = "def probe(): return 'no device — “µ” … é 漢'"
    plugins.add("acme", manifest("acme", probe='"acme_kernels:probe"'), probe)
    commands = (
        "info",
        "explain get_last_loc --backend acme",
        "doctor --backend acme",
        "--help",
        "demo --help",
        "warmup --backend acme",
        "inspect acme",
    )
    done = python(plugins.root, "-c", SEVERAL, *commands, PYTHONIOENCODING="ascii")
    assert "Error" not in done.stderr
    assert done.stdout.isascii()
    assert done.stderr.isascii()
    said = " ".join((done.stdout + done.stderr).split())
    assert "no device" in said
    assert said.count('"u" . e ?') >= 3, said  # info, explain and doctor


def test_the_users_own_choice_of_errors_stays(plugins: Plugins) -> None:
    plugins.add("acme", manifest("acme", probe='"acme_kernels:probe"'), "def probe(): return 'no µ'")
    done = hal_(plugins.root, "explain", "get_last_loc", "--backend", "acme", PYTHONIOENCODING="ascii:backslashreplace")
    assert r"no \xb5" in done.stdout


@pytest.mark.parametrize("where", ["a file", "in a file", "a read-only place"])
@pytest.mark.parametrize(
    ("option", "command"),
    [("--report", ("conformance", "reference", "--report")), ("--save", ("bench", "get_last_loc", "--save"))],
)
def test_a_folder_that_cannot_be_written_fails_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    option: str,
    command: tuple[str, ...],
    where: str,
) -> None:
    ran: list[object] = []
    for module in (cli, bench_cli):
        monkeypatch.setattr(module, "run_part", lambda *args, **kwargs: ran.append(args) or 0)
    (tmp_path / "file").write_text("")
    place = {
        "a file": tmp_path / "file",
        "in a file": tmp_path / "file" / "out",
        "a read-only place": Path("/proc/hal"),
    }[where]
    assert run(monkeypatch, *command, str(place)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"hal: {command[0]}: {option}: expected a folder that can be written; got {place}: ")
    assert said.count("\n") == 1
    assert not ran
    assert run(monkeypatch, *command, str(tmp_path / "new" / "folder")) == 0
    assert len(ran) == 1
    assert list((tmp_path / "new" / "folder").iterdir()) == []


@pytest.mark.parametrize("command", [("conformance", "reference"), ("conformance", "cpu"), ("warmup",), ("bench",)])
def test_a_device_that_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert run(monkeypatch, *command, "--device", "banana") == 2 - (command[0] == "bench")
    said = capsys.readouterr().err
    assert said.startswith(f"hal: {command[0]}: ")
    assert "banana" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("link", "--device", "npu"), "link: --device: expected cpu or cuda; got 'npu'"),
        (("link", "--tokens", "17"), "link: --tokens: expected a multiple of 16, > 0; got 17"),
        (("link", "--layers", "0"), "link: --layers: expected an int > 0; got 0"),
        (("link", "--rounds", "-1"), "link: --rounds: expected an int > 0; got -1"),
        (("--model",), "--model: expected --device ascend --model; got --device"),
        (("engine", "other"), "engine: NAME: expected vllm or sglang; got 'other'"),
        (("engine", "vllm", "--shape", "none"), "engine: --shape: expected "),
        (("engine", "vllm", "--decode", "1by2"), "engine: --decode: expected such as 1x1024,32x1024; got '1by2'"),
        (("engine", "vllm", "--ttft", "long"), "engine: --ttft: expected such as 4096,32768; got 'long'"),
        (("engine", "vllm", "--profile", "1y2"), "engine: --profile: expected such as 32768,128x1024; got '1y2'"),
        (("link", "--to-device", "npu"), "link: --to-device: expected cpu or cuda; got 'npu'"),
        (("engine", "vllm", "--vllm", "{"), "engine: --vllm: expected JSON; got '{'"),
    ],
)
def test_options_of_benches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], says: str
) -> None:
    assert run(monkeypatch, "bench", *options) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("device", ["gpu", "gpu:0", "CUDA", "", "cuda:x", None, 3.5])
def test_bind_of_a_device_that_is_none(device: Any) -> None:
    with pytest.raises(hal.ArgumentError, match="bind: device: expected a device of torch's: cpu, cuda") as e:
        hal.bind(device)
    assert ("did you mean cuda?" in str(e.value)) == (device in ("gpu", "gpu:0", "CUDA"))


@pytest.mark.parametrize("value", [None, 5, ["cpu"], b"cpu"])
def test_a_backend_that_is_no_text(value: Any) -> None:
    with pytest.raises(hal.SelectionError, match=r"hal: hal.use\(.*\): expected a text such as 'cpu'"), hal.use(value):
        pass
    if value is not None:
        for name in ("backend", "checks", "fallback"):
            with pytest.raises(hal.SelectionError, match=rf"hal: configure\({name}=.*expected a text, or None"):
                hal.configure(**{name: value})
        with pytest.raises(hal.SelectionError, match=r"backend=.*expected a text"):
            hal.bind("cpu", backend=value)
        with pytest.raises(hal.SelectionError, match=r"backend=.*expected a text"):
            hal.explain("get_last_loc", torch.zeros(1, 1).int(), *[torch.zeros(1).long()] * 2, backend=value)


def test_info_says_where_a_kernel_fails(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HAL_PLUGINS", "acme")
    plugins.add("acme", manifest("acme"), "import os\n\nraise OSError('libacme.so: no such file')\n")
    assert run(monkeypatch, "info") == 0
    said = capsys.readouterr().out
    file = plugins.root / "acme_kernels.py"
    assert (
        f"broken: get_last_loc=acme: importing acme_kernels:get_last_loc raised OSError: libacme.so: no such file "
        f"(at {file}:3)\n"
    ) in said
    data = hal.info()
    assert data["ops"]["get_last_loc"]["acme"] == ["broken"]
    assert [(f["op"], f["backend"], f["state"]) for f in data["failures"]] == [("get_last_loc", "acme", "broken")]
    assert 'raise OSError("' in data["failures"][0]["detail"].replace("'", '"')


def test_a_syntax_error_has_its_line(plugins: Plugins) -> None:
    plugins.add("acme", "x = 1\ny = (\n")
    plugins.load()
    acme = next(b for b in hal.info()["backends"] if b["name"] == "acme")
    assert f"(at {plugins.root / 'acme.py'}:2)" in acme["lanes"]["device"]["reason"]


def test_conformance_loads_the_judged_plugin_alone(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(cli, "run_part", lambda *args, **kwargs: seen.append(os.environ.get("HAL_PLUGINS")) or 0)
    plugins.add("acme", manifest("acme"))
    plugins.add("hangs", "raise SystemError('must not be imported')")
    monkeypatch.setenv("HAL_PLUGINS", "")
    for name, allowed in (
        ("reference", "cpu,cuda,ascend"),
        ("cpu", "cpu,cuda,ascend"),
        ("acme", "cpu,cuda,ascend,acme"),
    ):
        monkeypatch.setenv("HAL_PLUGINS", "")
        forget_table()
        assert run(monkeypatch, "conformance", name) == 0
        assert seen[-1] == allowed
        assert "hangs" not in sys.modules
    monkeypatch.setenv("HAL_PLUGINS", "acme")
    assert run(monkeypatch, "conformance", "acme") == 0
    assert seen[-1] == "acme"


def test_errors_are_named_as_they_are_caught() -> None:
    for name in ("HalError", "ArgumentError", "SelectionError", "NoBackendError", "BackendError", "FallbackWarning"):
        kind = getattr(hal, name)
        assert f"{kind.__module__}.{kind.__qualname__}" == f"hal.{name}"
    error = pickle.loads(pickle.dumps(hal.ArgumentError("op", "x", "a", "b")))
    assert str(error) == "hal: op: x: expected a; got b"


def test_a_name_in_capitals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_BACKEND", "CPU")
    with pytest.raises(hal.SelectionError, match=r"HAL_BACKEND=CPU: unknown backend CPU \(did you mean cpu\?\)"):
        hal.reload()
    monkeypatch.setenv("HAL_BACKEND", "rope_kv_write=Reference")
    with pytest.raises(hal.SelectionError, match=r"did you mean reference\?"):
        hal.reload()


def test_a_misspelt_keyword() -> None:
    with pytest.raises(TypeError, match=r"prefix_len: did you mean prefix_lens\?"):
        hal.explain("get_last_loc", 1, 2, prefix_len=3)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'backends'$"):
        hal.explain("get_last_loc", 1, 2, 3, backends=3)
    args = get_spec("get_last_loc").make()
    lens = args.pop("prefix_lens")
    for _ in range(2):  # of a new kind, and of a known one
        with pytest.raises(TypeError, match=r"get_last_loc\(\) .*prefix_len: did you mean prefix_lens\?"):
            hal.get_last_loc(**args, prefix_len=lens)
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'causal'$"):
            hal.get_last_loc(**args, prefix_lens=lens, causal=True)
        with pytest.raises(TypeError, match=r"get_last_loc\(\) missing a required argument: 'prefix_lens'$"):
            hal.get_last_loc(**args)
        with pytest.raises(TypeError, match="positional"):
            hal.get_last_loc(1, 2, 3, 4)
        hal.get_last_loc(**args, prefix_lens=lens, backend="reference")
