"""Attention in one pass over the cache as it lies: no row is gathered, and no thread pool wakes for little work.

An item is a request and one of its key/value heads. Its keys come in blocks: dot products with every query head of the
group, a running maximum, exp, and the values weighted into fp32 sums, in vectors of 16. Invariant: an
offset into the cache is made only of a slot that was compared with its size.

Many queries of one request are matrix products, which torch's kernel does in blocks: `MOST` draws the line.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from hal.backends.cpu._bits import F32, FORMATS, I32, I64, cast, decode, load, shift, store, types, view
from hal.backends.cpu._call import FORMAT
from hal.backends.cpu._index import get, index
from hal.backends.cpu._jit import Kernel, inline
from hal.backends.cpu._pool import run
from hal.backends.cpu._team import take
from hal.kv.view import count_slots, page_size, strides

LANES = 16
BLOCK = 64
"""Keys in a block: their logits stay in the L1 cache, a multiple of LANES."""
GROUP = 16
"""Query heads that share a key/value head; of more, torch makes a matrix product that is faster."""
MOST = {torch.float32: 1 << 14, torch.bfloat16: 1 << 9, torch.float16: 1 << 9}
"""Queries times keys of a request up to which one at a time is faster than torch's kernel, which has matrix units for
16 bits. A single query always is."""


# --- vectors ----------------------------------------------------------------------------------------


def _read(b: Any, p: Any, kind: str, at: Any) -> Any:
    raw = b.gep(p, [at])
    where = b.bitcast(raw, ir.VectorType(raw.type.pointee, LANES).as_pointer())
    return decode(b, kind, b.load(where, align=FORMATS[kind].bits // 8))


def _write(b: Any, p: Any, at: Any, value: Any) -> None:
    b.store(value, b.bitcast(b.gep(p, [at]), value.type.as_pointer()), align=4)


def _fill(b: Any, x: Any) -> Any:
    """A scalar in every lane."""
    none = ir.Constant(ir.VectorType(x.type, LANES), ir.Undefined)
    one = b.insert_element(none, x, I32(0))
    return b.shuffle_vector(one, none, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))


def _number(x: float) -> Any:
    return ir.Constant(ir.VectorType(F32, LANES), [F32(x)] * LANES)


def _sum(b: Any, x: Any) -> Any:
    """Of the lanes, pairwise."""
    n = LANES
    while n > 1:
        n //= 2
        halves = [ir.Constant(ir.VectorType(I32, n), list(range(o, o + n))) for o in (0, n)]
        x = b.fadd(*(b.shuffle_vector(x, x, half) for half in halves))
    return b.extract_element(x, I32(0))


@intrinsic  # type: ignore[untyped-decorator]
def _dot(typingctx: Any, x: Any, y: Any, n: Any) -> Any:
    """``sum(x[i] * y[i] for i < n)``, n a multiple of LANES."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        total = cgutils.alloca_once_value(b, _number(0.0))
        with cgutils.for_range_slice(b, I64(0), args[2], I64(LANES)) as (i, _):
            product = b.fmul(_read(b, args[0], x.kind, i), _read(b, args[1], y.kind, i), ("contract",))
            b.store(b.fadd(b.load(total), product, ("contract",)), total)
        return _sum(b, b.load(total))

    return types.float32(x, y, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _add(typingctx: Any, y: Any, n: Any, x: Any, at: Any, w: Any) -> Any:
    """``y[i] += sum(w[j] * x[at[j] + i] for j < 4)``, n a multiple of LANES; `at` int64, `w` fp32."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        y_, n_, x_, at_, w_ = args
        rows = [b.gep(x_, [b.load(b.gep(at_, [I64(j)]))]) for j in range(4)]
        weights = [_fill(b, b.bitcast(b.load(b.gep(w_, [I64(j)])), F32)) for j in range(4)]
        with cgutils.for_range_slice(b, I64(0), n_, I64(LANES)) as (i, _):
            total = _read(b, y_, "fp32", i)
            for row, weight in zip(rows, weights, strict=True):
                product = b.fmul(weight, _read(b, row, x.kind, i), ("contract",))
                total = b.fadd(total, product, ("contract",))
            _write(b, y_, i, total)
        return context.get_dummy_value()

    return types.void(y, types.int64, x, at, w), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _exp(typingctx: Any, x: Any, n: Any, base: Any) -> Any:
    """``x[i] = exp(x[i] - base)`` for i < n, a multiple of LANES; their sum. For ``x[i] <= base``: below -87, 0.

    2^k exp(r) with k whole and ``|r| <= ln(2) / 2``, exp(r) by its Taylor polynomial of degree 7: the first term left
    out is 5e-9, below half a unit in the last place.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        p, n_, base_ = args
        fma = ("contract",)
        total = cgutils.alloca_once_value(b, _number(0.0))
        low = _fill(b, base_)
        with cgutils.for_range_slice(b, I64(0), n_, I64(LANES)) as (i, _):
            d = b.fsub(_read(b, p, "fp32", i), low)
            # Added to 1.5 * 2^23 a number is rounded to a whole one, which then stands in the last bits.
            moved = b.fadd(b.fmul(d, _number(math.log2(math.e)), fma), _number(12582912.0), fma)
            k = b.fsub(moved, _number(12582912.0))
            high = 0.693359375  # few bits: k times it is exact
            r = b.fsub(d, b.fmul(k, _number(high), fma), fma)
            r = b.fsub(r, b.fmul(k, _number(math.log(2) - high), fma), fma)
            e = _number(1 / math.factorial(7))
            for power in range(6, -1, -1):
                e = b.fadd(b.fmul(e, r, fma), _number(1 / math.factorial(power)), fma)
            bits = ir.VectorType(I32, LANES)
            places = b.shl(b.bitcast(moved, bits), ir.Constant(bits, [I32(23)] * LANES))
            e = b.bitcast(b.add(b.bitcast(e, bits), places), e.type)
            # Unordered: NaN stays NaN.
            e = b.select(b.fcmp_ordered("<", d, _number(-87.0)), _number(0.0), e)
            e = b.select(b.fcmp_unordered("uno", d, d), d, e)
            _write(b, p, i, e)
            b.store(b.fadd(b.load(total), e), total)
        return _sum(b, b.load(total))

    return types.float32(x, types.int64, types.float32), codegen


# --- the kernel -------------------------------------------------------------------------------------


@inline
def _clamped(p, wide, i, top):  # type: ignore[no-untyped-def]
    return min(max(get(p, wide, i), 0), top)


def _kernel(  # type: ignore[no-untyped-def]
    counter, grain, n,
    q, q_token, q_head, group, kv_heads, dim, v_dim, rows,
    k_cache, k_page, k_row, k_head, v_cache, v_page, v_row, v_head, num_slots, page,
    indptr, indptr_64, indices, indices_64, nnz, with_qo, qo, qo_64, out, out_token, out_head, lse, lse_token,
    scale, window, causal, most,
):  # fmt: skip
    # Group by group: the logits of a block, their running maximum and sum, the query in fp32, the output so far.
    scratch = np.empty(group * (BLOCK + 2 + dim + v_dim), np.float32)
    logits = view(scratch.ctypes.data, "fp32")
    tops = shift(logits, group * BLOCK)
    sums = shift(tops, group)
    query = shift(sums, group)
    acc = shift(query, group * dim)
    listed = np.empty(2 * BLOCK, np.int64)
    k_at = view(listed.ctypes.data, "i64")
    v_at = shift(k_at, BLOCK)
    begin = take(counter, grain) if grain else 0
    while begin < n:
        for item in range(begin, min(begin + grain, n) if grain else n):
            i, h = item // kv_heads, item % kv_heads
            first = _clamped(indptr, indptr_64, i, nnz)
            last = max(first, _clamped(indptr, indptr_64, i + 1, nnz))
            t_first, t_last = i, i + 1
            if with_qo:
                t_first, t_last = _clamped(qo, qo_64, i, rows), _clamped(qo, qo_64, i + 1, rows)
                if t_last - t_first > 1 and (t_last - t_first) * (last - first) > most:
                    continue
            for t in range(t_first, t_last):
                own = last - (t_last - t)
                low = max(first, own - window) if window >= 0 else first
                high = own + 1 if causal else last
                for g in range(group):
                    x = shift(q, t * q_token + (h * group + g) * q_head)
                    for d in range(dim):
                        store(query, g * dim + d, load(x, d))
                    for d in range(v_dim):
                        store(acc, g * v_dim + d, np.float32(0.0))
                    store(tops, g, np.float32(-np.inf))
                    store(sums, g, np.float32(0.0))
                j = low
                while j < high:
                    # A block of the keys that are there.
                    m = 0
                    while j < high and m < BLOCK:
                        slot = get(indices, indices_64, j)
                        j += 1
                        if 0 <= slot < num_slots:
                            if page == 1:
                                store(k_at, m, slot * k_page + h * k_head)
                                store(v_at, m, slot * v_page + h * v_head)
                            else:
                                whole = slot // page
                                rest = slot - whole * page
                                store(k_at, m, whole * k_page + rest * k_row + h * k_head)
                                store(v_at, m, whole * v_page + rest * v_row + h * v_head)
                            m += 1
                    if m == 0:
                        break
                    padded = (m + LANES - 1) // LANES * LANES
                    for g in range(group):
                        mine = shift(logits, g * BLOCK)
                        x = shift(query, g * dim)
                        old = load(tops, g)
                        top = old
                        for c in range(m):
                            logit = _dot(x, shift(k_cache, load(k_at, c)), dim) * scale
                            store(mine, c, logit)
                            if logit > top:
                                top = logit
                        for c in range(m, padded):
                            store(mine, c, np.float32(-np.inf))
                        base = top if top > -np.inf else np.float32(0.0)
                        total = _exp(mine, padded, base)
                        y = shift(acc, g * v_dim)
                        if top != old:
                            keep = np.float32(math.exp(old - base))
                            total += load(sums, g) * keep
                            for d in range(v_dim):
                                store(y, d, load(y, d) * keep)
                            store(tops, g, top)
                        else:
                            total += load(sums, g)
                        store(sums, g, total)
                    # Four values at a time. What is too many repeats one that is there, times exp(-inf).
                    for c in range(m, (m + 3) // 4 * 4):
                        store(v_at, c, load(v_at, 0))
                    for c in range(0, m, 4):
                        for g in range(group):
                            _add(
                                shift(acc, g * v_dim),
                                v_dim,
                                v_cache,
                                shift(v_at, c),
                                shift(logits, g * BLOCK + c),
                            )
                for g in range(group):
                    y = shift(out, t * out_token + (h * group + g) * out_head)
                    total = load(sums, g)
                    by = np.float32(1.0) / total if total != 0.0 else np.float32(0.0)
                    for d in range(v_dim):
                        store(y, d, load(acc, g * v_dim + d) * by)
                    if lse_token:
                        where = shift(cast(lse, "fp32"), t * lse_token + h * group + g)
                        store(
                            where,
                            0,
                            load(tops, g) + np.float32(math.log(total))
                            if total != 0.0
                            else np.float32(-np.inf),
                        )
        begin = take(counter, grain) if grain else n
    # Their last use: numba frees an array right after that, whoever still holds its address.
    scratch[0], listed[0] = 0.0, 0


kernel = Kernel(
    _kernel,
    "i64 int int  *x int int int int int int int  *x int int int *x int int int int int "
    "u8 bool u8 bool int bool u8 bool *x int int u8 int  float int bool int",
    shared=True,
)


def fits(q: Tensor, k_cache: Tensor, v_cache: Tensor, logit_cap: float) -> bool:
    """Whether the kernel computes this, and best: heads of whole vectors, few a group, a cache of q's dtype, no cap."""
    dim, v_dim, group = q.shape[2], v_cache.shape[-1], q.shape[1] // k_cache.shape[-2]
    return k_cache.dtype == q.dtype and group <= GROUP and not (dim % LANES or v_dim % LANES or logit_cap)


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, qo_indptr: Tensor | None, kv_indptr: Tensor, kv_indices: Tensor,
    out: Tensor, lse: Tensor | None, scale: float, sliding_window: int, causal: bool,
) -> None:  # fmt: skip
    """Either op, for all requests of one query (qo_indptr None: all of them), or of few by `MOST`."""
    rows, heads, dim = q.shape
    bs, nnz = kv_indptr.shape[0] - 1, kv_indices.shape[0]
    kv_heads, v_dim = k_cache.shape[-2], v_cache.shape[-1]
    work = nnz * (dim + v_dim) * q.itemsize * -(-rows // max(1, bs))
    run(
        kernel, (FORMAT[q.dtype],), bs * kv_heads, work // max(1, bs),
        (
            q.data_ptr(), *q.stride()[:2], heads // kv_heads, kv_heads, dim, v_dim, rows,
            k_cache.data_ptr(), *strides(k_cache), v_cache.data_ptr(), *strides(v_cache),
            count_slots(k_cache), page_size(k_cache), *index(kv_indptr), *index(kv_indices), nnz,
            qo_indptr is not None, *index(qo_indptr), out.data_ptr(), *out.stride()[:2],
            0 if lse is None else lse.data_ptr(), 0 if lse is None else heads, scale,
            min(sliding_window, 1 << 40), causal, MOST[q.dtype],
        ),
    )  # fmt: skip
