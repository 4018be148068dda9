"""No index value makes a kernel touch what lies outside its tensors: guard pages, in a child that may die."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

CHILD = """
import sys
from cpu.cases import guarded_args, judge, make, ours, samples
side, threads = sys.argv[1] == "right", sys.argv[2]
import torch
torch.set_num_threads(1 if threads == "one" else 2)
import hal.backends.cpu._pool as pool
if threads != "one":
    pool.SHARE = pool.WAKE = pool.GRAIN = 64  # so that small samples are shared out as well
if threads == "ours":
    pool.openmp = 0
for op, sample in samples():
    print(op, sample, flush=True)  # the last line names the culprit
    keep = []
    judge(op, lambda a: ours(op)(**a), lambda: guarded_args(op, make(op, sample), side, keep))
print("all alive")
"""

CONTROL = """
import sys, torch
from cpu.cases import guarded, ours
keep, right = [], sys.argv[1] == "right"
table = guarded(torch.zeros(4, 1024, dtype=torch.int32), right, True, keep)
lens = torch.tensor([1])
ours("get_last_loc")(table, torch.tensor([3 if right else 0]), lens)
print("alive", flush=True)
# The same kernel, told of a table with one row more after, or before, what the guarded one has.
from hal.backends.cpu.get_last_loc import kernel
index, out = torch.tensor([4 if right else 0]), torch.zeros(1, dtype=torch.int64)
start = table.data_ptr() - (0 if right else 4096)
kernel("i64", "i64")(1, start, 5, 1024, 1024, index.data_ptr(), lens.data_ptr(), out.data_ptr())
print("not killed")
"""


def _child(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    import os
    from pathlib import Path

    import hal

    roots = [str(Path(__file__).parents[1]), str(Path(hal.__file__).parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(roots)}
    return subprocess.run(
        [sys.executable, "-c", script, *args],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=env,
    )


@pytest.mark.parametrize("threads", ["one", "torch's", "ours"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_all_samples_between_guard_pages(side: str, threads: str) -> None:
    done = _child(CHILD, side, threads)
    assert done.returncode == 0, (done.stdout.splitlines()[-1:], done.stderr[-2000:])
    assert done.stdout.endswith("all alive\n")


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_guard_kills(side: str) -> None:
    done = _child(CONTROL, side)
    assert done.stdout == "alive\n", done.stderr[-2000:]
    assert done.returncode == -signal.SIGSEGV
