"""Two processes that share a cache folder and begin together: what each compiles, loads and measures is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="the CPU backend's compiler")

SCRIPT = '''
import gc, json, sys
import torch
import hal
from hal import tune
from hal.backends.cpu import _jit

print("ready", flush=True)
sys.stdin.readline()  # until the other is ready too
g = torch.Generator().manual_seed(0)
k, v = (torch.randn(2, 32, 2, 16, generator=g, dtype=torch.float32, device="cpu") for _ in range(2))
slots = torch.randperm(32, generator=g)[:20]


def run(backend):
    """What the ops of a step make, on one backend."""
    pool = hal.KVPool(k.clone(), v.clone())
    host = hal.KVPool.host_like(pool, slots=32, layout="page_head", page_size=4)
    host.k.zero_(), host.v.zero_()
    hal.kv_transfer(pool, host, slots, slots.flip(0), backend=backend)
    new = torch.ones(3, 2, 16, dtype=torch.float32, device="cpu")
    hal.kv_write(new, -new, pool.k[0], pool.v[0], torch.tensor([1, 5, -1]), backend=backend)
    table = torch.arange(24, dtype=torch.int32, device="cpu").view(2, 12)
    kv_indptr = torch.zeros(3, dtype=torch.int32, device="cpu")
    kv_indices = torch.zeros(16, dtype=torch.int32, device="cpu")
    hal.build_kv_indices(table, torch.tensor([1, 0]), torch.tensor([9, 7]), kv_indptr, kv_indices, backend=backend)
    out = hal.decode_attention(new[:2], pool.k[0], pool.v[0], kv_indptr, kv_indices, scale=0.25, backend=backend)
    return [host.k, host.v, pool.k, pool.v, kv_indptr, kv_indices], out


(exact, near), (exact_wanted, near_wanted) = run("cpu"), run("reference")
torch.testing.assert_close(near, near_wanted)
# The cost table of a device, as `hal tune` writes it and a backend reads it.
torch.cuda.get_device_name, torch.cuda.is_available = lambda device: "stand-in", lambda: True
me = sys.argv[1]
tune.save("kv_transfer", 0, [me] * 999)
tables = []
for _ in range(300):
    tables.append(tune.load("kv_transfer", 0))
    tune.save("kv_transfer", 0, [me] * 999)
print(json.dumps({
    "equal": [torch.equal(a, b) for a, b in zip(exact, exact_wanted, strict=True)],
    "tables": sorted({"".join(sorted(set(t))) if t and len(t) == 999 else repr(t)[:80] for t in tables}),
    "compiled": sum(sum(k._dispatcher.stats.cache_misses.values())
                    for k in gc.get_objects() if isinstance(k, _jit.Kernel) and k._dispatcher),
}))
'''

LAUNCHER = """
import sys
from hal.ops import _native

print("ready", flush=True)
sys.stdin.readline()
module = _native.module()
print(module.__file__, callable(module.setup))
"""


def start(code: str, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("HAL_")},
        "HAL_CACHE_DIR": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def together(code: str, folder: Path, names: str) -> list[str]:
    """The last line that each of the processes printed; they begin when all of them are there."""
    processes = [start(code, folder, name) for name in names]
    try:
        for p in processes:
            assert p.stdout is not None
            assert p.stdout.readline() == "ready\n", p.communicate(timeout=600)[1][-4000:]
        for p in processes:
            assert p.stdin is not None
            p.stdin.write("\n")
            p.stdin.flush()
        said = [p.communicate(timeout=600) for p in processes]
    finally:
        for p in processes:
            p.kill()
    for p, (_, err) in zip(processes, said, strict=True):
        assert not p.returncode, err[-4000:]
    return [out.splitlines()[-1] for out, _ in said]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def first(folder: Path) -> list[dict[str, Any]]:
    """What two processes said who found the folder empty."""
    return [json.loads(line) for line in together(SCRIPT, folder, "ab")]


def test_both_compile_or_load_what_is_right(first: list[dict[str, Any]], folder: Path) -> None:
    for said in first:
        assert said["equal"] == [True] * 6
    assert list(folder.rglob("*.nbc"))
    # Whatever one of them compiled, the other need not.
    (third,) = (json.loads(line) for line in together(SCRIPT, folder, "c"))
    assert third["equal"] == [True] * 6
    assert third["compiled"] == 0
    assert sum(said["compiled"] for said in first) > 0


def test_a_cost_table_is_always_one_that_somebody_wrote(first: list[dict[str, Any]]) -> None:
    seen = set().union(*(said["tables"] for said in first))
    assert seen
    assert seen <= {"a", "b"}


def test_the_launcher_is_built_once_for_both(tmp_path: Path) -> None:
    a, b = together(LAUNCHER, tmp_path, "ab")
    assert a == b
    assert a.endswith("True")
    assert Path(a.split()[0]).is_relative_to(tmp_path)
