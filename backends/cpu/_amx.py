"""Attention's products by the matrix unit of x86 CPUs (AMX): bf16 in, fp32 sums. `usable` says where there is one.

A tile has up to 16 rows of 64 bytes. ``C += A B`` takes A as it lies, ``[rows, 32]``, and B in pairs: row i has
elements 2 i and 2 i + 1 of each column side by side. Tiles are named by
number, so that LLVM neither spills nor configures them.

Subnormal numbers count as 0 and sums are rounded to nearest even, whatever the thread has set.
"""

from __future__ import annotations

import platform
import struct
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from hal.backends.cpu import _vector as vec
from hal.backends.cpu._bits import I8, I32, I64, types
from hal.backends.cpu._vector import LANES, steps

TILE = 512
"""Elements of a tile of bf16: 16 rows of 32."""
_VOID = ir.VoidType()
_NEEDS = ("amx-tile", "amx-bf16", "avx512bf16", "avx512bw")


@cache
def usable() -> bool:
    """Whether this CPU has the unit, numba compiles for it, and the system lets this process use it."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    if not vec.features().issuperset(_NEEDS):
        return False
    # Linux gives the tiles to a process that asks: torch does.
    ask = getattr(torch.cpu, "_init_amx", None)
    return bool(ask is not None and ask())


def _shapes(shapes: list[tuple[int, int]]) -> bytes:
    """What the unit is configured by: (rows, bytes of a row) of each tile."""
    rows, columns = [r for r, _ in shapes], [c for _, c in shapes]
    return struct.pack("<BB14x8H16x8B8x", 1, 0, *columns, *rows)


FEW = _shapes([(16, 16), (16, 16), (16, 64), (16, 64), (16, 16), (8, 64), (8, 64), (8, 64)])
"""For `tile_dots` and `tile_weigh`, of four queries: sums twice, rows twice, queries; weights, sums twice."""
STREAM = _shapes([(16, 16), (16, 64), (16, 16), *[(8, 64)] * 5])
"""For `stream`."""
MANY = _shapes([(16, 64)] * 8)
"""For `scores` and `weigh_many`."""


def call(b: Any, name: str, *args: Any) -> None:
    kinds = [a.type for a in args]
    fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(_VOID, kinds), f"llvm.x86.{name}")
    b.call(fn, args)


def _bytes(b: Any, p: Any, at: Any = None) -> Any:
    return b.bitcast(p if at is None else b.gep(p, [at]), I8.as_pointer())


def load(b: Any, tile: int, p: Any, at: Any, stride: Any) -> None:
    """Tile = rows of `stride` bytes from element `at`."""
    call(b, "tileloadd64", I8(tile), _bytes(b, p, at), stride)


def keep(b: Any, tile: int, p: Any, at: Any, stride: Any) -> None:
    call(b, "tilestored64", I8(tile), _bytes(b, p, at), stride)


def zero(b: Any, tile: int) -> None:
    call(b, "tilezero", I8(tile))


def product(b: Any, c: int, x: int, y: int) -> None:
    call(b, "tdpbf16ps", I8(c), I8(x), I8(y))


@intrinsic  # type: ignore[untyped-decorator]
def begin_tiles(typingctx: Any, old: Any, shapes: Any) -> Any:
    """Configures this thread's tiles by `shapes`, few, many or stream, and keeps how they were at `old`, 64 bytes."""
    if not isinstance(shapes, types.StringLiteral):  # numba asks without the literal first
        raise TypingError("the shapes must be a literal")
    data = {"few": FEW, "many": MANY, "stream": STREAM}[shapes.literal_value]

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        call(b, "sttilecfg", _bytes(b, args[0]))
        words = ir.ArrayType(I64, 8)
        mine = cgutils.alloca_once(b, words)
        b.store(ir.Constant(words, [I64(w) for w in struct.unpack("<8q", data)]), mine)
        call(b, "ldtilecfg", _bytes(b, mine))
        return context.get_dummy_value()

    return types.void(old, shapes), codegen


