"""Why the backend can't run, on either lane: each state told apart, by stand-in packages on a path of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hal import lowered
from hal.lowered import toolchain

pytestmark = pytest.mark.anywhere

ROOT = Path(__file__).parents[3]
TORCH = "class version:\n    cuda = {cuda!r}\n__version__ = '2.13.0'\n{npu}"
NPU = """class npu:
    is_available = staticmethod(lambda: {available})
    device_count = staticmethod(lambda: {count})
"""

SILENT = """class npu:
    @staticmethod
    def is_available():
        raise RuntimeError('dcmi timed out')
"""


def package(folder: Path, name: str, source: str, version: str | None, *inside: str) -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "__init__.py").write_text(source)
    for path in inside:
        (folder / name / path).mkdir(parents=True, exist_ok=True)
    if version is not None:
        distribution(folder, name.replace("_", "-"), version)


def distribution(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def probe(folder: Path) -> str:
    """What `device()` says in a process that has these packages and no others."""
    code = "import sys; sys.path[:0] = sys.argv[1:]; from hal.backends.ascend._probe import device; print(device())"
    base = [str(folder), str(ROOT)]
    env = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    # -S: no site-packages. hal's light modules need only pluggy, which the probe doesn't import.
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code, *base, *PLUGGY], capture_output=True, text=True, env=env, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def _pluggy(folder: Path) -> str:
    import pluggy

    (folder / "pluggy").symlink_to(Path(pluggy.__file__).parent)
    return str(folder)


PLUGGY: list[str] = []


@pytest.fixture(autouse=True)
def only_pluggy(tmp_path_factory: pytest.TempPathFactory) -> None:
    PLUGGY[:] = [_pluggy(tmp_path_factory.mktemp("pluggy"))]


def ascend(folder: Path) -> None:
    """triton-ascend as it should be."""
    package(folder, "triton", "", None, "backends/ascend")
    distribution(folder, "triton-ascend", "3.2.0")


def torch_is(folder: Path, cuda: str | None = None, available: bool = True, count: int = 8) -> None:
    package(folder, "torch", TORCH.format(cuda=cuda, npu=NPU.format(available=available, count=count)), "2.13.0")


def npu(folder: Path, source: str = "") -> None:
    package(folder, "torch_npu", source, "2.13.0")


def torch_with(folder: Path, attributes: str) -> None:
    package(folder, "torch", TORCH.format(cuda=None, npu=attributes), "2.13.0")


def other_triton(folder: Path) -> None:
    package(folder, "triton", "", "3.6.0", "backends/nvidia")
    distribution(folder, "triton-ascend", "3.2.0")


NO_CANN, NO_AUTOLOAD = "libhccl.so: cannot open shared object file", "Failed to load the backend extension: torch_npu."
SHARED = "triton and triton-ascend are both installed, and share one folder"
OTHERS = "the package triton here is not triton-ascend's (triton 3.6.0 is installed)"
REINSTALL = "pip uninstall -y triton triton-ascend && pip install triton-ascend==3.2.0"
GONE = "triton-ascend 3.2.0 is installed but its package triton is gone"
FAILS = "`import torch` fails while it loads torch_npu (Failed to load the backend extension"
SILENCE = "torch_npu loaded but its driver does not answer"


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([], ["triton-ascend is not installed: pip install triton-ascend==3.2.0"]),
        ([other_triton], [OTHERS, REINSTALL]),
        ([lambda d: distribution(d, "triton-ascend", "3.2.0")], [GONE]),
        ([ascend, torch_is, npu], ["None"]),
        ([ascend, lambda d: distribution(d, "triton", "3.6.0")], [SHARED]),
        ([ascend, torch_is], ["torch_npu is not installed"]),
        (
            [ascend, torch_is, lambda d: npu(d, f"raise ImportError({NO_CANN!r})")],
            ["torch_npu is installed but does not load (libhccl.so", "set_env.sh"],
        ),
        (
            [ascend, lambda d: package(d, "torch", f"raise RuntimeError({NO_AUTOLOAD!r})", "2.13.0"), npu],
            [FAILS, "TORCH_DEVICE_BACKEND_AUTOLOAD=0"],
        ),
        ([ascend, lambda d: torch_is(d, available=False, count=0), npu], ["no NPU: torch_npu sees none"]),
        ([ascend, lambda d: torch_is(d, count=0), npu], ["no NPU: torch_npu sees none"]),
        ([ascend, lambda d: torch_with(d, SILENT), npu], [f"{SILENCE} (dcmi timed out)"]),
        ([ascend, lambda d: torch_with(d, ""), npu], [SILENCE]),
    ],
)
def test_state(tmp_path: Path, steps: list[Callable[[Path], None]], said: list[str]) -> None:
    for step in steps:
        step(tmp_path)
    found = probe(tmp_path)
    assert found.startswith(said[0])
    assert all(words in found for words in said)


def test_cuda_torch_beside_torch_npu(tmp_path: Path) -> None:
    ascend(tmp_path)
    torch_is(tmp_path, cuda="13.0")
    npu(tmp_path, "raise SystemExit('imported beside a CUDA torch')")
    assert "is a CUDA build; torch_npu and it can't share a process" in probe(tmp_path)


# --- the lowered lane ---


def installed(folder: Path, *without: str, **versions: str) -> None:
    """The distributions that the lane needs, as a path of their own."""
    for name, version in {**{n: v or "9.9" for n, v in toolchain.NEEDED.items()}, **versions}.items():
        if name not in without:
            distribution(folder, name, version)
    (folder / "triton/backends/ascend").mkdir(parents=True)
    (folder / "triton/__init__.py").write_text("")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all the packages there are."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    return tmp_path


def test_tools_all_there(elsewhere: Path) -> None:
    installed(elsewhere)
    assert toolchain.missing() is None


@pytest.mark.parametrize("name", sorted(toolchain.NEEDED))
def test_a_tool_is_missing(elsewhere: Path, name: str) -> None:
    installed(elsewhere, name)
    said = toolchain.missing()
    assert said is not None
    assert said.startswith(f"{name} is not installed; in a virtual environment of its own: pip install torch")


@pytest.mark.parametrize(
    ("versions", "without", "said"),
    [
        ({"ascendnpu-ir": "1.3.0"}, "", "ascendnpu-ir 1.3.0 is installed, the lane is proven with 1.2.0"),
        ({}, "triton/backends/ascend", "the folder of the package triton belongs to triton"),
        ({}, "triton", "triton-ascend is installed but the package triton is not importable"),
    ],
)
def test_other_tools(elsewhere: Path, versions: dict[str, str], without: str, said: str) -> None:
    installed(elsewhere, **versions)
    if without:
        shutil.rmtree(elsewhere / without)
    assert (toolchain.missing() or "").startswith(said)


def test_without_the_tools_the_lane_says_so(elsewhere: Path) -> None:
    with pytest.raises(lowered.ToolchainError, match="the lowered lane can't run: triton-ascend is not installed"):
        toolchain.require.__wrapped__()
