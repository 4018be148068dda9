"""Matrix products of attention by vectors: both factors in fp32, packed; six rows by four vectors in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from hal.backends.cpu import _vector as vec
from hal.backends.cpu._bits import F32, I32, I64, decode, types
from hal.backends.cpu._vector import LANES, steps

HIGH, WIDE = 6, 4
"""Rows and vectors of a product that are summed in registers: 24 of the 32 that there are."""


def there(b: Any, p: Any, kind: str, at: Any, lanes: int = LANES) -> Any:
    """The bits of elements from `at`, as a pointer and where; zeros where `at` is negative, and nothing is read."""
    element = p.type.pointee
    none = ir.Constant(vec.vector(element, lanes), None)
    place = cgutils.alloca_once_value(b, none)
    b.store(none, place)
    with b.if_then(b.icmp_signed(">=", at[0], I64(0))):
        b.store(vec.raw(b, p, kind, b.add(at[0], at[1]), lanes), place)
    return b.load(place)


def transposed(b: Any, x: list[Any]) -> list[Any]:
    """16 vectors of 16 -> their columns."""
    x = list(x)
    for step in (8, 4, 2, 1):
        for i in range(LANES):
            if not i & step:
                one, two = x[i], x[i + step]
                x[i] = vec.shuffle(b, one, two, [j if not j & step else LANES + j - step for j in range(LANES)])
                x[i + step] = vec.shuffle(b, one, two, [j + step if not j & step else LANES + j for j in range(LANES)])
    return x


@intrinsic  # type: ignore[untyped-decorator]
def pack_keys(typingctx: Any, to: Any, cache: Any, at: Any, count: Any, dim: Any, room: Any) -> Any:
    """``to[d, i] = key[i][d]`` for i < count, a multiple of 16; rows of `to` are `room` long. 0 where `at` is -1."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        to_, cache_, at_, count_, dim_, room_ = args
        with steps(b, I64(0), count_, LANES) as i:
            places = [b.load(b.gep(at_, [b.add(i, I64(k))])) for k in range(LANES)]
            with steps(b, I64(0), dim_, LANES) as d:
                rows = [decode(b, cache.kind, there(b, cache_, cache.kind, (place, d))) for place in places]
                for j, column in enumerate(transposed(b, rows)):
                    vec.write(b, to_, b.add(b.mul(b.add(d, I64(j)), room_), i), column)
        return context.get_dummy_value()

    n = types.int64
    return types.void(to, cache, at, n, n, n), codegen