@intrinsic  # type: ignore[untyped-decorator]
def end_tiles(typingctx: Any, old: Any) -> Any:
    """As they were before `begin_tiles`: a library may rely on its own configuration."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        call(b, "ldtilecfg", _bytes(b, args[0]))
        return context.get_dummy_value()

    return types.void(old), codegen


# --- few queries of a request: keys as they lie -----------------------------------------------------


@intrinsic  # type: ignore[untyped-decorator]
def pack_queries(typingctx: Any, to: Any, q: Any, head: Any, count: Any, dim: Any) -> Any:
    """Queries ``q[i * head]`` for i < count, at most 4, as the second factor of `tile_dots`: ``[dim / 2, 4]`` pairs."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        to_, q_, head_, count_, dim_ = args
        word = vec.vector(I32, 4)
        with steps(b, I64(0), dim_, 8) as i:
            rows = []
            for h in range(4):
                there = b.icmp_signed("<", I64(h), count_)
                at = b.add(b.mul(b.select(there, I64(h), I64(0)), head_), i)
                row = b.load(b.bitcast(b.gep(q_, [at]), word.as_pointer()), align=2)
                rows.append(b.select(there, row, ir.Constant(word, None)))
            one, two = (vec.shuffle(b, rows[j], rows[j + 1], range(8)) for j in (0, 2))
            all_ = vec.shuffle(b, one, two, [4 * h + j for j in range(4) for h in range(4)])
            vec.write(b, to_, b.mul(i, I64(4)), all_)
        return context.get_dummy_value()

    return types.void(to, q, types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def copy_rows(typingctx: Any, to: Any, cache: Any, at: Any, dim: Any) -> Any:
    """16 rows side by side."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        to_, cache_, at_, dim_ = args
        with steps(b, I64(0), I64(LANES), 1) as row:
            source, mine = b.gep(cache_, [b.load(b.gep(at_, [row]))]), b.gep(to_, [b.mul(row, dim_)])
            with steps(b, I64(0), dim_, 32) as i:
                vec.write(b, mine, i, vec.raw(b, source, cache.kind, i, 32))
        return context.get_dummy_value()

    return types.void(to, cache, at, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def evenly(typingctx: Any, at: Any) -> Any:
    """Whether 16 numbers are evenly spaced."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x = [vec.raw(b, args[0], "i64", I64(j), 8) for j in (0, 1, 7, 8)]
        one, two = b.sub(x[1], x[0]), b.sub(x[3], x[2])
        first = vec.shuffle(b, one, one, [0] * 8)
        odd = b.bitcast(b.or_(b.icmp_signed("!=", one, first), b.icmp_signed("!=", two, first)), I8)
        return b.icmp_signed("==", odd, I8(0))

    return types.boolean(at), codegen


@intrinsic  # type: ignore[untyped-decorator]
def tile_dots(
    typingctx: Any, out: Any, q: Any, dim: Any, at: Any, by: Any
) -> Any:  # fmt: skip
    """``out[i, h] = q[h] . key[i]`` for 32 keys and h < 4.

    The keys are the first factor, as they lie; `q` is by `pack_queries`.

    Args:
        at, by: of each 16 keys the address of the first, and how many bytes the next is away.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out_, q_, dim_, at_, by_ = args
        first, step = ([b.load(b.gep(x, [I64(j)])) for j in (0, 1)] for x in (at_, by_))
        zero(b, 0)
        zero(b, 1)
        with steps(b, I64(0), dim_, 32) as i:
            load(b, 4, q_, b.mul(i, I64(4)), I64(16))
            for j in (0, 1):
                here = b.inttoptr(b.add(first[j], b.shl(i, I64(1))), I8.as_pointer())
                call(b, "tileloadd64", I8(2 + j), here, step[j])
                product(b, j, 2 + j, 4)
        keep(b, 0, out_, I64(0), I64(16))
        keep(b, 1, out_, I64(64), I64(16))
        return context.get_dummy_value()

    n = types.int64
    return types.void(out, q, n, at, by), codegen


@intrinsic  # type: ignore[untyped-decorator]
def tile_weights(
    typingctx: Any, p: Any, logits: Any, count: Any, tops: Any, sums: Any, keep: Any, scale: Any
) -> Any:  # fmt: skip
    """`_fma.soften` of ``logits[i, h]`` for i < count, a multiple of 32, and h < 4, as first factors of `tile_weigh`: a
    tile of 8 rows for each 16 keys. Of each head, the weights are before zeros in one row and behind them in the next.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        p_, logits_, count_, tops_, sums_, keep_, scale_ = args
        word, by = vec.vector(I32), vec.fill(b, scale_)
        old = vec.read(b, tops_, "fp32", I64(0))
        most, totals = ([cgutils.alloca_once(b, vec.vector()) for _ in range(4)] for _ in range(2))
        for place, total in zip(most, totals, strict=True):
            b.store(old, place)
            b.store(vec.number(0.0), total)
        with steps(b, I64(0), count_, LANES) as i:
            for j, place in enumerate(most):
                x = vec.read(b, logits_, "fp32", b.add(b.shl(i, I64(2)), I64(LANES * j)))
                b.store(vec.larger(b, b.fmul(x, by), b.load(place)), place)
        top = vec.across(b, vec.folded(b, most, vec.larger), 4, vec.larger)
        base = b.select(b.fcmp_ordered(">", top, vec.number(float("-inf"))), top, vec.number(0.0))
        kept = vec.exp2(b, b.fsub(old, base))
        with steps(b, I64(0), count_, LANES) as i:
            e = []
            for j, total in enumerate(totals):
                x = vec.read(b, logits_, "fp32", b.add(b.shl(i, I64(2)), I64(LANES * j)))
                e.append(vec.exp2(b, vec.fma(b, x, by, b.fneg(base)), 5))
                b.store(b.fadd(b.load(total), e[j]), total)
            halves = [vec.shuffle(b, e[j], e[j + 1], range(32)) for j in (0, 2)]
            for h in range(4):
                row = b.zext(vec.to_bf16(b, vec.shuffle(b, halves[0], halves[1], range(h, 64, 4))), word)
                at = b.add(b.shl(i, I64(4)), I64(64 * h))
                vec.write(b, p_, at, row)
                vec.write(b, p_, b.add(at, I64(32)), b.shl(row, ir.Constant(word, [I32(16)] * LANES)))
        vec.write(b, tops_, I64(0), top)
        vec.write(
            b, sums_, I64(0), vec.fma(b, vec.read(b, sums_, "fp32", I64(0)), kept, vec.folded(b, totals, vec.add))
        )
        vec.write(b, keep_, I64(0), kept)
        return context.get_dummy_value()

    n = types.int64
    return types.void(p, logits, n, tops, sums, keep, types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def tile_weigh(
    typingctx: Any, acc: Any, fresh: Any, dim: Any, at: Any, by: Any, count: Any, p: Any
) -> Any:  # fmt: skip
    """``acc[h] += sum(p[i, h] * value[i])`` for i < count, a multiple of 16, and h < 4; if `fresh`, ``=``.

    The values are the second factor, as they lie: what that takes for a pair of keys is a pair of dims of one key, so
    each row of `p` is blind to one of them. `acc` has the even dims of a head, then the odd ones.

    Args:
        at, by: of each 16 values the address of the first, and how many bytes the next is away.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        acc_, fresh_, dim_, at_, by_, count_, p_ = args
        half = b.lshr(dim_, I64(1))
        row = b.shl(half, I64(2))
        tiles = b.lshr(count_, I64(4))

        def chunk(d: Any, wide: int) -> None:
            places = [b.add(d, I64(LANES * w)) for w in range(wide)]
            with b.if_else(fresh_) as (then, otherwise):
                with then:
                    for w in range(wide):
                        zero(b, 6 + w)
                with otherwise:
                    for w, place in enumerate(places):
                        load(b, 6 + w, acc_, place, row)
            with steps(b, I64(0), tiles, 1) as t:
                load(b, 5, p_, b.shl(t, I64(8)), I64(64))
                first, step = b.load(b.gep(at_, [t])), b.load(b.gep(by_, [t]))
                for w, place in enumerate(places):
                    here = b.inttoptr(b.add(first, b.shl(place, I64(2))), I8.as_pointer())
                    call(b, "tileloadd64", I8(2 + w), here, step)
                    product(b, 6 + w, 5, 2 + w)
            for w, place in enumerate(places):
                keep(b, 6 + w, acc_, place, row)

        pairs = b.and_(half, I64(-2 * LANES))
        with steps(b, I64(0), pairs, 2 * LANES) as d:
            chunk(d, 2)
        with b.if_then(b.icmp_signed("<", pairs, half)):
            chunk(pairs, 1)
        return context.get_dummy_value()

    n = types.int64
    return types.void(acc, types.boolean, n, at, by, n, p), codegen


@intrinsic  # type: ignore[untyped-decorator]
def merge_dims(typingctx: Any, to: Any, x: Any, n: Any, by: Any) -> Any:
    """`n` sums of `tile_weigh` times `by`, in the order of their dims, as bf16."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        to_, x_, n_, by_ = args
        half = b.lshr(n_, I64(1))
        with steps(b, I64(0), half, LANES) as i:
            even, odd = vec.read(b, x_, "fp32", i), vec.read(b, x_, "fp32", b.add(i, half))
            row = vec.shuffle(b, even, odd, [j + o for j in range(16) for o in (0, 16)])
            vec.write(b, to_, b.shl(i, I64(1)), vec.to_bf16(b, b.fmul(row, vec.fill(b, by_, 32))))
        return context.get_dummy_value()

    return types.void(to, x, types.int64, types.float32), codegen
