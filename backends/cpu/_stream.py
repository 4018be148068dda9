"""Attention of few queries in bf16 as one stream of keys through the matrix unit (`_amx`): values of up to 128 dims.

While the unit multiplies the keys of one chunk and the values of the last, vectors make weights of the chunk between;
the sums stay in tiles, so nothing but a new maximum stops the stream. Weights are of a maximum that may be up to
2^SLACK too small: rescaling is rare, and what a weight is rounded to is relative to itself.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from hal.backends.cpu import _vector as vec
from hal.backends.cpu._amx import call, keep, load, product, zero
from hal.backends.cpu._bits import F32, I8, I32, I64, types
from hal.backends.cpu._vector import LANES, steps

MOST = 128
"""Dims of a value whose sums fit in tiles."""
CHUNK = 32
"""Keys that are done together."""
SLACK = 8
"""By how much a logit, in log2, is above the maximum that weights are of before they are of a new one."""
SUMS, ROWS, QUERY, WEIGHTS, FIRST = 0, 1, 2, 3, 4
"""Tiles: logits; keys or values; queries; weights; sums of 32 dims of values, and the next."""


def _rows(b: Any, tile: int, at: Any, by: Any, i: Any, d: Any) -> None:
    """16 rows that `list_tiles` found, from element `d` on."""
    first, step = b.load(b.gep(at, [i])), b.load(b.gep(by, [i]))
    call(b, "tileloadd64", I8(tile), b.inttoptr(b.add(first, b.shl(d, I64(1))), I8.as_pointer()), step)


def _ask(b: Any, at: Any, by: Any, i: Any, d: Any) -> None:
    """Asks for the lines that `_rows` will read."""
    first, step = b.load(b.gep(at, [i])), b.load(b.gep(by, [i]))
    line = b.add(first, b.shl(d, I64(1)))
    for _ in range(LANES):
        vec.prefetch(b, b.inttoptr(line, I8.as_pointer()), I64(0))
        line = b.add(line, step)


def _lanes(b: Any, x: Any, i: Any, by: Any) -> list[Any]:
    """The logits of a chunk, scaled: of four keys and four heads each."""
    return [b.fmul(vec.read(b, x, "fp32", b.add(i, I64(LANES * j))), by) for j in range(CHUNK // 4)]


def _tree(b: Any, x: list[Any], op: Any) -> Any:
    while len(x) > 1:
        x = [op(b, x[j], x[j + 1]) for j in range(0, len(x), 2)]
    return x[0]


@intrinsic  # type: ignore[untyped-decorator]
def stream(
    typingctx: Any, acc: Any, fresh: Any, v_dim: Any, q: Any, dim: Any, keys: Any, keys_by: Any, values: Any,
    values_by: Any, count: Any, logits: Any, p: Any, state: Any, scale: Any, far: Any,
) -> Any:  # fmt: skip
    """Attention of four queries over `count` more keys: ``acc[h]`` as of `tile_weigh`, `state` as of `tile_weights`.

    Args:
        fresh: these keys are the first: `acc` holds nothing yet.
        q: by `pack_queries`.
        keys, keys_by, values, values_by: by `list_tiles`.
        logits, p: room for two chunks: 256 fp32 and 1024 bf16.
        far: the rows of the next chunk are asked for: worth it where they are in no near cache, dear where they are.
        state: 16 each, lane i of head i % 4: the maximum, -inf before the first, and the sum of weights; updated.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        acc_, fresh_, v_dim_, q_, dim_, keys_, keys_by_, values_, values_by_, count_ = args[:10]
        logits_, p_, state_, scale_, far_ = args[10:]
        low, zeros, word = vec.number(float("-inf")), vec.number(0.0), vec.vector(I32)
        # Logits of no key are stored as what the scale, which may be negative, makes -inf; of 0, as good as 0 is.
        scale_ = b.select(b.fcmp_ordered("==", scale_, F32(0.0)), F32(2.0**-120), scale_)
        unseen = b.select(b.fcmp_ordered("<", scale_, F32(0.0)), F32(float("inf")), F32(float("-inf")))
        by, none = vec.fill(b, scale_), vec.fill(b, unseen)
        half = b.lshr(v_dim_, I64(1))
        row = b.shl(half, I64(2))
        groups = b.ashr(b.add(count_, I64(15)), I64(4))
        base, total = cgutils.alloca_once(b, vec.vector()), cgutils.alloca_once(b, vec.vector())

        def after(i: Any) -> Any:
            """The sixteen keys that are done a chunk later, if there are."""
            j = b.add(i, I64(CHUNK // LANES))
            return b.select(b.icmp_signed("<", j, groups), j, i)

        def each(do: Any) -> None:
            """Of the tiles of sums that there are."""
            for w in range(MOST // 32):
                if w == 0:
                    do(w)
                else:
                    with b.if_then(b.icmp_signed("<", I64(LANES * w), half)):
                        do(w)

        def dots(i: Any) -> None:
            """The logits of the chunk from key `i`."""
            to = b.shl(b.and_(i, I64(CHUNK)), I64(2))
            for j in range(CHUNK // LANES):
                place = b.add(b.lshr(i, I64(4)), I64(j))
                zero(b, SUMS)
                with steps(b, I64(0), dim_, 32) as d:
                    load(b, QUERY, q_, b.shl(d, I64(2)), I64(16))
                    _rows(b, ROWS, keys_, keys_by_, place, d)
                    with b.if_then(far_):
                        _ask(b, keys_, keys_by_, after(place), d)
                    product(b, SUMS, ROWS, QUERY)
                keep(b, SUMS, logits_, b.add(to, I64(64 * j)), I64(16))
            few = b.icmp_signed(">", b.add(i, I64(CHUNK)), count_)
            with b.if_then(few, likely=False), steps(b, b.sub(count_, i), I64(CHUNK), 1) as k:
                at = b.bitcast(b.gep(logits_, [b.add(to, b.shl(k, I64(2)))]), vec.vector(F32, 4).as_pointer())
                b.store(vec.shuffle(b, none, none, range(4)), at, align=4)

        def weigh(i: Any) -> None:
            """Adds the values of the chunk from key `i`."""
            of = b.shl(b.and_(i, I64(CHUNK)), I64(4))
            for j in range(CHUNK // LANES):
                place = b.add(b.lshr(i, I64(4)), I64(j))
                load(b, WEIGHTS, p_, b.add(of, I64(256 * j)), I64(64))

                def one(w: int, place: Any = place) -> None:
                    _rows(b, ROWS, values_, values_by_, place, I64(32 * w))
                    with b.if_then(far_):
                        _ask(b, values_, values_by_, after(place), I64(32 * w))
                    product(b, FIRST + w, WEIGHTS, ROWS)

                each(one)

        def soften(i: Any) -> None:
            """Weights of the chunk from key `i`."""
            of = b.shl(b.and_(i, I64(CHUNK)), I64(2))
            x = _lanes(b, logits_, of, by)
            old = b.load(base)
            most = _tree(b, x, vec.larger)
            above = b.fcmp_ordered(">", most, b.fadd(old, vec.number(float(SLACK))))
            some = b.icmp_unsigned("!=", b.bitcast(above, ir.IntType(LANES)), ir.IntType(LANES)(0))
            with b.if_then(some, likely=False):
                top = vec.across(b, vec.larger(b, most, old), 4, vec.larger)
                kept = vec.exp2(b, b.fsub(old, top))
                b.store(top, base)
                b.store(b.fmul(b.load(total), kept), total)
                each(lambda w: keep(b, FIRST + w, acc_, I64(LANES * w), row))
                for h in range(4):
                    one = vec.shuffle(b, kept, kept, [h] * LANES)
                    begin = b.mul(I64(h), v_dim_)
                    with steps(b, begin, b.add(begin, v_dim_), LANES) as d:
                        vec.write(b, acc_, d, b.fmul(vec.read(b, acc_, "fp32", d), one))
                each(lambda w: load(b, FIRST + w, acc_, I64(LANES * w), row))
            now = b.load(base)
            now = b.select(b.fcmp_ordered(">", now, low), now, zeros)
            e = [vec.exp2(b, b.fsub(y, now), 5) for y in x]
            b.store(b.fadd(b.load(total), _tree(b, e, vec.add)), total)
            for j in range(CHUNK // LANES):
                halves = [vec.shuffle(b, e[4 * j + k], e[4 * j + k + 1], range(32)) for k in (0, 2)]
                for h in range(4):
                    line = b.zext(vec.to_bf16(b, vec.shuffle(b, halves[0], halves[1], range(h, 64, 4))), word)
                    at = b.add(b.shl(b.and_(i, I64(CHUNK)), I64(4)), I64(256 * j + 64 * h))
                    vec.write(b, p_, at, line)
                    vec.write(b, p_, b.add(at, I64(32)), b.shl(line, ir.Constant(word, [I32(16)] * LANES)))

        b.store(vec.read(b, state_, "fp32", I64(0)), base)
        b.store(vec.read(b, state_, "fp32", I64(LANES)), total)
        with b.if_else(fresh_) as (then, otherwise):
            with then:
                each(lambda w: zero(b, FIRST + w))
            with otherwise:
                each(lambda w: load(b, FIRST + w, acc_, I64(LANES * w), row))
        dots(I64(0))
        # The last weights are made while nothing is multiplied but the values before them.
        last = b.shl(b.ashr(b.sub(count_, I64(1)), I64(5)), I64(5))
        with steps(b, I64(0), last, CHUNK) as i:
            dots(b.add(i, I64(CHUNK)))
            with b.if_then(b.icmp_signed(">", i, I64(0))):
                weigh(b.sub(i, I64(CHUNK)))
            soften(i)
        with b.if_then(b.icmp_signed(">", last, I64(0))):
            weigh(b.sub(last, I64(CHUNK)))
        soften(last)
        weigh(last)
        each(lambda w: keep(b, FIRST + w, acc_, I64(LANES * w), row))
        vec.write(b, state_, I64(0), b.load(base))
        vec.write(b, state_, I64(LANES), b.load(total))
        return context.get_dummy_value()

    n = types.int64
    return types.void(
        acc, types.boolean, n, q, n, keys, keys_by, values, values_by, n, logits, p, state, types.float32, types.boolean
    ), codegen