@intrinsic  # type: ignore[untyped-decorator]
def pack_values(typingctx: Any, to: Any, cache: Any, at: Any, count: Any, dim: Any) -> Any:
    """``to[i] = value[i]`` for i < count; 0 where `at` is -1."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        to_, cache_, at_, count_, dim_ = args
        with steps(b, I64(0), count_, 1) as i:
            place, mine = b.load(b.gep(at_, [i])), b.mul(i, dim_)
            with steps(b, I64(0), dim_, LANES) as d:
                x = decode(b, cache.kind, there(b, cache_, cache.kind, (place, d)))
                vec.write(b, to_, b.add(mine, d), x)
        return context.get_dummy_value()

    n = types.int64
    return types.void(to, cache, at, n, n), codegen


def _panel(b: Any, x: Any, x_step: Any, y: Any, y_step: Any, count: Any, wide: int, start: list[Any]) -> list[Any]:
    """``start[r, w] + sum(x[r * x_step + i] * y[i * y_step + 16 w] for i < count)`` of HIGH rows, `wide` vectors."""
    places = []
    for value in start:
        places.append(cgutils.alloca_once(b, vec.vector()))
        b.store(value, places[-1])
    rows = [b.gep(x, [b.mul(I64(r), x_step)]) for r in range(HIGH)]
    with steps(b, I64(0), count, 1) as i:
        line = b.gep(y, [b.mul(i, y_step)])
        right = [vec.read(b, line, "fp32", I64(LANES * w)) for w in range(wide)]
        for r in range(HIGH):
            left = vec.scalar(b, rows[r], i)
            for w in range(wide):
                place = places[r * wide + w]
                b.store(vec.fma(b, left, right[w], b.load(place)), place)
    return [b.load(place) for place in places]


def _by_widths(b: Any, count: Any, block: Callable[[Any, Any, int], None]) -> None:
    """``block(i, r, how many vectors)`` of 24 rows and `count` columns, a multiple of 16."""
    whole = b.sub(count, b.srem(count, I64(LANES * WIDE)))
    with steps(b, I64(0), whole, LANES * WIDE) as i, steps(b, I64(0), I64(24), HIGH) as r:
        block(i, r, WIDE)
    with steps(b, whole, count, LANES) as i, steps(b, I64(0), I64(24), HIGH) as r:
        block(i, r, 1)


@intrinsic  # type: ignore[untyped-decorator]
def panel_scores(typingctx: Any, out: Any, width: Any, q: Any, keys: Any, count: Any, dim: Any, room: Any) -> Any:
    """``out[r, i] = q[r] . key[i]`` of 24 rows, and i < count, a multiple of 16; `keys` by `pack_keys`."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out_, width_, q_, keys_, count_, dim_, room_ = args

        def block(i: Any, r: Any, wide: int) -> None:
            zeros = [vec.number(0.0)] * (HIGH * wide)
            found = _panel(b, b.gep(q_, [b.mul(r, dim_)]), dim_, b.gep(keys_, [i]), room_, dim_, wide, zeros)
            for j, value in enumerate(found):
                row = b.mul(b.add(r, I64(j // wide)), width_)
                vec.write(b, out_, b.add(b.add(row, i), I64(LANES * (j % wide))), value)

        _by_widths(b, count_, block)
        return context.get_dummy_value()

    n = types.int64
    return types.void(out, n, q, keys, n, n, n), codegen


@intrinsic  # type: ignore[untyped-decorator]
def panel_weigh(typingctx: Any, acc: Any, dim: Any, p: Any, width: Any, values: Any, count: Any) -> Any:
    """``acc[r] += sum(p[r, i] * value[i] for i < count)`` of 24 rows; `values` by `pack_values`."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        acc_, dim_, p_, width_, values_, count_ = args

        def block(d: Any, r: Any, wide: int) -> None:
            at = [
                b.add(b.add(b.mul(b.add(r, I64(j // wide)), dim_), d), I64(LANES * (j % wide)))
                for j in range(HIGH * wide)
            ]
            start = [vec.read(b, acc_, "fp32", a) for a in at]
            rows = b.gep(p_, [b.mul(r, width_)])
            for a, value in zip(
                at, _panel(b, rows, width_, b.gep(values_, [d]), dim_, count_, wide, start), strict=True
            ):
                vec.write(b, acc_, a, value)

        _by_widths(b, dim_, block)
        return context.get_dummy_value()

    n = types.int64
    return types.void(acc, n, p, n, values, n), codegen


@intrinsic  # type: ignore[untyped-decorator]
def stretch(typingctx: Any, x: Any, n: Any, by: Any) -> Any:
    """``x[i] *= by`` for i < n, a multiple of 16."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        factor = vec.fill(b, args[2])
        with steps(b, I64(0), args[1], LANES) as i:
            vec.write(b, args[0], i, b.fmul(vec.read(b, args[0], "fp32", i), factor))
        return context.get_dummy_value()

    return types.void(x, types.int64, types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def soften_row(
    typingctx: Any, x: Any, p: Any, count: Any, full: Any, begin: Any, end: Any, alive: Any, top: Any, total: Any,
    scale: Any,
) -> Any:  # fmt: skip
    """``p[i] = 2^(scale * x[i] - top)`` for i < count, a multiple of 16; what the row's sums so far are to be
    multiplied by.

    Args:
        p: fp32, or bf16 by the CPU's own rounding; may be x.
        full: a multiple of 64. So many from the first are seen, all; of the others those from `begin` to `end` where
            `alive` is not 0.
        top, total: the largest logit and the sum of weights so far; updated.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x_, p_, count_, full_, begin_, end_, alive_, top_, total_, scale_ = args
        # A logit that is not seen becomes -inf by the scale, which may be negative, and as good as 0.
        scale_ = b.select(b.fcmp_ordered("==", scale_, F32(0.0)), F32(2.0**-120), scale_)
        unseen = b.select(b.fcmp_ordered("<", scale_, F32(0.0)), F32(float("inf")), F32(float("-inf")))
        by, low, none = vec.fill(b, scale_), vec.number(float("-inf")), vec.fill(b, unseen)
        old = vec.scalar(b, top_, I64(0))
        lane = ir.Constant(vec.vector(I32), [I32(j) for j in range(LANES)])
        first, size = b.trunc(begin_, I32), b.trunc(b.sub(end_, begin_), I32)
        size = b.select(b.icmp_signed("<", size, I32(0)), I32(0), size)
        tops, parts = ([cgutils.alloca_once(b, vec.vector()) for _ in range(4)] for _ in range(2))
        for place in tops:
            b.store(old, place)
        with steps(b, I64(0), full_, 4 * LANES) as i:
            for j, place in enumerate(tops):
                logit = b.fmul(vec.read(b, x_, "fp32", b.add(i, I64(LANES * j))), by)
                b.store(vec.larger(b, logit, b.load(place)), place)
        with steps(b, full_, count_, LANES) as i:
            at = b.sub(b.add(lane, vec.fill(b, b.trunc(i, I32))), vec.fill(b, first))
            seen = b.icmp_unsigned("<", at, vec.fill(b, size))
            seen = b.and_(seen, b.fcmp_ordered("!=", vec.read(b, alive_, "fp32", i), vec.number(0.0)))
            logit = b.select(seen, vec.read(b, x_, "fp32", i), none)
            vec.write(b, x_, i, logit)
            b.store(vec.larger(b, b.fmul(logit, by), b.load(tops[0])), tops[0])
        most = vec.across(b, vec.folded(b, tops, vec.larger), 1, vec.larger)
        base = b.select(b.fcmp_ordered(">", most, low), most, vec.number(0.0))
        kept = b.extract_element(vec.exp2(b, b.fsub(old, base)), I32(0))
        for place in parts:
            b.store(vec.number(0.0), place)

        def weight(at: Any, place: Any) -> None:
            y = vec.fma(b, vec.read(b, x_, "fp32", at), by, b.fneg(base))
            e = vec.exp2(b, y, 5 if p.kind == "bf16" else 6)
            vec.write(b, p_, at, vec.to_bf16(b, e) if p.kind == "bf16" else e)
            b.store(b.fadd(b.load(place), e), place)

        whole = b.and_(count_, I64(-4 * LANES))
        with steps(b, I64(0), whole, 4 * LANES) as i:
            for j, place in enumerate(parts):
                weight(b.add(i, I64(LANES * j)), place)
        with steps(b, whole, count_, LANES) as i:
            weight(i, parts[0])
        part = vec.across(b, vec.folded(b, parts, vec.add), 1, vec.add)
        before = b.bitcast(b.load(total_), F32)
        now = b.fadd(b.fmul(before, kept), b.extract_element(part, I32(0)))
        b.store(b.bitcast(now, total_.type.pointee), total_)
        b.store(b.bitcast(b.extract_element(most, I32(0)), top_.type.pointee), top_)
        return kept

    n, f = types.int64, types.float32
    return f(x, p, n, n, n, n, alive, top, total, f), codegen
