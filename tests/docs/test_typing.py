"""What a type checker knows of hal: each op's signature, dispatched and bound, and which names there are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hal

ROOT = Path(hal.__file__).parents[1]
SNIPPET = """
import torch, hal
t = torch.zeros(1)
ops, compiled = hal.bind("cpu"), hal.torch_ops()
reveal_type(ops.get_last_loc)           # note: indices: Tensor, prefix_lens: Tensor) -> Tensor
reveal_type(hal.get_last_loc)           # note: prefix_lens: Tensor, *, backend: str | None =) -> Tensor
reveal_type(ops.kv_move)                # note: workspace: Tensor, *, layers: range | None =)
reveal_type(compiled.build_page_table)  # note: out: Tensor, *, backend: str | None =) -> Tensor
ops.get_last_loc(t, t, t)
hal.nosuch                              # error: has no attribute "nosuch"
ops.nosuch                              # error: "Bound" has no attribute "nosuch"
ops.get_last_loc(t, t, 3)               # error: Argument 3 to "get_last_loc" of "Ops" has incompatible type "int"
ops.get_last_loc(t, t)                  # error: Missing positional argument "prefix_lens"
ops.get_last_loc(t, t, t, backend="x")  # error: Unexpected keyword argument "backend"
hal.bind("cpu", checks="ful")           # error: expected "Literal['off', 'args', 'full']"
hal.get_last_loc(t, t, t, backend=3)    # error: expected "str | None"
"""


def test_mypy_knows_every_signature(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("no checkout: its mypy settings and cache are not here")
    file = tmp_path / "snippet.py"
    file.write_text(SNIPPET)
    # From the root, with its settings: what `mypy` has just checked there is not checked again.
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(file)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=6000, check=False)
    told: dict[int, str] = {}
    for line in ran.stdout.splitlines():
        at = re.match(r".*?snippet\.py:(\d+): (.*)", line)
        if at:
            told.setdefault(int(at[1]), at[2].replace("torch._tensor.Tensor", "Tensor"))
    wanted = {i: line.partition("  # ")[2] for i, line in enumerate(SNIPPET.splitlines(), 1) if "  # " in line}
    assert set(told) == set(wanted), ran.stdout + ran.stderr
    for i, text in wanted.items():
        kind, _, what = text.partition(": ")
        assert told[i].startswith(kind), told[i]
        assert what in told[i]


def test_the_installed_package_is_found_by_its_path(tmp_path: Path) -> None:
    """A type checker reads ``sys.path`` and runs no import hook: an editable install must not need one."""
    code = "from importlib.machinery import PathFinder as p; print(p.find_spec('hal').origin)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False
    )
    assert ran.returncode == 0, f"hal is on no path: {ran.stderr}"
    found = Path(ran.stdout.strip()).parent
    assert found.samefile(Path(hal.__file__).parent)
    assert (found / "py.typed").exists()
    assert (found / "_bound.pyi").exists()
