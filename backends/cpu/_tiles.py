"""Matrix products of attention by tiles (`_amx`), for many queries: keys and values packed as second factors."""

from __future__ import annotations

from typing import Any

from numba.extending import intrinsic

from hal.backends.cpu import _vector as vec
from hal.backends.cpu._amx import TILE, keep, load, product, zero
from hal.backends.cpu._bits import I32, I64, types
from hal.backends.cpu._panels import there, transposed
from hal.backends.cpu._vector import LANES, steps


@intrinsic  # type: ignore[untyped-decorator]
def tile_keys(typingctx: Any, to: Any, cache: Any, at: Any, count: Any, dim: Any) -> Any:
    """Of each 16 keys a tile for each 32 dims; a multiple of 16. No key where `at` is -1: 0."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        to_, cache_, at_, count_, dim_ = args
        with steps(b, I64(0), count_, LANES) as i:
            places = [b.load(b.gep(at_, [b.add(i, I64(k))])) for k in range(LANES)]
            with steps(b, I64(0), dim_, 32) as d:
                pairs = [b.bitcast(there(b, cache_, cache.kind, (place, d), 32), vec.vector(I32)) for place in places]
                first = b.add(b.mul(i, dim_), b.shl(d, I64(4)))
                for j, row in enumerate(transposed(b, pairs)):
                    vec.write(b, to_, b.add(first, I64(32 * j)), row)
        return context.get_dummy_value()

    n = types.int64
    return types.void(to, cache, at, n, n), codegen


@intrinsic  # type: ignore[untyped-decorator]
def tile_values(typingctx: Any, to: Any, cache: Any, at: Any, count: Any, dim: Any) -> Any:
    """Of each 32 values a tile for each 16 dims; of each 32 dims, two tiles have those that `sort_row` sorts."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        to_, cache_, at_, count_, dim_ = args
        low = [s + o + j for s in range(0, 32, 8) for j in range(4) for o in (0, 32)]
        with steps(b, I64(0), count_, 2) as c:
            places = [b.load(b.gep(at_, [b.add(c, I64(r))])) for r in range(2)]
            chunk = b.mul(b.lshr(c, I64(5)), b.mul(dim_, I64(32)))
            first = b.add(chunk, b.shl(b.and_(c, I64(31)), I64(4)))
            with steps(b, I64(0), dim_, 32) as d:
                x, y = (there(b, cache_, cache.kind, (place, d), 32) for place in places)
                here = b.add(first, b.shl(d, I64(5)))
                vec.write(b, to_, here, vec.shuffle(b, x, y, low))
                vec.write(b, to_, b.add(here, I64(TILE)), vec.shuffle(b, x, y, [j + 4 for j in low]))
        return context.get_dummy_value()

    n = types.int64
    return types.void(to, cache, at, n, n), codegen


@intrinsic  # type: ignore[untyped-decorator]
def sort_row(typingctx: Any, to: Any, x: Any, n: Any, by: Any) -> Any:
    """Sums of `tile_values` times `by`, in the order of their dims, as bf16."""
    order = [s + o + j for s in range(0, 16, 4) for o in (0, 16) for j in range(4)]

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        to_, x_, n_, by_ = args
        with steps(b, I64(0), n_, 32) as i:
            one, two = (vec.read(b, x_, "fp32", b.add(i, I64(j))) for j in (0, LANES))
            row = b.fmul(vec.shuffle(b, one, two, order), vec.fill(b, by_, 32))
            vec.write(b, to_, i, vec.to_bf16(b, row))
        return context.get_dummy_value()

    return types.void(to, x, types.int64, types.float32), codegen


def _four(b: Any, x: Any, x_step: Any, x_by: Any, y: Any, y_at: Any, y_next: Any) -> None:
    """Sums 0 to 3 of two tiles of rows (`x_step` elements apart, rows `x_by` bytes) and two of columns."""
    load(b, 4, x[0], x[1], x_by)
    load(b, 6, y, y_at, I64(64))
    product(b, 0, 4, 6)
    load(b, 7, y, b.add(y_at, y_next), I64(64))
    product(b, 1, 4, 7)
    load(b, 5, x[0], b.add(x[1], x_step), x_by)
    product(b, 2, 5, 6)
    product(b, 3, 5, 7)


@intrinsic  # type: ignore[untyped-decorator]
def tile_scores(typingctx: Any, out: Any, width: Any, q: Any, keys: Any, count: Any, dim: Any) -> Any:
    """``out[r, i] = q[r] . key[i]`` of 32 rows, and i < count, a multiple of 32; `keys` by `tile_keys`."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        out_, width_, q_, keys_, count_, dim_ = args
        q_by, out_by, down = b.shl(dim_, I64(1)), b.shl(width_, I64(2)), b.shl(width_, I64(4))
        next_rows, next_keys = b.shl(dim_, I64(4)), b.shl(dim_, I64(4))
        with steps(b, I64(0), count_, 32) as i:
            for t in range(4):
                zero(b, t)
            first = b.mul(i, dim_)
            with steps(b, I64(0), dim_, 32) as d:
                _four(b, (q_, d), next_rows, q_by, keys_, b.add(first, b.shl(d, I64(4))), next_keys)
            for t, at in enumerate((i, b.add(i, I64(16)), b.add(i, down), b.add(b.add(i, down), I64(16)))):
                keep(b, t, out_, at, out_by)
        return context.get_dummy_value()

    n = types.int64
    return types.void(out, n, q, keys, n, n), codegen


@intrinsic  # type: ignore[untyped-decorator]
def tile_sums(typingctx: Any, acc: Any, dim: Any, p: Any, width: Any, values: Any, count: Any) -> Any:
    """``acc[r] += sum(p[r, i] * value[i] for i < count)`` of 32 rows, count a multiple of 32.

    `values` are by `tile_values`. Rows of `p`, bf16, are as far apart as `width` fp32.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        acc_, dim_, p_, width_, values_, count_ = args
        p_by, acc_by, down = b.shl(width_, I64(2)), b.shl(dim_, I64(2)), b.shl(dim_, I64(4))
        next_rows = b.shl(width_, I64(5))
        with steps(b, I64(0), dim_, 32) as d:
            places = (d, b.add(d, I64(16)), b.add(d, down), b.add(b.add(d, down), I64(16)))
            for t, at in enumerate(places):
                load(b, t, acc_, at, acc_by)
            with steps(b, I64(0), count_, 32) as i:
                _four(b, (p_, i), next_rows, p_by, values_, b.add(b.mul(i, dim_), b.shl(d, I64(5))), I64(TILE))
            for t, at in enumerate(places):
                keep(b, t, acc_, at, acc_by)
        return context.get_dummy_value()

    n = types.int64
    return types.void(acc, n, p, n, values, n), codegen
