"""Attention's products by the matrix unit of x86 CPUs (AMX): bf16 in, fp32 sums. `usable` says where there is one.

A tile has up to 16 rows of 64 bytes. ``C += A B`` takes A as it lies, ``[rows, 32]``, and B in pairs: row i has elements 2 i
and 2 i + 1 of each column side by side. Tiles are named by number, so that LLVM neither spills nor configures them.

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
from numba.extending import intrinsic

from hal.backends.cpu import _vector as vec
from hal.backends.cpu._bits import F32, I8, I16, I32, I64, encode, types
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
    from numba.core.registry import cpu_target

    features = str(cpu_target.target_context.codegen().magic_tuple()[2]).split(",")
    if not all(f"+{need}" in features for need in _NEEDS):
        return False
    # Linux gives the tiles to a process that asks: torch does.
    ask = getattr(torch.cpu, "_init_amx", None)
    return bool(ask is not None and ask())


def _shapes(shapes: list[tuple[int, int]]) -> bytes:
    """What the unit is configured by: (rows, bytes of a row) of each tile."""
    rows, columns = [r for r, _ in shapes], [c for _, c in shapes]
    return struct.pack("<BB14x8H16x8B8x", 1, 0, *columns, *rows)


FEW = _shapes([(16, 16), (16, 16), (16, 64), (16, 64), (16, 16), (4, 64), (16, 64), (4, 64)])
"""For `dots` and `weigh`, of four queries: sums twice, keys twice, queries; weights, values, their sums."""
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
    """Configures this thread's tiles by the literal `shapes`, FEW or MANY, and keeps how they were at `old`, 64 bytes."""
    data = {"few": FEW, "many": MANY}[shapes.literal_value] if isinstance(shapes, types.StringLiteral) else FEW

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
        for row in range(LANES):
            source = b.gep(cache_, [b.load(b.gep(at_, [I64(row)]))])
            with steps(b, I64(0), dim_, 32) as i:
                line = vec.raw(b, source, cache.kind, i, 32)
                vec.write(b, to_, b.add(b.mul(I64(row), dim_), i), line)
        return context.get_dummy_value()

    return types.void(to, cache, at, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def tile_dots(
    typingctx: Any, out: Any, q: Any, dim: Any, x: Any, x_stride: Any, y: Any, y_stride: Any, soon: Any, soon_at: Any
) -> Any:  # fmt: skip
    """``out[i, h] = q[h] . key[i]`` for 32 keys: 16 from `x`, 16 from `y`; strides in elements. Fetches 32 rows of `soon`."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out_, q_, dim_, x_, x_stride_, y_, y_stride_, soon_, soon_at_ = args
        x_by, y_by = (b.shl(s, I64(1)) for s in (x_stride_, y_stride_))
        zero(b, 0)
        zero(b, 1)
        with steps(b, I64(0), dim_, 32) as i:
            load(b, 4, q_, b.mul(i, I64(4)), I64(16))
            load(b, 2, x_, i, x_by)
            load(b, 3, y_, i, y_by)
            product(b, 0, 2, 4)
            product(b, 1, 3, 4)
            for row in range(32):
                vec.prefetch(b, soon_, b.add(b.load(b.gep(soon_at_, [I64(row)])), i))
        keep(b, 0, out_, I64(0), I64(16))
        keep(b, 1, out_, I64(64), I64(16))
        return context.get_dummy_value()

    n = types.int64
    return types.void(out, q, n, x, n, y, n, soon, soon_at), codegen


@intrinsic  # type: ignore[untyped-decorator]
def pack_values(typingctx: Any, to: Any, cache: Any, at: Any, count: Any, dim: Any, soon: Any, soon_at: Any) -> Any:
    """`count` rows, a multiple of 32, as second factors: a tile for each 16 dims, then the next 32 rows. Of each 32 dims
    the tiles have those that `in_order` sorts. Fetches `count` rows of `soon`."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        to_, cache_, at_, count_, dim_, soon_, soon_at_ = args
        low = [s + o + j for s in range(0, 32, 8) for j in range(4) for o in (0, 32)]
        with steps(b, I64(0), count_, 2) as c:
            rows = [b.gep(cache_, [b.load(b.gep(at_, [b.add(c, I64(r))]))]) for r in range(2)]
            later = [b.load(b.gep(soon_at_, [b.add(c, I64(r))])) for r in range(2)]
            chunk = b.mul(b.lshr(c, I64(5)), b.mul(dim_, I64(32)))
            first = b.add(chunk, b.shl(b.and_(c, I64(31)), I64(4)))
            with steps(b, I64(0), dim_, 32) as i:
                x, y = (vec.raw(b, row, cache.kind, i, 32) for row in rows)
                at0 = b.add(first, b.shl(i, I64(5)))
                vec.write(b, to_, at0, vec.shuffle(b, x, y, low))
                vec.write(b, to_, b.add(at0, I64(TILE)), vec.shuffle(b, x, y, [j + 4 for j in low]))
                for x_ in later:
                    vec.prefetch(b, soon_, b.add(x_, i))
        return context.get_dummy_value()

    n = types.int64
    return types.void(to, cache, at, n, n, soon, soon_at), codegen


def in_order(b: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Two neighbouring vectors of sums of packed values -> dims 0 to 15, dims 16 to 31."""
    order = [s + o + j for s in range(0, 16, 4) for o in (0, 16) for j in range(4)]
    return vec.shuffle(b, x, y, order[:16]), vec.shuffle(b, x, y, order[16:])


@intrinsic  # type: ignore[untyped-decorator]
def tile_weigh(typingctx: Any, acc: Any, dim: Any, values: Any, logits: Any, count: Any, p: Any, room: Any) -> Any:
    """``acc[h] += sum(logits[i, h] * value[i])`` for i < count, a multiple of 32, and h < 4.

    Args:
        values: by `pack_values`. p: ``[4, room]``, where the weights are kept as bf16.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        acc_, dim_, values_, logits_, count_, p_, room_ = args
        with steps(b, I64(0), count_, LANES) as i:
            x = [vec.read(b, logits_, "fp32", b.add(b.mul(i, I64(4)), I64(LANES * j))) for j in range(4)]
            halves = [vec.shuffle(b, x[j], x[j + 1], range(32)) for j in (0, 2)]
            for h in range(4):
                row = vec.shuffle(b, *halves, range(h, 64, 4))
                vec.write(b, p_, b.add(b.mul(I64(h), room_), i), encode(b, "bf16", row))
        by, wide = b.shl(dim_, I64(2)), b.shl(room_, I64(1))
        with steps(b, I64(0), dim_, LANES) as d:
            load(b, 7, acc_, d, by)
            with steps(b, I64(0), count_, 32) as c:
                load(b, 5, p_, c, wide)
                load(b, 6, values_, b.add(b.mul(c, dim_), b.shl(d, I64(5))), I64(64))
                product(b, 7, 5, 6)
            keep(b, 7, acc_, d, by)
        return context.get_dummy_value()

    n = types.int64
    return types.void(acc, n, values, logits, n, p, n), codegen


@intrinsic  # type: ignore[untyped-decorator]
def sort_dims(typingctx: Any, x: Any, n: Any) -> Any:
    """Sums of packed values, in the order of their dims."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        with steps(b, I64(0), args[1], 32) as i:
            next_ = b.add(i, I64(LANES))
            one, two = in_order(b, vec.read(b, args[0], "fp32", i), vec.read(b, args[0], "fp32", next_))
            vec.write(b, args[0], i, one)
            vec.write(b, args[0], next_, two)
        return context.get_dummy_value()

    return types.void(x, types.int64), codegen
