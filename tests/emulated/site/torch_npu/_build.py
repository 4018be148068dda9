"""``device.cpp`` as a library: compiled once for each state of the source and of torch, kept in hal's cache folder."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])


@functools.cache
def library() -> ctypes.CDLL:
    """The library, loaded.

    Raises:
        ImportError: there is no C++ compiler, or it refused the source.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise ImportError("the emulated torch_npu needs a C++ compiler: install g++ or clang++, or name one in CXX")
    home = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    flags = [
        "-O0",
        "-std=c++20",
        "-shared",
        "-fPIC",
        abi,
        f"-I{home}/include",
        f"-I{home}/include/torch/csrc/api/include",
    ]
    link = [f"-L{home}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home}/lib"]
    command = [compiler, *flags, str(HERE / "device.cpp"), *link]
    key = hashlib.sha256(repr((command, torch.__version__, [p.read_bytes() for p in SOURCES])).encode()).hexdigest()
    folder = Path(os.environ.get("HAL_CACHE_DIR") or Path.home() / ".cache" / "hal") / "emulated"
    path = folder / f"{key}.so"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            built = Path(work, "device.so")
            ran = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True, check=False)
            if ran.returncode:
                raise ImportError(f"the emulated torch_npu: {compiler} failed:\n{ran.stderr}")
            built.replace(path)
    return ctypes.CDLL(str(path))
