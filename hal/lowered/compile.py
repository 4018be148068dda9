"""Compiles a lowered kernel on, as the device's compiler does: fusion, buffer planning, synchronisation.

Without CANN, `bishengir-compile` gets as far as calling ``hivmc``, which makes the binary. A stand-in on
PATH takes the module that hivmc would have got, so that its buffers can be read. Where CANN's hivmc is
installed the stand-in keeps the module and calls it, and the binary is made.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from hal.lowered import toolchain

TARGETS = {
    "Ascend910B3": "bishengir-compile",
    "Ascend910_9391": "bishengir-compile",
    "Ascend950PR_9579": "bishengir-compile-a5",
}
"""One of each generation (A2, A3, A5) -> its compiler."""

_OPTIONS = (
    "--enable-auto-multi-buffer=true",
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
)

_STAND_IN = """#!/bin/sh
for a in "$@"; do case "$a" in *.mlir) cp "$a" "{keep}";; esac; done
{then}
"""

_BITS = {"i1": 8, "i8": 8, "i16": 16, "f16": 16, "bf16": 16, "i32": 32, "f32": 32, "i64": 64, "f64": 64}
_CONSTANT = re.compile(r"(%[\w-]+) = (?:arith|llvm\.mlir)\.constant\(?\s*(-?\d+) : (?:i64|index)")
_CAST = re.compile(
    r"hivm\.hir\.pointer_cast\(([^)]*)\)(?: \[[^\]]*\])? : memref<([^,>]*)([^#]*)#hivm\.address_space<ub>"
)
_UB_ACCESS = re.compile(r"memref\.(?:load|store) .*?%\S+\[([^\]]*)\].*: memref<[^:]*#hivm\.address_space<ub>>")


@dataclass(frozen=True)
class Compiled:
    """How far a kernel got for one target.

    Attributes:
        target: the chip.
        reason: why the compiler refused it; None: it got to code generation.
        binary: CANN's hivmc was there and made the binary.
        ub_bits: the unified buffer that the kernel uses, multi-buffering included.
        ub_available: what the chip has.
        scalar_accesses: elements of the unified buffer that are read or written one by one, at a computed
            index: vector code that the compiler turned into a scalar loop.
    """

    target: str
    reason: str | None
    binary: bool = False
    ub_bits: int = 0
    ub_available: int = 0
    scalar_accesses: int = 0

    @property
    def ub_share(self) -> float:
        return self.ub_bits / self.ub_available if self.ub_available else 0.0


def compile_for(ttadapter: str, target: str) -> Compiled:
    """Compile linalg IR (`Lowered.ttadapter`) for `target`, a key of `TARGETS`. Kept on disk, without CANN.

    Raises:
        ToolchainError: ascendnpu-ir is not installed.
    """
    name = TARGETS[target]
    tool = toolchain.bishengir(name)
    hivmc = "hivmc-a5" if name.endswith("-a5") else "hivmc"
    real = shutil.which(hivmc)
    if real:
        return _compile(ttadapter, target, tool, hivmc, real)
    parts = (toolchain.fingerprint(), tool.stat().st_size, _OPTIONS, Path(__file__).read_text(), target, ttadapter)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    path = toolchain.cache_dir() / key[:2] / f"{key}.{name}.json"
    try:
        return Compiled(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        compiled = _compile(ttadapter, target, tool, hivmc, None)
        toolchain.keep(path, json.dumps(asdict(compiled)).encode())
        return compiled


def _compile(ttadapter: str, target: str, tool: Path, hivmc: str, real: str | None) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="hal-compile-") as folder:
        kept, source, out = (Path(folder, f) for f in ("kept.mlir", "kernel.ttadapter.mlir", "kernel.o"))
        # triton-ascend takes this attribute out before it calls the compiler; so must we.
        source.write_text(re.sub(r', mix_mode\s*=\s*"[^"]*"', "", ttadapter))
        stand_in = Path(folder, "bin", hivmc)
        stand_in.parent.mkdir()
        then = f'exec "{real}" "$@"' if real else 'test "$1" = --version && echo "stand-in 0.0"; exit 0'
        stand_in.write_text(_STAND_IN.format(keep=kept, then=then))
        stand_in.chmod(0o755)
        ran = subprocess.run(
            [str(tool), str(source), f"--target={target}", *_OPTIONS, "-o", str(out)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PATH": f"{stand_in.parent}{os.pathsep}{os.environ.get('PATH', '')}"},
        )
        if not kept.is_file():
            return Compiled(target, _reason(ran.stdout + ran.stderr) or f"exit status {ran.returncode}")
        if ran.returncode:
            return Compiled(target, _reason(ran.stdout + ran.stderr) or f"exit status {ran.returncode}")
        module = kept.read_text()
        return Compiled(target, None, bool(real) and out.exists(), *buffers(module), scalar_accesses(module))


def _reason(text: str) -> str:
    """The line that says what is wrong; the rest is a dump of the module."""
    lines = [line.strip() for line in text.splitlines() if "error" in line or "overflow" in line]
    return next((line for line in lines if "overflow, requires" in line), lines[0] if lines else "")[:400]


def buffers(module: str) -> tuple[int, int]:
    """(bits used, bits available) of the unified buffer in the module that hivmc gets."""
    have = re.search(r'"UB_SIZE", (\d+)', module)
    constants = {name: int(value) for name, value in _CONSTANT.findall(module)}
    most = 0
    for offsets, shape, layout in _CAST.findall(module):
        *dims, item = shape.split("x")
        if "?" in dims or item not in _BITS:
            raise ValueError(f"a buffer of unknown size in the compiled module: memref<{shape}>")
        sizes = [int(d) for d in dims]
        strides = re.search(r"strided<\[([\d, ]+)\]", layout)
        if strides:
            elements = 1 + sum((n - 1) * int(s) for n, s in zip(sizes, strides[1].split(","), strict=True))
        else:
            elements = 1
            for n in sizes:
                elements *= n
        for offset in offsets.split(","):
            most = max(most, constants[offset.strip()] * 8 + elements * _BITS[item])
    return most, int(have[1]) if have else 0


def scalar_accesses(module: str) -> int:
    """Reads and writes of single elements of the unified buffer at an index that is no constant."""
    found = (_UB_ACCESS.search(line) for line in module.splitlines())
    return sum(
        any(not re.fullmatch(r"%c\d+(_\d+)?", i.strip()) for i in m[1].split(",") if i.strip()) for m in found if m
    )
