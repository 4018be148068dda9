"""The C of launches and keys without a warning; the tests of launches under the address and UB sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.knobs", reason="the helper serves the Triton which has `knobs`")

ROOT = Path(__file__).resolve().parents[2]
GCC = shutil.which("gcc")

if os.environ.get("TRITON_INTERPRET") == "1" or os.environ.get("HAL_LANE"):
    pytest.skip("tests the device lane's launcher", allow_module_level=True)
if GCC is None:
    pytest.skip("no gcc", allow_module_level=True)


@pytest.mark.parametrize("level", ["-O0", "-O2", "-O3"])
def test_it_compiles_without_a_warning(tmp_path: Path, level: str) -> None:
    flags = "-std=gnu11 -shared -fPIC -Wall -Wextra -Werror -Wshadow -Wconversion -Wno-sign-conversion".split()
    files = [f"-I{sysconfig.get_path('include')}", str(ROOT / "hal/ops/_call.c"), "-o", str(tmp_path / "it.so")]
    done = subprocess.run([str(GCC), *flags, level, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_its_tests_pass_under_the_sanitizers(tmp_path: Path) -> None:
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no DLPack exchange interface")
    libraries = [
        subprocess.run([str(GCC), f"-print-file-name={n}"], capture_output=True, text=True, check=True).stdout.strip()
        for n in ("libasan.so", "libubsan.so")
    ]
    if not all(os.path.isabs(x) for x in libraries):
        pytest.skip("gcc has no sanitizers here")
    # What it covers is covered without the sanitizers, at a fraction of the time.
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")},
        "CC": f"{GCC} -g -fsanitize=address,undefined -fno-sanitize-recover=all",
        "HAL_CACHE_DIR": str(tmp_path),
        "LD_PRELOAD": ":".join(libraries),
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    names = ("launch_native", "launch_learns", "plans", "plan_graphs", "call")
    tests = [f"tests/launch/test_{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert [*tmp_path.glob("hal_call-*.so")]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
