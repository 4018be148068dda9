"""Reads a kernel's lowered IR for what makes Ascend kernels slow or unsafe.

- *scalar gather loops*: an address that the compiler can't see through becomes a load per element;
- *read-modify-write stores*: a mask that is no plain prefix makes a store load the whole block, merge, and
  write the whole block back: out of bounds at the tail, and a race between neighbouring programs;
- *int64 vectors*: the vector unit has no 64-bit arithmetic; they degrade to scalar code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TENSOR64 = re.compile(r"tensor<((?:\d+x)+)i64>")
_COPY_IN = re.compile(r"memref\.copy (%\S+), (%\S+) :")
_TO_TENSOR = re.compile(r"(%\S+) = bufferization\.to_tensor (%\S+) ")
_SELECT = re.compile(r"(%\S+) = arith\.select %\S+, %\S+, (%\S+) : tensor")
_PART = re.compile(r"tensor\.extract_slice %\S+?\[[\d, ]+\] \[[\d, ]+\] \[1(?:, 1)*\] ")
_STORE = re.compile(r"bufferization\.materialize_in_destination (%\S+) in writable (%\S+) :")


@dataclass(frozen=True)
class Lint:
    """What was found in one kernel's linalg IR; all zero is clean."""

    scalar_gathers: int
    rmw_stores: int
    int64_vectors: int

    @property
    def clean(self) -> bool:
        return not (self.scalar_gathers or self.rmw_stores or self.int64_vectors)


def lint(ttadapter: str) -> Lint:
    """Lint the linalg IR of one kernel (`Lowered.ttadapter`).

    Example:
        >>> lint('%1 = tensor.insert %0 {DiscreteMemAccess}\\nscf.yield {DiscreteMemAccess} %1').scalar_gathers
        1
    """
    lines = ttadapter.splitlines()
    # The compiler marks the accesses of such a loop, and its end: an scf.yield for a load, a store otherwise.
    # A part of a tile at a place that the kernel's source names is marked too, and is no access to memory.
    marked = [line for line in lines if "DiscreteMemAccess" in line and not _PART.search(line)]
    loops = sum("scf.yield" in line or "materialize_in_destination" in line for line in marked)
    copied = {to: source for source, to in _COPY_IN.findall(ttadapter)}
    loaded = {t: copied[m] for t, m in _TO_TENSOR.findall(ttadapter) if m in copied}
    merged = {t: loaded[kept] for t, kept in _SELECT.findall(ttadapter) if kept in loaded}
    rmw = sum(merged.get(value) == to for value, to in _STORE.findall(ttadapter))
    return Lint(max(loops, 1) if marked else 0, rmw, sum(map(_wide, lines)))


def _wide(line: str) -> bool:
    """An operation on more than one int64. The shape operand of a reshape is none: it is a constant."""
    if "arith.constant" in line:
        return False
    if "tensor.reshape" in line:
        line = line.split(" -> ")[-1]
    return any(_elements(dims) > 1 for dims in _TENSOR64.findall(line))


def _elements(dims: str) -> int:
    n = 1
    for d in dims.rstrip("x").split("x"):
        n *= int(d)
    return n
