"""What `translate` knows of the IR's text and of C: operations, types, names, and the program around what it writes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hal._errors import HalError

BYTES = {"i1": 1, "i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8, "index": 8}
UNITS = ("scalar", "division", "hit", "miss", "vector", "repeat", "slow", "cube", "cube32", "exchange", "exchanged")
"""Counters of a program: scalar instructions, those that divide, scalar reads of memory from the line read last and
others; vector instructions, their 256-byte repeats, those repeats that take longer; 16x16x16 products of 2-byte
numbers, 16x8x16 products of fp32; hand-overs between cube and vector core, and their bytes."""
COPIES = ("copies", "rows", "lines", "bytes")
"""Counters of each kind of copy: transactions, contiguous rows, 512-byte lines touched, bytes."""
KINDS = ("in", "out", "in_loop", "out_loop")
"""Copies from and to global memory; those straight in a loop of a known count, which the compiler double-buffers."""

FREE = set(
    """
    arith.constant arith.index_cast arith.index_castui arith.extsi arith.extui arith.trunci memref.reinterpret_cast
    memref.subview memref.alloc tensor.empty bufferization.to_tensor bufferization.alloc_tensor tensor.extract_slice
    tensor.collapse_shape tensor.expand_shape tensor.reshape linalg.transpose memref.cast
    """.split()
)
BINARY = {
    "addi": "{0} + {1}",
    "subi": "{0} - {1}",
    "muli": "{0} * {1}",
    "andi": "{0} & {1}",
    "ori": "{0} | {1}",
    "xori": "{0} ^ {1}",
    "divsi": "{1} ? {0} / {1} : 0",
    "remsi": "{1} ? {0} % {1} : 0",
    "minsi": "{0} < {1} ? {0} : {1}",
    "maxsi": "{0} > {1} ? {0} : {1}",
    "shrsi": "{0} >> {1}",
    "shrui": "(int64_t)((uint64_t)({0} & {mask}) >> {1})",
    "shli": "{0} << {1}",
    "addf": "{0} + {1}",
    "subf": "{0} - {1}",
    "mulf": "{0} * {1}",
    "divf": "{0} / {1}",
    "maxnumf": "{0} > {1} ? {0} : {1}",
}
COMPARE = {"eq": "==", "ne": "!=", "slt": "<", "sle": "<=", "sgt": ">", "sge": ">="}
UNSIGNED = {"ult": "<", "ule": "<=", "ugt": ">", "uge": ">="}
SLOW = {"math.exp", "math.log", "math.sqrt", "arith.divf", "arith.divsi", "arith.remsi"}
OP = re.compile(r"(?:(%\S+?)(?::(\d+))? = )?([\w.]+)(.*)")
TENSOR = re.compile(r"tensor<((?:[\d?]+x)*)(\w+)>")


@dataclass
class Memory:
    """A memref: of a pointer argument, with its place in elements, or a program's own buffer."""

    item: int
    argument: str | None
    offset: str = "0"
    sizes: list[str] = field(default_factory=list)
    strides: list[str] = field(default_factory=list)
    copied: Memory | None = None
    root: str = ""


class Emitter:
    """Writes the program, and remembers what its names are."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.out: list[str] = []
        self.memory: dict[str, Memory] = {}
        self.tensor: dict[str, tuple[str, int]] = {}  # value -> (how it was made, the loop that it was made in)
        self.source: dict[str, str] = {}  # of a tensor that is another's view
        self.unknown: set[str] = set()
        self.stack: list[tuple[str, list[str], list[str]]] = []  # kind, results, carried
        self.loops: list[int] = [0]
        self.kinds: list[str] = [""]
        self.sites = self.made = 0

    def _add(self, unit: str, expression: str) -> None:
        self.out.append(f"c->unit[{UNITS.index(unit)}] += {expression};")

    def _declare(self, value: str, kind: str, expression: str) -> None:
        # Names come again in blocks beside each other.
        self.tensor.pop(value, None)
        self.unknown.discard(value)
        self.out.append(f"{'double' if kind[0] == 'f' else 'int64_t'} {c_name(value)} = {expression};")

    def _define(self, value: str, expression: str, kind: str) -> None:
        if kind == "i32":
            expression = f"(int32_t)({expression})"
        elif kind == "i1":
            expression = f"({expression}) & 1"
        self._declare(value, kind, expression)

    def _refuse(self, value: str) -> None:
        if value in self.unknown:
            raise HalError(
                f"hal: bench: kernel {self.name}: {value} hangs on values of a tensor, which are not computed here"
            )

    def _made(self, value: str) -> tuple[str, int]:
        return self.tensor.get(value, ("vector", -1))


def types_of(text: str) -> list[str]:
    text = text.split("->")[0] if text.strip().startswith("(") and "->" in text else text
    inner = text.strip()
    if inner.startswith("("):
        inner = inner[1 : inner.index(")")]
    else:
        inner = inner.split(" {")[0].split(" : ")[0]
    return [t.strip() for t in re.split(r",(?![^<]*>)", inner) if t.strip()]


def elements(dims: str) -> int:
    n = 1
    for d in dims.rstrip("x").split("x"):
        n *= int(d) if d not in ("", "?") else 1
    return n


def mask_of(kind: str) -> str:
    return {"i1": "1", "i8": "0xffll", "i16": "0xffffll", "i32": "0xffffffffll"}.get(kind.strip(), "-1ll")


def c_name(value: str) -> str:
    return "v" + re.sub(r"[#-]", "_", value[1:]) if value.startswith("%") else value


SOURCE = """
#include <stdint.h>
#include <string.h>
typedef struct { int64_t unit[16], copy[4][4]; } counters;
typedef union { int64_t i; double f; } number;

static char *touch(counters *c, int64_t *line, char *p) {
    int64_t now = (int64_t)p >> 6;
    c->unit[now == *line ? 2 : 3]++;
    *line = now;
    return p;
}

static void dma(counters *c, int kind, int64_t at, int rank, const int64_t *size, const int64_t *step, int64_t item) {
    int64_t row = item, rows = 1, index[8] = {0};
    for (int d = 0; d < rank; d++)
        if (size[d] <= 0)
            return;
    while (rank && (step[rank - 1] * item == row || size[rank - 1] == 1))
        row *= size[--rank];
    for (int d = 0; d < rank; d++)
        rows *= size[d];
    int64_t *k = c->copy[kind];
    k[0]++, k[1] += rows, k[3] += rows * row;
    for (int64_t r = 0; r < rows; r++) {
        k[2] += ((at + row - 1) >> 9) - (at >> 9) + 1;
        for (int d = rank - 1; d >= 0; d--) {
            at += step[d] * item;
            if (++index[d] < size[d])
                break;
            at -= size[d] * step[d] * item;
            index[d] = 0;
        }
    }
}

static void one(counters *c, char **p, number *n, int64_t gx, int64_t gy, int64_t gz, int64_t x, int64_t y, int64_t z) {
    int64_t line[SITES];
    memset(line, 0xff, sizeof line);
    HEAD
    BODY
}

void count(char **p, number *n, const int64_t *grid, counters *out) {
    for (int64_t i = 0; i < grid[0] * grid[1] * grid[2]; i++)
        one(&out[i], p, n, grid[0], grid[1], grid[2], i % grid[0], i / grid[0] % grid[1], i / grid[0] / grid[1]);
}
"""
