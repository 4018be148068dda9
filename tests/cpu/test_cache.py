"""Compiled code on disk: used by the next process, and never when its sources have changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import filelock
import pytest

SCRIPT = """
import torch, numba
from hal.backends.cpu import _jit
from hal.backends.cpu.get_last_loc import get_last_loc, kernel
table = torch.tensor([[7, 8]], dtype=torch.int32)
assert get_last_loc(table, torch.tensor([0]), torch.tensor([2])).tolist() == [8]
stats = kernel._dispatcher.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()), repr(numba.config.CACHE_DIR), _jit.cache_dir())
"""


def _run(cache: Path, **env: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, "HAL_CACHE_DIR": str(cache), **env},
    )  # fmt: skip
    return done.stdout.split()


def test_the_second_process_compiles_nothing(tmp_path: Path) -> None:
    assert _run(tmp_path)[:2] == ["0", "1"]
    assert _run(tmp_path)[:2] == ["1", "0"]
    assert list(tmp_path.rglob("*.nbc"))


def test_the_engines_own_cache_of_numba_is_left_alone(tmp_path: Path) -> None:
    own = tmp_path / "own"
    out = _run(tmp_path / "ours", NUMBA_CACHE_DIR=str(own))
    assert out[2] == repr(str(own))
    assert not own.exists()
    assert _run(tmp_path / "ours")[2] == "''"


def test_an_unwritable_folder_costs_the_cache_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert _run(tmp_path / "file")[:2] == ["0", "1"]
    assert (tmp_path / "file").is_file()


def test_one_process_compiles_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.backends.cpu import _jit

    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_jit._env, "cache_dir", lambda: str(tmp_path))
    kernel = _jit.Kernel(_add_one, "i64 int")
    folder = _jit.cache_dir()
    folder.mkdir(parents=True)
    worker = threading.Thread(target=kernel, daemon=True)
    with filelock.FileLock(folder / "lock"):
        worker.start()
        worker.join(1)
        assert worker.is_alive()
        assert not list(tmp_path.rglob("*.nbc"))
    worker.join(60)
    assert list(tmp_path.rglob("*.nbc"))


def _add_one(counter, n):  # type: ignore[no-untyped-def]
    n + 1


def test_other_sources_other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.backends.cpu import _jit

    before = _jit.cache_dir()
    copy = tmp_path / "cpu"
    shutil.copytree(Path(_jit.__file__).parent, copy)
    monkeypatch.setattr(_jit, "__file__", str(copy / "_jit.py"))
    assert _jit.cache_dir() == before
    with (copy / "_bits.py").open("a") as f:
        f.write("# changed\n")
    assert _jit.cache_dir() != before
