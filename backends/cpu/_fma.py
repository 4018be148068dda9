"""Attention's products by vectors of fp32, for any format of the cache; and the softmax between them.

Logits of up to four query heads that share a key/value head lie together: ``[keys, width]``, width 1, 2 or 4.
Each row of the cache is read, and widened, once for them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from hal.backends.cpu import _vector as vec
from hal.backends.cpu._bits import FORMATS, I64, types
from hal.backends.cpu._jit import inline
from hal.backends.cpu._vector import LANES, steps

LOG2E = 1 / math.log(2)
"""Kernels take the scale of logits times this: their weights are powers of 2."""


def literal(x: Any) -> int:
    if not isinstance(x, types.IntegerLiteral):  # numba asks without the literal first
        raise TypingError("a literal int is needed")
    return int(x.literal_value)


def width(heads: int) -> int:
    return 4 if heads == 3 else heads


def ask(b: Any, cache: Any, p: Any, at: Any, i: Any, asked: Any, begin: Any, end: Any) -> None:
    """Asks for elements [begin, end) of row i, or of the last of the `asked` rows."""
    last = b.sub(asked, I64(1))
    row = b.load(b.gep(at, [b.select(b.icmp_signed("<", i, last), i, last)]))
    with steps(b, begin, end, 512 // FORMATS[cache.kind].bits) as d:
        vec.prefetch(b, p, b.add(row, d))


@intrinsic  # type: ignore[untyped-decorator]
def dots(
    typingctx: Any, out: Any, q: Any, dim: Any, cache: Any, at: Any, count: Any, heads: Any, coming: Any, asked: Any
) -> Any:  # fmt: skip
    """``out[i, h] = q[h] . key[i]`` for i < count, a multiple of 16 / width; `q` fp32.

    coming, asked: where the rows are that are asked for meanwhile, as many as there are of these; how many, or 0.
    """
    g = literal(heads)
    c = width(g)
    each = LANES // c

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out_, q_, dim_, cache_, at_, count_, _, coming_, asked_ = args
        some = b.icmp_signed(">", asked_, I64(0))
        with steps(b, I64(0), count_, each) as i:
            with b.if_then(some):
                for k in range(each):
                    ask(b, cache, cache_, coming_, b.add(i, I64(k)), asked_, I64(0), dim_)
            rows = [b.gep(cache_, [b.load(b.gep(at_, [b.add(i, I64(k))]))]) for k in range(each)]
            total = [[cgutils.alloca_once_value(b, vec.number(0.0)) for _ in range(g)] for _ in range(each)]
            for one in total:
                for place in one:
                    b.store(vec.number(0.0), place)
            with steps(b, I64(0), dim_, LANES) as d:
                x = [vec.read(b, q_, "fp32", b.add(b.mul(I64(h), dim_), d)) for h in range(g)]
                for k in range(each):
                    y = vec.read(b, rows[k], cache.kind, d)
                    for h in range(g):
                        b.store(vec.fma(b, x[h], y, b.load(total[k][h])), total[k][h])
            found = [b.load(total[k][h]) if h < g else None for k in range(each) for h in range(c)]
            vec.write(b, out_, b.mul(i, I64(c)), vec.sums(b, found))
        return context.get_dummy_value()

    n = types.int64
    return types.void(out, q, n, cache, at, n, heads, coming, n), codegen


@intrinsic  # type: ignore[untyped-decorator]
def soften(
    typingctx: Any, x: Any, valid: Any, count: Any, tops: Any, sums: Any, keep: Any, scale: Any, heads: Any
) -> Any:  # fmt: skip
    """``x[i] = 2^(scale * x[i] - top)`` of each head for i < valid, 0 for the rest of `count`, a multiple of 16.

    tops, sums, keep: 16 each, lane i of head i % width: the largest logit so far, the sum of weights so far (over all
    lanes of a head), and what the output so far is to be multiplied by.
    """
    c = width(literal(heads))

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x_, valid_, count_, tops_, sums_, keep_, scale_, _ = args
        zero, low = I64(0), vec.number(float("-inf"))
        lane = ir.Constant(vec.vector(I64), [I64(j) for j in range(LANES)])
        by = vec.fill(b, scale_)
        old = vec.read(b, tops_, "fp32", zero)
        place = cgutils.alloca_once_value(b, old)
        b.store(old, place)
        with steps(b, zero, count_, LANES) as i:
            there = b.icmp_signed("<", lane, vec.fill(b, b.sub(valid_, i)))
            logit = b.select(there, b.fmul(vec.read(b, x_, "fp32", i), by), low)
            vec.write(b, x_, i, logit)
            b.store(vec.larger(b, logit, b.load(place)), place)
        top = vec.across(b, b.load(place), c, vec.larger)
        base = b.select(b.fcmp_ordered(">", top, low), top, vec.number(0.0))
        kept = vec.exp2(b, b.fsub(old, base))
        total = cgutils.alloca_once_value(b, kept)
        b.store(b.fmul(kept, vec.read(b, sums_, "fp32", zero)), total)
        with steps(b, zero, count_, LANES) as i:
            e = vec.exp2(b, b.fsub(vec.read(b, x_, "fp32", i), base))
            vec.write(b, x_, i, e)
            b.store(b.fadd(b.load(total), e), total)
        for to, value in ((tops_, top), (sums_, b.load(total)), (keep_, kept)):
            vec.write(b, to, zero, value)
        return context.get_dummy_value()

    n, f = types.int64, types.float32
    return types.void(x, n, n, tops, sums, keep, f, heads), codegen


@intrinsic  # type: ignore[untyped-decorator]
def weigh(
    typingctx: Any, acc: Any, dim: Any, cache: Any, at: Any, p: Any, count: Any, keep: Any, heads: Any, coming: Any,
    asked: Any,
) -> Any:  # fmt: skip
    """``acc[h] = keep[h] * acc[h] + sum(p[i, h] * value[i])`` for i < count; coming, asked: as of `dots`."""
    g = literal(heads)
    c = width(g)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        acc_, dim_, cache_, at_, p_, count_, keep_, _, coming_, asked_ = args
        some = b.icmp_signed(">", asked_, I64(0))
        many = 8 if g < 3 else 4

        def block(d: Any, lanes: int) -> None:
            places = []
            for h in range(g):
                by = vec.scalar(b, keep_, I64(h))
                for w in range(lanes):
                    at0 = b.add(b.add(b.mul(I64(h), dim_), d), I64(LANES * w))
                    places.append((cgutils.alloca_once(b, vec.vector()), at0))
                    b.store(b.fmul(vec.read(b, acc_, "fp32", at0), by), places[-1][0])
            with steps(b, I64(0), count_, 1) as i:
                with b.if_then(some):
                    ask(b, cache, cache_, coming_, i, asked_, d, b.add(d, I64(LANES * lanes)))
                row = b.gep(cache_, [b.add(b.load(b.gep(at_, [i])), d)])
                y = [vec.read(b, row, cache.kind, I64(LANES * w)) for w in range(lanes)]
                for h in range(g):
                    weight = vec.scalar(b, p_, b.add(b.mul(i, I64(c)), I64(h)))
                    for w in range(lanes):
                        place = places[h * lanes + w][0]
                        b.store(vec.fma(b, weight, y[w], b.load(place)), place)
            for place, at0 in places:
                vec.write(b, acc_, at0, b.load(place))

        whole = b.sub(dim_, b.srem(dim_, I64(LANES * many)))
        with steps(b, I64(0), whole, LANES * many) as d:
            block(d, many)
        with steps(b, whole, dim_, LANES) as d:
            block(d, 1)
        return context.get_dummy_value()

    n = types.int64
    return types.void(acc, n, cache, at, p, n, keep, heads, coming, n), codegen


@intrinsic  # type: ignore[untyped-decorator]
def rescale(typingctx: Any, acc: Any, dim: Any, keep: Any, heads: Any) -> Any:
    """``acc[h] *= keep[h]``, `dim` a multiple of 16, unless all that is kept is whole."""
    g = literal(heads)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        acc_, dim_, keep_, _ = args
        kept = vec.read(b, keep_, "fp32", I64(0))
        changed = b.fcmp_unordered("!=", kept, vec.number(1.0))
        some = b.icmp_unsigned("!=", b.bitcast(changed, ir.IntType(LANES)), ir.IntType(LANES)(0))
        with b.if_then(some):
            for h in range(g):
                by = vec.scalar(b, keep_, I64(h))
                begin = b.mul(I64(h), dim_)
                with steps(b, begin, b.add(begin, dim_), LANES) as i:
                    vec.write(b, acc_, i, b.fmul(vec.read(b, acc_, "fp32", i), by))
        return context.get_dummy_value()

    return types.void(acc, types.int64, keep, heads), codegen


@inline
def logsum(total, top):  # type: ignore[no-untyped-def]
    """The logarithm of ``total * 2^top``; -inf of nothing."""
    if total == 0.0:
        return np.float32(-np.inf)
    return np.float32(top * math.log(2) + math.log(total))
