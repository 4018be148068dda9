"""Counts what the launches of an op would do, a program at a time, from their lowered IR."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hal._errors import HalError
from hal.bench.ascend.ir import COPIES, KINDS, UNITS
from hal.bench.ascend.translate import program
from hal.lowered import Lowered, toolchain
from hal.lowered.lower import find

_ROOM = 16


class _Number(ctypes.Union):
    _fields_ = (("i", ctypes.c_int64), ("f", ctypes.c_double))


class _Counters(ctypes.Structure):
    _fields_ = (("unit", ctypes.c_int64 * _ROOM), ("copy", ctypes.c_int64 * 4 * 4))


@dataclass(frozen=True)
class Work:
    """What one program does: `units` by `ir.UNITS`, `copies` by kind and then by `ir.COPIES`."""

    units: Mapping[str, int]
    copies: Mapping[str, Mapping[str, int]]

    def copied(self, what: str, *kinds: str) -> int:
        return sum(self.copies[k][what] for k in kinds or KINDS)


@dataclass(frozen=True)
class Counted:
    """One launch: a `Work` for each program."""

    lowered: Lowered
    grid: tuple[int, int, int]
    programs: tuple[Work, ...]

    @property
    def mixed(self) -> bool:
        """Cube and vector cores work together."""
        return 'mix_mode = "mix"' in self.lowered.ttadapter

    @property
    def bytes(self) -> int:
        """Between global memory and the cores: copies, and scalar reads at 64 bytes a line that is not the last."""
        return sum(p.copied("bytes") + 64 * p.units["miss"] for p in self.programs)


@contextlib.contextmanager
def counting() -> Iterator[list[Counted]]:
    """Launches made inside the block are counted and not run: outputs stay as they are.

    Example:
        >>> with counting() as launches:                              # doctest: +SKIP
        ...     hal.get_last_loc(table, rows, lens)
        >>> launches[0].bytes                                         # doctest: +SKIP
        1536
    """
    from hal import lowered as lane
    from hal.triton import launch

    if launch.lane() != "lowered":
        raise HalError("hal: bench: kernels are counted in the lowered lane; set HAL_LANE=lowered")
    seen: list[Counted] = []

    def instead(
        jit_fn: Any, grid: Sequence[int], args: Sequence[Any], constexprs: Mapping[str, Any], options: Any = None
    ) -> None:
        form, taken = find(jit_fn, args, constexprs, options)
        seen.append(count(form, grid, [args[i] for i in taken]))

    with _lock:
        real, lane.run = lane.run, instead
        try:
            yield seen
        finally:
            lane.run = real


_lock = threading.Lock()


def count(lowered: Lowered, grid: Sequence[int], args: Sequence[Any]) -> Counted:
    """What each program of a launch does; see `counting`."""
    x, y, z = (*(int(g) for g in grid), 1, 1)[:3]
    programs = x * y * z
    pointers = [a.data_ptr() for a, t in zip(args, lowered.types, strict=True) if t.startswith("*")]
    numbers = [(a, t) for a, t in zip(args, lowered.types, strict=True) if not t.startswith("*")]
    given = (_Number * max(1, len(numbers)))()
    for slot, (value, type_) in zip(given, numbers, strict=False):
        if type_.startswith("f"):
            slot.f = value
        else:
            slot.i = value
    out = (_Counters * max(1, programs))()
    _program(lowered.ttadapter, lowered.name)(
        (ctypes.c_void_p * max(1, len(pointers)))(*pointers), given, (ctypes.c_int64 * 3)(x, y, z), out
    )
    return Counted(lowered, (x, y, z), tuple(_work(c) for c in out[:programs]))


def _work(c: Any) -> Work:
    copies = {k: dict(zip(COPIES, c.copy[i], strict=True)) for i, k in enumerate(KINDS)}
    return Work(dict(zip(UNITS, c.unit, strict=False)), copies)


@functools.cache
def _program(ttadapter: str, name: str) -> Any:
    source = program(ttadapter, name)
    compiler = toolchain.c_compiler()
    if compiler is None:
        raise HalError(f"hal: bench: {toolchain.NO_C_COMPILER}")
    key = hashlib.sha256(repr((compiler, source)).encode()).hexdigest()
    path = toolchain.cache_dir() / key[:2] / f"{key}.count.so"
    if not path.is_file():
        with tempfile.TemporaryDirectory(prefix="hal-count-") as folder:
            text, built = Path(folder, "count.c"), Path(folder, "count.so")
            text.write_text(source)
            ran = subprocess.run(
                [compiler, "-O1", "-shared", "-fPIC", "-fwrapv", "-w", str(text), "-o", str(built)],
                capture_output=True,
                text=True,
                check=False,
            )
            if ran.returncode:
                raise HalError(
                    f"hal: bench: kernel {name}: its counting program does not compile:\n{ran.stderr[:2000]}"
                )
            toolchain.keep(path, built.read_bytes())
            loaded = ctypes.CDLL(str(built))
    else:
        loaded = ctypes.CDLL(str(path))
    loaded.count.restype = None
    return loaded.count
