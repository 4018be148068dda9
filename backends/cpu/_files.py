"""The folder of compiled code: whose it is, what lies in it, and what happens where it can't be used.

Compiled code is a pickle and machine code: whoever can write the folder runs code in every process that reads it. So
the folder must be the user's alone, as ssh asks of its own. A file begins with the digest of the rest, so that one that
a crash, a full disk or somebody else left is made anew instead of read. Each has a name of its own and appears
whole: no two processes that write at once can give one file two meanings. A folder that can't be used costs the cache
alone, and one warning: code is then compiled in every process.
"""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock
from numba.core.serialize import dumps

WAIT = 60.0
"""Seconds to wait for another process that compiles; the longest kernel takes a fifth of that."""

_said: set[str] = set()


def warn(text: str) -> None:
    """Once a process for each text."""
    if text not in _said:
        _said.add(text)
        warnings.warn(f"hal: cpu: {text}", RuntimeWarning, stacklevel=2)


def unsafe(folder: Path) -> str | None:
    """None, or who else can write to `folder`, resolved, or put another one in its place; it need not exist yet.

    A folder in which everybody may make files but nobody rename others' (the sticky bit of ``/tmp``) is good enough for
    what lies in it, not for the files themselves.
    """
    if not hasattr(os, "getuid"):
        return None
    me = os.getuid()
    for place in (folder, *folder.parents):
        try:
            found = place.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as e:
            return f"{place} can't be looked at: {e}"
        if found.st_uid not in (0, me):
            return f"{place} belongs to uid {found.st_uid}, not to you (uid {me}) or root"
        sticky = place != folder and found.st_mode & stat.S_ISVTX
        others = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _private(found.st_gid, me))
        if others and not sticky:
            return f"{place} can be written by others (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def _private(gid: int, uid: int) -> bool:
    """Is it the group that has the user's name, and no one else in it?"""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(uid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and user.pw_gid == gid and set(group.gr_mem) <= {user.pw_name}


def usable(folder: Path) -> bool:
    """Makes the folder, for the user alone. False: code is not kept, and it has been said why."""
    why = unsafe(folder)
    if why is None:
        try:
            _make(folder)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as e:
            # Nothing is wrong with a read-only file system.
            if not isinstance(e, PermissionError | FileExistsError | NotADirectoryError) and e.errno != errno.EROFS:
                warn(f"compiled code can't be kept in {folder} ({e}); every process compiles anew")
            return False
        why = unsafe(folder)
    if why is not None:
        warn(
            f"compiled code is neither read from nor kept in {folder}: {why}. Every process compiles anew. Take the "
            "right to write from all others (chmod go-w), or name a folder of your own in HAL_CACHE_DIR"
        )
    return why is None


def _make(folder: Path) -> None:
    if not folder.is_dir():
        if not folder.parent.is_dir():
            _make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


class Files:
    """Stands in for numba's own index and files of one function's compiled code (`IndexDataCacheFile`)."""

    def __init__(self, folder: Path, name: str, stamp: Any) -> None:
        self.folder, self.name, self.stamp = folder, name, stamp

    def path(self, key: Any) -> Path:
        return self.folder / f"{self.name}-{hashlib.sha256(repr((self.stamp, key)).encode()).hexdigest()[:32]}.nbc"

    def load(self, key: Any) -> Any:
        """What was saved under `key`; None where nothing was, or what is there is not it."""
        try:
            raw = self.path(key).read_bytes()
        except OSError:
            return None
        digest, data = raw[:32], raw[32:]
        if hashlib.sha256(data).digest() != digest:
            return None  # it will be replaced
        with suppress(Exception):  # made by what has another version by now
            return pickle.loads(data)
        return None

    def save(self, key: Any, data: Any) -> None:
        try:
            raw = dumps(data)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
            try:
                with open(handle, "wb") as file:
                    file.write(hashlib.sha256(raw).digest() + raw)
                os.replace(name, self.path(key))
            except BaseException:
                with suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as e:
            warn(f"compiled code can't be kept in {self.folder} ({e}); every process compiles anew")

    def flush(self) -> None:
        """Nothing is kept in memory."""


_patience = True


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other process compiles meanwhile, so that a second one finds compiled what it needs.

    Without it all is right as well, but done twice: so a process that holds it for long, stopped or hung, is not waited
    for, and in this process never again.
    """
    global _patience
    lock = filelock.FileLock(folder / "lock", timeout=WAIT if _patience else 0)
    held = False
    try:
        lock.acquire()
        held = True
    except filelock.Timeout:
        if _patience:
            warn(
                f"another process has held {folder / 'lock'} for {WAIT:.0f} s: it is stopped or hangs. Compiling "
                "without waiting for it; end it, or name another folder in HAL_CACHE_DIR"
            )
        _patience = False
    except (OSError, NotImplementedError):  # a file system without locks
        pass
    try:
        yield
    finally:
        if held:
            lock.release()
