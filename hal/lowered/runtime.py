"""What a kernel of the lowered lane calls, in C (``runtime.c``): compiled once, kept on disk, given to LLVM by name."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hal.lowered import toolchain
from hal.lowered.errors import ToolchainError

ARGUMENT_SHIFT = 48
HANDLE = 1 << 62 | 1 << 40
"""A pointer argument's first byte, but for the argument's number, as a kernel gets it; see ``runtime.c``."""

# Values of State.error.
BOUNDS, RACE, WILD, MEMORY, STRAY = 1, 2, 3, 4, 5
# Bits of an access.
WRITE, COPY = 1, 2

MAX_DIMS, MAX_ARGUMENTS = 4, 64
BLOCK, LINE = 1024, 64
"""Bytes that the trace keeps one entry for."""
ENTRY, BYTEWISE = 32, 8 * LINE
"""Bytes of an entry, and of what stands for a line's where programs share it."""
CALLS = ("hal_alloc", "hal_check", "hal_copy", "hal_free", "hal_memcpy", "hal_memset", "hal_stray")
_FLAGS = ("-O3", "-shared", "-fPIC")


class Dim(ctypes.Structure):
    _fields_ = (("size", ctypes.c_int64), ("stride", ctypes.c_int64))


class Argument(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("base", "extent", "shared", "dims", "inner")),
        ("dim", Dim * MAX_DIMS),
        ("first", ctypes.c_int64),
        *((name, ctypes.c_int64 * 4) for name in ("count", "bytes")),
        ("copies", ctypes.c_int64 * 2),
    )


_WORDS = (
    "program",
    "error",
    "error_argument",
    "error_offset",
    "error_size",
    "error_access",
    "error_program",
    "error_other",
    "arena",
    "arena_next",
    "arena_end",
    "sink",
    "constants",
    "traced",
    "arguments",
    "blocks",
    "lines",
    "bytewise",
    "bytewise_used",
    "launch",
)


class State(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in _WORDS),
        ("free", ctypes.c_int64 * 48),
        ("argument", Argument * MAX_ARGUMENTS),
        ("stop", ctypes.c_void_p),
    )


@functools.lru_cache(maxsize=1)
def load() -> Any:
    """The runtime's ``hal_run``; kernels that LLVM links from now on find the rest.

    Raises:
        ToolchainError: there is no C compiler, or it refused the source.
    """
    import llvmlite.binding as llvm

    library = _library()
    for name in CALLS:
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    run = library.hal_run
    run.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int32] * 3
    run.restype = None
    return run


def _library() -> ctypes.CDLL:
    source = Path(__file__).with_name("runtime.c")
    text = source.read_bytes() + source.with_name("trace.c").read_bytes()
    compiler = toolchain.c_compiler()
    if compiler is None:
        raise ToolchainError(f"hal: the lowered lane can't run: {toolchain.NO_C_COMPILER}")
    key = hashlib.sha256(repr((compiler, _FLAGS)).encode() + text).hexdigest()
    path = toolchain.cache_dir() / key[:2] / f"{key}.so"
    if path.is_file():
        return ctypes.CDLL(str(path))
    with tempfile.TemporaryDirectory(prefix="hal-runtime-") as folder:
        built = Path(folder, "runtime.so")
        ran = subprocess.run(
            [compiler, *_FLAGS, str(source), "-o", str(built)], capture_output=True, text=True, check=False
        )
        if ran.returncode:
            raise ToolchainError(f"hal: the lowered lane can't run: {compiler} failed:\n{ran.stderr}")
        toolchain.keep(path, built.read_bytes())
        return ctypes.CDLL(str(built))
