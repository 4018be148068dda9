"""Where the tools of the lowered lane are, and what to install where they are not."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

from hal import _env
from hal.lowered.errors import ToolchainError

NEEDED = {
    "triton-ascend": "3.2.0",
    "pybind11": None,  # triton-ascend imports it and does not say so
    "ascendnpu-ir": "1.2.0",
    "llvmlite": None,
}
"""Distribution -> the version that the lane was proven with (None: any)."""

INSTALL = (
    "in a virtual environment of its own: pip install torch (the CPU build), then "
    "pip install triton-ascend==3.2.0 pybind11 ascendnpu-ir==1.2.0 llvmlite 'numpy<2.4'"
)

NO_C_COMPILER = "there is no C compiler for the lane's runtime; install gcc or clang, or name one in CC"


def missing() -> str | None:
    """Why kernels can't be lowered here, with the remedy; None if they can."""
    for name, want in NEEDED.items():
        try:
            have = metadata.version(name)
        except metadata.PackageNotFoundError:
            return f"{name} is not installed; {INSTALL}"
        if want is not None and have != want:
            return f"{name} {have} is installed, the lane is proven with {want}; {INSTALL}"
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return f"triton-ascend is installed but the package triton is not importable; {INSTALL}"
    if not (Path(spec.origin).parent / "backends" / "ascend").is_dir():
        return f"the folder of the package triton belongs to triton, which overwrote triton-ascend; {INSTALL}"
    if c_compiler() is None:
        return NO_C_COMPILER
    return None


def c_compiler() -> str | None:
    """``$CC``, else gcc or clang, as Triton looks for one."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


@functools.lru_cache(maxsize=1)
def require() -> None:
    """Raises `ToolchainError` where `missing` has something to say."""
    why = missing()
    if why is not None:
        raise ToolchainError(f"hal: the lowered lane can't run: {why}")


@functools.lru_cache(maxsize=8)
def bishengir(name: str) -> Path:
    """The path of ``bishengir-opt``, ``bishengir-compile`` or one of their ``-a5`` forms."""
    require()
    spec = importlib.util.find_spec("ascendnpuir")
    if spec is None or spec.origin is None:
        raise ToolchainError("hal: the package ascendnpuir is not importable")
    path = Path(spec.origin).parent / "bin" / name
    if not path.is_file():
        raise ToolchainError(f"hal: ascendnpu-ir has no {name} at {path}")
    return path


@functools.lru_cache(maxsize=1)
def fingerprint() -> str:
    """Changes whenever a tool does: part of every key of the cache on disk."""
    require()
    parts = [f"{n} {metadata.version(n)}" for n in ("triton-ascend", "ascendnpu-ir")]
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    lib = Path(spec.origin).parent
    for tool in (lib / "_C" / "libtriton.so", lib / "backends/ascend/triton-adapter-opt", bishengir("bishengir-opt")):
        stat = tool.stat()
        parts.append(f"{tool.name} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def cache_dir() -> Path:
    """``lowered`` in the folder that ``HAL_CACHE_DIR`` names."""
    return Path(_env.cache_dir(), "lowered")


def keep(path: Path, what: bytes) -> None:
    """Write a file of the cache. Another process may write it now; each replaces it whole. A full disk is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, temp = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(fd, "wb") as f:
            f.write(what)
        os.replace(temp, path)
