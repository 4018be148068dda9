"""Attention in a forked child, where torch's threads are gone: it ends, is right, and says why it is slow."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, warnings
import torch, hal
from hal.ops import get_spec
torch.set_num_threads(2)
torch.ones(512, 512) @ torch.ones(512, 512)
torch.ones(1 << 20).mul_(2)  # torch's threads exist now
op = sys.argv[1]
# Heads that torch computes.
shape = dict(head_dim=72, bs=2) if op == "decode_attention" else dict(head_dim=72, bs=1, longest=400, prefix=0)
args = get_spec(op).make(dtype="fp32", q_heads=4, kv_heads=2, lengths="full", **{"longest": 400, **shape}, slots=2000)
run = lambda: getattr(hal, op)(**args, backend="cpu")
right = run().clone()
pid = os.fork()
if not pid:
    signal.alarm(600)  # ends a child that waits for ever
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        same, threads = [], []
        for _ in range(2):
            found = run()
            threads.append(torch.get_num_threads())
            torch.set_num_threads(1)  # for the comparison, which would wait as well
            same.append(torch.allclose(found, right, atol=1e-5, equal_nan=True))
            torch.set_num_threads(2)
    said = [str(w.message) for w in told]
    ok = all(same) and len(said) == 1 and "do not survive a fork" in said[0] and threads == [2, 2]
    if not ok:
        print(same, said, threads, file=sys.stderr, flush=True)
    os._exit(0 if ok else 3)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert torch.equal(run(), right) or torch.allclose(run(), right, equal_nan=True)
sys.exit(status if status >= 0 else 100 - status)
"""


@pytest.mark.parametrize("op", ["decode_attention", "extend_attention"])
def test_attention_after_a_fork(op: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, op],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
