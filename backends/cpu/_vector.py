"""Vectors of 16 fp32 lanes, for kernels that are written in them: what LLVM does not find in a loop by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from hal.backends.cpu._bits import F32, FORMATS, I8, I16, I32, I64, decode

LANES = 16
FMA = ("contract",)


def vector(kind: Any = F32, lanes: int = LANES) -> Any:
    return ir.VectorType(kind, lanes)


def number(x: float, lanes: int = LANES) -> Any:
    return ir.Constant(vector(F32, lanes), [F32(x)] * lanes)


def raw(b: Any, p: Any, kind: str, at: Any, lanes: int = LANES) -> Any:
    """The bits of `lanes` elements, unaligned."""
    where = b.gep(p, [at])
    return b.load(b.bitcast(where, vector(where.type.pointee, lanes).as_pointer()), align=FORMATS[kind].bits // 8)


def read(b: Any, p: Any, kind: str, at: Any) -> Any:
    return decode(b, kind, raw(b, p, kind, at))


def write(b: Any, p: Any, at: Any, value: Any) -> None:
    """Of a vector's own bits, to a pointer of any format; `at` counts that one's elements."""
    b.store(value, b.bitcast(b.gep(p, [at]), value.type.as_pointer()), align=1)


def fill(b: Any, x: Any, lanes: int = LANES) -> Any:
    """A scalar in every lane."""
    none = ir.Constant(vector(x.type, lanes), ir.Undefined)
    return shuffle(b, b.insert_element(none, x, I32(0)), none, [0] * lanes)


def scalar(b: Any, p: Any, at: Any) -> Any:
    """One fp32 of `p`, in every lane."""
    return fill(b, b.bitcast(b.load(b.gep(p, [at])), F32))


def shuffle(b: Any, x: Any, y: Any, order: Sequence[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(vector(I32, len(order)), list(order)))


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return b.fadd(b.fmul(x, y, FMA), z, FMA)


def larger(b: Any, x: Any, y: Any) -> Any:
    """The larger of each lane; where one is NaN, y's."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def across(b: Any, x: Any, step: int, op: Any) -> Any:
    """`op` over all lanes that are a multiple of `step` apart, in each of them."""
    while step < LANES:
        x = op(b, x, shuffle(b, x, x, [i ^ step for i in range(LANES)]))
        step *= 2
    return x


def add(b: Any, x: Any, y: Any) -> Any:
    return b.fadd(x, y)


def folded(b: Any, places: Sequence[Any], op: Any) -> Any:
    """`op` over the vectors at four places."""
    x = [b.load(place) for place in places]
    return op(b, op(b, x[0], x[1]), op(b, x[2], x[3]))


def sums(b: Any, x: Sequence[Any]) -> Any:
    """Lane i is the sum of the lanes of ``x[i]``, of 16 vectors; None: that lane is anything."""
    found, size = list(x), LANES
    while size > 1:
        half = size // 2
        low = [s + o + j for s in range(0, LANES, size) for o in (0, LANES) for j in range(half)]
        pairs = zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True)
        found = [_join(b, one, other, low, half) for one, other in pairs]
        size = half
    return found[0]


def _join(b: Any, x: Any, y: Any, low: Sequence[int], half: int) -> Any:
    if x is None and y is None:
        return None
    none = number(0.0)
    x, y = x or none, y or none
    return b.fadd(shuffle(b, x, y, low), shuffle(b, x, y, [i + half for i in low]))


@cache
def features() -> frozenset[str]:
    """What the CPU that numba compiles for has, by LLVM's names."""
    from numba.core.registry import cpu_target

    words = str(cpu_target.target_context.codegen().magic_tuple()[2]).split(",")
    return frozenset(word[1:] for word in words if word.startswith("+"))


@cache
def _exp2_terms(degree: int) -> list[float]:
    """2^r for ``|r| <= 1 / 2`` as a polynomial that is 1 at 0: the rest interpolated at Chebyshev's points, wrong by
    2e-7 of the value with degree 5, by 5e-9 with 6."""
    r = np.cos(np.pi * (2 * np.arange(degree) + 1) / (2 * degree)) / 2
    rest = np.linalg.solve(np.vander(r, increasing=True), np.expm1(r * math.log(2)) / r)
    return [1.0, *(float(x) for x in rest)]


def exp2(b: Any, y: Any, degree: int = 6) -> Any:
    """2^y of each lane, each at most 0, or a little more by rounding: below -125, 0; NaN stays NaN."""
    # Added to 1.5 * 2^23 a number is rounded to a whole one, which then stands in the last bits.
    moved = b.fadd(y, number(12582912.0))
    k = b.fsub(moved, number(12582912.0))
    r = b.fsub(y, k)
    terms = _exp2_terms(degree)
    e = number(terms[-1])
    for term in terms[-2::-1]:
        e = fma(b, e, r, number(term))
    if "avx512f" in features():
        kind, mask = vector(), ir.IntType(LANES)
        fn = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(kind, [kind, kind, kind, mask, I32]), "llvm.x86.avx512.mask.scalef.ps.512"
        )
        # Masked, for a subnormal result takes 150 cycles. Unordered: NaN stays NaN.
        large = b.bitcast(b.fcmp_unordered(">=", y, number(-125.0)), mask)
        return b.call(fn, [e, k, number(0.0), large, I32(4)])
    bits = vector(I32)
    places = b.shl(b.bitcast(moved, bits), ir.Constant(bits, [I32(23)] * LANES))
    e = b.bitcast(b.add(b.bitcast(e, bits), places), e.type)
    e = b.select(b.fcmp_ordered("<", y, number(-125.0)), number(0.0), e)
    return b.select(b.fcmp_unordered("uno", y, y), y, e)


class _BFloat(ir.types._BaseFloatType):  # type: ignore[misc]
    """LLVM's own bf16, which llvmlite has no name for."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()  # as llvmlite does for its own


def to_bf16(b: Any, x: Any) -> Any:
    """The bits of bf16, to nearest even, by the instruction for it (avx512bf16): subnormals become 0."""
    lanes = x.type.count
    return b.bitcast(b.fptrunc(x, vector(_BFloat(), lanes)), vector(I16, lanes))


def prefetch(b: Any, p: Any, at: Any, near: int = 2) -> None:
    """Asks for the line of an element, which need not be there; near: 2, or 3 for the cache that is nearest."""
    kind = I8.as_pointer()
    fn = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(ir.VoidType(), [kind, I32, I32, I32]), "llvm.prefetch.p0"
    )
    b.call(fn, [b.bitcast(b.gep(p, [at]), kind), I32(0), I32(near), I32(1)])


@contextmanager
def steps(b: Any, begin: Any, end: Any, step: int) -> Iterator[Any]:
    """A loop; its index."""
    with cgutils.for_range_slice(b, begin, end, I64(step), I64) as (i, _):
        yield i
