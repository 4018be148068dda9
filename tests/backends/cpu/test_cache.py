"""Compiled code on disk: used by the next process, and never when its sources have changed."""

from __future__ import annotations

import hashlib
import os
import pickle
import resource
import shutil
import subprocess
import sys
import threading
import warnings
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any

import filelock
import pytest

from hal.backends.cpu._bits import store

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
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
        env={**os.environ, "HAL_CACHE_DIR": str(cache), **env},
    )
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
    worker.join(600)
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


DAMAGE = {
    "empty": lambda raw: b"",
    "garbage": lambda raw: bytes(range(256)) * 9,
    "cut": lambda raw: raw[: len(raw) // 2],
    "one bit": lambda raw: raw[:-200] + bytes([raw[-200] ^ 1]) + raw[-199:],
    "another's": lambda raw: pickle.dumps(42),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where compiled code lies now; as in a process that has warned of nothing yet."""
    from hal.backends.cpu import _files, _jit

    monkeypatch.setattr(_jit._env, "cache_dir", lambda: str(tmp_path))
    monkeypatch.setattr(_jit, "_folders", {})
    monkeypatch.setattr(_files, "_said", set())
    monkeypatch.setattr(_files, "_patience", True)
    return _jit.cache_dir()


def _compile(*types: str) -> tuple[int, int, list[str]]:
    """(loaded from the cache, compiled, what was warned of) by kernels as a process makes them that has none yet."""
    from hal.backends.cpu import _jit

    hits = misses = 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for words in types or ("i64 int",):
            kernel = _jit.Kernel(_store_one, words)
            out = array("q", [0])
            kernel()(out.buffer_info()[0], 41)
            assert out[0] == 42
            stats = kernel._dispatcher.stats
            hits, misses = hits + sum(stats.cache_hits.values()), misses + sum(stats.cache_misses.values())
    return hits, misses, [str(w.message) for w in told]


def _store_one(out, n):  # type: ignore[no-untyped-def]
    store(out, 0, n + 1)


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_made_anew(folder: Path, how: str) -> None:
    assert _compile() == (0, 1, [])
    (file,) = folder.rglob("*.nbc")
    file.write_bytes(DAMAGE[how](file.read_bytes()))
    assert _compile() == (0, 1, [])
    assert _compile() == (1, 0, [])


def test_a_full_disk_costs_the_cache_alone(folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A file that would grow past the limit is refused like one on a disk that is full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        *_found, told = _compile("i64 int", "i32 int")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(told) == 1
    assert "can't be kept" in told[0]
    assert not [p for p in folder.rglob("*") if p.suffix in (".nbc", ".tmp")]


def test_a_stopped_process_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.backends.cpu import _files

    monkeypatch.setattr(_files, "WAIT", 0.5)
    folder.mkdir(parents=True)
    hold = "import filelock, os, sys; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); os.kill(os.getpid(), 19)"
    holder = subprocess.Popen([sys.executable, "-c", hold, str(folder / "lock")])
    try:
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED)
        *found, told = _compile("i64 int", "i32 int")
    finally:
        holder.kill()
        holder.wait()
    assert found == [0, 2]
    assert len(told) == 1
    assert f"has held {folder / 'lock'}" in told[0]


class _Planted:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("where", ["the folder", "a parent"])
def test_what_others_can_write_is_not_run(
    folder: Path, where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from hal.backends.cpu import _jit

    mark = tmp_path / "run"
    assert _compile() == (0, 1, [])
    (file,) = folder.rglob("*.nbc")
    data = pickle.dumps(_Planted(mark))
    file.write_bytes(hashlib.sha256(data).digest() + data)
    place = folder if where == "the folder" else folder.parent
    place.chmod(0o777)
    monkeypatch.setattr(_jit, "_folders", {})
    *_found, (told,) = _compile("i64 int", "i32 int")
    assert f"{place} can be written by others (mode 0777)" in told
    assert "chmod go-w" in told
    assert not mark.exists()
    place.chmod(0o755)
    monkeypatch.setattr(_jit, "_folders", {})
    with suppress(TypeError):  # what it stands for is no code
        _compile()
    assert mark.exists()  # else this would show nothing


def test_whose_a_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.backends.cpu import _files

    folder = (tmp_path / "a" / "b").resolve()
    assert _files.usable(folder)
    assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
    folder.parent.chmod(0o1777)  # like /tmp: nobody can rename what is another's
    assert _files.unsafe(folder) is None
    folder.chmod(0o1777)
    assert "can be written by others" in (_files.unsafe(folder) or "")
    folder.chmod(0o770)
    monkeypatch.setattr(_files, "_private", lambda gid, uid: True)
    assert _files.unsafe(folder) is None
    monkeypatch.setattr(_files, "_private", lambda gid, uid: False)
    assert "mode 0770" in (_files.unsafe(folder) or "")
    folder.chmod(0o700)
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    if mine:  # what is root's is trusted
        assert f"belongs to uid {mine}" in (_files.unsafe(folder) or "")
    else:
        os.chown(folder, 4321, -1)
        assert "belongs to uid 4321" in (_files.unsafe(folder) or "")


def test_the_users_own_group() -> None:
    import grp
    import pwd

    from hal.backends.cpu._files import _private

    user = pwd.getpwuid(os.getuid())
    own = grp.getgrgid(user.pw_gid)
    assert _private(user.pw_gid, os.getuid()) == (own.gr_name == user.pw_name and set(own.gr_mem) <= {user.pw_name})
    others = [g.gr_gid for g in grp.getgrall() if g.gr_name != user.pw_name]
    assert others
    assert not any(_private(g, os.getuid()) for g in others)
    assert not _private(2**31 - 7, os.getuid())


def test_a_relative_xdg_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hal import _env

    monkeypatch.delenv("HAL_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("cache", "./cache", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert _env.cache_dir() == str(tmp_path / ".cache" / "hal-kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert _env.cache_dir() == str(tmp_path / "x" / "hal-kernels")
