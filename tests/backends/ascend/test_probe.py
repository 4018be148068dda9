"""Why the backend can't run, on either lane: each state told apart, by stand-in packages on a path of their own."""

from __future__ import annotations

import os
import subprocess
import sys
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


@pytest.fixture
def ascend(tmp_path: Path) -> Path:
    """triton-ascend as it should be."""
    package(tmp_path, "triton", "", None, "backends/ascend")
    distribution(tmp_path, "triton-ascend", "3.2.0")
    return tmp_path


def torch_is(folder: Path, cuda: str | None = None, available: bool = True, count: int = 8) -> None:
    package(folder, "torch", TORCH.format(cuda=cuda, npu=NPU.format(available=available, count=count)), "2.13.0")


def test_all_there(ascend: Path) -> None:
    torch_is(ascend)
    package(ascend, "torch_npu", "", "2.13.0")
    assert probe(ascend) == "None"


def test_no_triton_ascend(tmp_path: Path) -> None:
    assert probe(tmp_path).startswith("triton-ascend is not installed: pip install triton-ascend==3.2.0")


def test_triton_over_triton_ascend(tmp_path: Path) -> None:
    package(tmp_path, "triton", "", "3.6.0", "backends/nvidia")
    distribution(tmp_path, "triton-ascend", "3.2.0")
    said = probe(tmp_path)
    assert said.startswith("the package triton here is not triton-ascend's (triton 3.6.0 is installed)")
    assert "pip uninstall -y triton triton-ascend && pip install triton-ascend==3.2.0" in said


def test_triton_ascend_over_triton(ascend: Path) -> None:
    distribution(ascend, "triton", "3.6.0")
    assert probe(ascend).startswith("triton and triton-ascend are both installed, and share one folder")


def test_triton_folder_gone(tmp_path: Path) -> None:
    distribution(tmp_path, "triton-ascend", "3.2.0")
    assert probe(tmp_path).startswith("triton-ascend 3.2.0 is installed but its package triton is gone")


def test_no_torch_npu(ascend: Path) -> None:
    torch_is(ascend)
    assert probe(ascend).startswith("torch_npu is not installed")


def test_torch_npu_without_cann(ascend: Path) -> None:
    torch_is(ascend)
    package(ascend, "torch_npu", "raise ImportError('libhccl.so: cannot open shared object file')", "2.13.0")
    said = probe(ascend)
    assert said.startswith("torch_npu is installed but does not load (libhccl.so")
    assert "set_env.sh" in said


def test_import_torch_fails_for_torch_npu(ascend: Path) -> None:
    package(ascend, "torch", "raise RuntimeError('Failed to load the backend extension: torch_npu.')", "2.13.0")
    package(ascend, "torch_npu", "", "2.13.0")
    said = probe(ascend)
    assert said.startswith("`import torch` fails while it loads torch_npu (Failed to load the backend extension")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in said


def test_cuda_torch_beside_torch_npu(ascend: Path) -> None:
    torch_is(ascend, cuda="13.0")
    package(ascend, "torch_npu", "raise SystemExit('imported beside a CUDA torch')", "2.13.0")
    assert "is a CUDA build; torch_npu and it can't share a process" in probe(ascend)


@pytest.mark.parametrize(("available", "count"), [(False, 0), (True, 0)])
def test_no_device(ascend: Path, available: bool, count: int) -> None:
    torch_is(ascend, available=available, count=count)
    package(ascend, "torch_npu", "", "2.13.0")
    assert probe(ascend).startswith("no NPU: torch_npu sees none")


def test_a_driver_that_does_not_answer(ascend: Path) -> None:
    package(ascend, "torch", TORCH.format(cuda=None, npu=SILENT), "2.13.0")
    package(ascend, "torch_npu", "", "2.13.0")
    assert probe(ascend).startswith("torch_npu loaded but its driver does not answer (dcmi timed out)")


def test_a_torch_npu_that_adds_nothing(ascend: Path) -> None:
    package(ascend, "torch", TORCH.format(cuda=None, npu=""), "2.13.0")
    package(ascend, "torch_npu", "", "2.13.0")
    assert probe(ascend).startswith("torch_npu loaded but its driver does not answer")


# --- the lowered lane ---


def installed(folder: Path, *without: str, **versions: str) -> None:
    """The distributions that the lane needs, as a path of their own."""
    for name, version in {**{n: v or "9.9" for n, v in toolchain.NEEDED.items()}, **versions}.items():
        if name not in without:
            info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
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


def test_a_tool_of_another_version(elsewhere: Path) -> None:
    installed(elsewhere, **{"ascendnpu-ir": "1.3.0"})
    said = toolchain.missing()
    assert said is not None
    assert said.startswith("ascendnpu-ir 1.3.0 is installed, the lane is proven with 1.2.0")


def test_triton_over_the_tools(elsewhere: Path) -> None:
    installed(elsewhere)
    (elsewhere / "triton/backends/ascend").rmdir()
    said = toolchain.missing()
    assert said is not None
    assert said.startswith("the folder of the package triton belongs to triton")


def test_the_package_triton_is_gone(elsewhere: Path) -> None:
    installed(elsewhere)
    (elsewhere / "triton/__init__.py").unlink()
    said = toolchain.missing()
    assert said is not None
    assert said.startswith("triton-ascend is installed but the package triton is not importable")


def test_without_the_tools_the_lane_says_so(elsewhere: Path) -> None:
    with pytest.raises(lowered.ToolchainError, match="the lowered lane can't run: triton-ascend is not installed"):
        toolchain.require.__wrapped__()
