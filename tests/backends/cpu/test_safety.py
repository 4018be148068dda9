"""No index value makes a kernel touch what lies outside its tensors: guard pages, in a child that may die."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cpu.cases import OPS

CHILD = """
import os, sys
from cpu.cases import judge
from hal.ops import get_spec
side, threads, ops = sys.argv[1], sys.argv[2], sys.argv[3:]
turn = slice(None) if os.environ.get("CI_ALL") else slice(4 * (threads == "ours"), None, 8)
import torch
torch.set_num_threads(2)
import hal.backends.cpu._pool as pool
pool.SHARE = pool.WAKE = pool.GRAIN = 64  # so that small samples are shared out as well
if threads == "ours":
    pool.openmp = 0
for op in ops:
    for sample in get_spec(op).samples[turn]:
        if not sample.large:
            print(op, sample.name, flush=True)  # the last line names the culprit
            judge(op, side, **sample.params)
print("all alive")
"""


def _child(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    import os
    from pathlib import Path

    import hal

    roots = [str(Path(__file__).parents[1]), str(Path(hal.__file__).parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(roots)}
    return subprocess.run(
        [sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=600, check=False, env=env
    )


@pytest.mark.parametrize(("side", "threads"), [("start", "torch's"), ("end", "ours")])
def test_all_samples_between_guard_pages(side: str, threads: str) -> None:
    """Shared out to threads, which only large calls are otherwise: what runs on one, the suite's proof `pages` has."""
    done = _child(CHILD, side, threads, *OPS, "decode_attention", "extend_attention")
    assert done.returncode == 0, (done.stdout.splitlines()[-1:], done.stderr[-2000:])
    assert "extend_attention " in done.stdout
    assert done.stdout.endswith("all alive\n")
