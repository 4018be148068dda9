"""What importing costs: told by the modules that come, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hal
from hal.ops import BUILTIN

ROOT = Path(hal.__file__).parents[1]
HEAVY = {
    "torch",
    "numpy",
    "triton",
    "numba",
    "transformers",
    "rich",
    "typer",
    "pluggy",
    "pytest",
    "hypothesis",
    "llvmlite",
}
OURS = {"hal", "hal._errors", "hal._subinterpreter", "hal._version"}
MODULES_FOR_A_MANIFEST = {*OURS, "hal.registry", "hal.registry._manifest"}


def modules(code: str) -> set[str]:
    """The modules that `code` brings into a Python that has imported nothing of its own."""
    after = "print(json.dumps(sorted(set(sys.modules) - before)))"
    script = f"import sys, json\nbefore = set(sys.modules)\n{code}\n{after}"
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    return set(json.loads(ran.stdout.splitlines()[-1]))


def top(names: set[str]) -> set[str]:
    return {n.partition(".")[0] for n in names}


def test_import_hal_is_the_standard_library_alone() -> None:
    got = modules("import hal")
    assert {n for n in got if n.startswith("hal")} == OURS
    # CPython's own list of its modules leaves out those that begin with _xx.
    assert top(got) - {"hal", "_xxsubinterpreters"} <= set(sys.stdlib_module_names)
    assert len(got) <= 40, sorted(got)


def test_dir_and_errors_bring_nothing_more() -> None:
    got = modules("import hal; dir(hal); hal.ArgumentError('a', 'b', 'c', 'd'); hal.__version__")
    assert {n for n in got if n.startswith("hal")} == OURS


@pytest.mark.parametrize("backend", ["cpu", "cuda", "ascend"])
def test_manifest_is_light(backend: str) -> None:
    got = modules(f"import hal.backends.{backend} as b; b.hal_backend()")
    assert not top(got) & (HEAVY - {"pluggy"})
    package = {"hal.backends", f"hal.backends.{backend}"}
    assert {n for n in got if n.startswith("hal")} == MODULES_FOR_A_MANIFEST | package


def test_listing_ops_imports_no_contract() -> None:
    got = modules("import hal.ops; hal.ops.BUILTIN")
    assert not top(got) & HEAVY


def test_a_call_imports_no_proof() -> None:
    """An engine that calls an op needs neither its truth nor its samples."""
    code = "zero = torch.zeros(3).long(); hal.get_last_loc(torch.zeros(4, 8).int(), zero, zero, backend='reference')"
    got = modules(f"import torch, hal; {code}; hal.bind('cpu', backend='reference').kv_move")
    assert "hal.ops.kv_move" in got
    assert not {n for n in got if n.startswith("hal.ops.proofs")}


def test_info_imports_no_kernel() -> None:
    """Kernels are imported when bound, not when listed."""
    got = modules("import hal; hal.info()")
    assert not {n for n in got if n.startswith("hal.backends.") and n.rpartition(".")[2] in BUILTIN}
    assert not top(got) & {"transformers", "pytest", "hypothesis", "typer"}


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'hal' has no attribute 'rope'"):
        _ = hal.rope
    assert dir(hal) == sorted(hal.__all__)
    assert all(getattr(hal, n) is not None for n in hal.__all__)


def test_pytest_plugin_declares_options_alone() -> None:
    """Another's pytest run loads our plugin too, by its entry point: it must not pay for torch."""
    got = modules("import hal.conformance.pytest_plugin")
    assert not top(got) & {"torch", "triton", "numba", "transformers", "numpy", "hypothesis"}


CALL = "import torch; t = torch.ones(1, 2, dtype=torch.int32); hal.get_last_loc(t, t[0], t[0], backend='reference')"


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "import torch"],
        ["-c", f"import hal; {CALL}"],
        ["-m", "hal", "info"],
        ["-m", "hal", "doctor", "--backend", "reference", "--op", "get_last_loc"],
        ["-m", "hal", "explain", "get_last_loc"],
    ],
    ids=["torch alone", "op", "info", "doctor", "explain"],
)
def test_an_absent_numpy_is_not_warned_of(arguments: list[str], tmp_path: Path) -> None:
    """The base install has none; torch says so on being imported, but for hal."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    ran = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ("Failed to initialize NumPy" in ran.stderr) == (arguments[-1] == "import torch"), ran.stderr


def test_a_subinterpreter_is_refused() -> None:
    script = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
other = interpreters.create()
told = []
for text in ("import hal", "import hal.kv.pool", "from hal.registry import Backend"):
    try:
        failed = interpreters.run_string(other, text)
        told.append("" if failed is None else str(failed.formatted))
    except Exception as e:
        told.append(str(e))
import hal
assert all("hal: this is a subinterpreter" in t and "main interpreter" in t for t in told), told
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
