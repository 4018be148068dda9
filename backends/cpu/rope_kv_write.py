"""rope_kv_write on the CPU: rotates q and k in place, writes k and v to their cache slots, a token at a time.

q [n, Hq, D], k [n, Hk, D], v [n, Hk, Dv] with free token and head strides; caches [slots, Hk, D] or [pages, page,
Hk, D], any strides but the last. All strides below are in elements. Invariants: a row of the cache that has k's
dtype is a copy of the rotated row, never a second rotation; position and slot are compared in int64 before
an address is made of them. A token's heads stay in the L1 cache from the rotation to the copy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.extending import intrinsic
from torch import Tensor

from hal.backends.cpu._again import Memo
from hal.backends.cpu._bits import (
    FORMATS,
    I32,
    I64,
    cast,
    decode,
    encode,
    join_bf16,
    load,
    move,
    shift,
    split_bf16,
    store,
    types,
    view,
)
from hal.backends.cpu._call import E4M3, FORMAT, SAME, need_cpu, number, place
from hal.backends.cpu._jit import Kernel, inline
from hal.backends.cpu._pool import run
from hal.backends.cpu._team import take
from hal.kv.view import count_slots, page_size

LANES = 16
"""Pairs in a block: one AVX-512 register of fp32; LLVM splits it where registers are shorter."""


@intrinsic  # type: ignore[untyped-decorator]
def _rotate_block(typingctx: Any, x: Any, y: Any, cos: Any, sin: Any, i: Any, step: Any) -> Any:
    """`_rotate` of pairs i to i + LANES, in vectors; `step` is the distance within a pair, None: they are neighbours.

    Everything is loaded before anything is stored, so x and y may be one: left to LLVM, its test for
    overlap would then choose the scalar loop.
    """
    lanes = ir.VectorType

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        def block(p: Any, at: Any, n: int) -> Any:
            raw = b.gep(p, [at])
            return b.bitcast(raw, lanes(raw.type.pointee, n).as_pointer())

        def read(p: Any, kind: str, at: Any, n: int = LANES) -> Any:
            where = block(p, at, n)
            return decode(b, kind, b.load(where, align=FORMATS[kind].bits // 8))

        def write(p: Any, kind: str, at: Any, value: Any) -> None:
            b.store(encode(b, kind, value), block(p, at, value.type.count), align=FORMATS[kind].bits // 8)

        def mix(v: Any, w: Any, order: list[int]) -> Any:
            return b.shuffle_vector(v, w, ir.Constant(lanes(I32, len(order)), order))

        px, py, pc, ps, at, far = args
        c, s = read(pc, "fp32", at), read(ps, "fp32", at)
        if interleaved:
            first = b.shl(at, I64(1))
            both = read(px, x.kind, first, 2 * LANES)
            u, v = (mix(both, both, list(range(o, 2 * LANES, 2))) for o in (0, 1))
        else:
            u, v = read(px, x.kind, at), read(px, x.kind, b.add(at, far))
        contract = ("contract",)
        new_u = b.fsub(b.fmul(u, c, contract), b.fmul(v, s, contract), contract)
        new_v = b.fadd(b.fmul(v, c, contract), b.fmul(u, s, contract), contract)
        if interleaved:
            order = [j for i in range(LANES) for j in (i, LANES + i)]
            write(py, y.kind, first, mix(new_u, new_v, order))
        else:
            write(py, y.kind, at, new_u)
            write(py, y.kind, b.add(at, far), new_v)
        return context.get_dummy_value()

    interleaved = isinstance(step, types.NoneType)
    return types.void(x, y, cos, sin, types.int64, step), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _in_words(typingctx: Any, x: Any, y: Any) -> Any:
    """Whether `_rotate_words` can rotate x into y."""
    both = x.kind == y.kind == "bf16"
    return types.boolean(x, y), lambda context, b, signature, args: ir.Constant(ir.IntType(1), both)


@intrinsic  # type: ignore[untyped-decorator]
def _rotate_words(typingctx: Any, x: Any, y: Any, cos: Any, sin: Any, i: Any, step: Any) -> Any:
    """`_rotate_block` for bf16, read and written as words of two numbers: a third fewer instructions.

    Rotates LANES pairs where pairs are neighbours (`step` None), else 2 * LANES. `cos` and `sin` are by `_prepare`.
    """
    words = ir.VectorType(I32, LANES)
    numbers = ir.VectorType(ir.FloatType(), LANES)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if x.kind != "bf16" or y.kind != "bf16":
            return context.get_dummy_value()  # never run: see `_in_words`
        px, py, pc, ps, at, far = args

        def read(p: Any, where: Any, kind: Any, align: int) -> Any:
            return b.load(b.bitcast(b.gep(p, [where]), kind.as_pointer()), align=align)

        def write(where: Any, value: Any) -> None:
            b.store(value, b.bitcast(b.gep(py, [where]), words.as_pointer()), align=2)

        def rotated(u: Any, v: Any, c: Any, s: Any) -> tuple[Any, Any]:
            contract = ("contract",)
            new_u = b.fsub(b.fmul(u, c, contract), b.fmul(v, s, contract), contract)
            return new_u, b.fadd(b.fmul(v, c, contract), b.fmul(u, s, contract), contract)

        c, s = read(pc, at, numbers, 4), read(ps, at, numbers, 4)
        if isinstance(step, types.NoneType):
            first = b.shl(at, I64(1))
            pair = rotated(*split_bf16(b, read(px, first, words, 2)), c, s)
            write(first, join_bf16(b, *pair))
            return context.get_dummy_value()
        next_at, second = b.add(at, I64(LANES)), b.add(at, far)
        u, v = (split_bf16(b, read(px, where, words, 2)) for where in (at, second))
        even = rotated(u[0], v[0], c, s)
        odd = rotated(u[1], v[1], read(pc, next_at, numbers, 4), read(ps, next_at, numbers, 4))
        write(at, join_bf16(b, even[0], odd[0]))
        write(second, join_bf16(b, even[1], odd[1]))
        return context.get_dummy_value()

    return types.void(x, y, cos, sin, types.int64, step), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _prepare_block(typingctx: Any, x: Any, y: Any, i: Any) -> Any:
    """y[i : i + 2 * LANES] = x there, NaNs canonical, the even ones first."""
    numbers = ir.VectorType(ir.FloatType(), 2 * LANES)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source, target = (b.bitcast(b.gep(p, [args[2]]), numbers.as_pointer()) for p in args[:2])
        raw = b.load(source, align=4)
        value = b.select(b.fcmp_ordered("ord", raw, raw), raw, ir.Constant(numbers, [float("nan")] * 2 * LANES))
        order = [*range(0, 2 * LANES, 2), *range(1, 2 * LANES, 2)]
        mask = ir.Constant(ir.VectorType(I32, 2 * LANES), order)
        b.store(b.shuffle_vector(value, value, mask), target, align=4)
        return context.get_dummy_value()

    return types.void(x, y, types.int64), codegen


@inline
def _prepare(x, y, n, interleaved):  # type: ignore[no-untyped-def]
    """y = x as `_rotate_words` takes it: NaNs canonical; not interleaved, the even ones of each 2 * LANES first."""
    pairs = 0 if interleaved else n - n % (2 * LANES)
    for i in range(0, pairs, 2 * LANES):
        _prepare_block(x, y, i)
    for i in range(pairs, n):
        store(y, i, _canonical(load(x, i)))


@inline
def _canonical(x):  # type: ignore[no-untyped-def]
    return x if x == x else np.float32(np.nan)


@inline
def _rotate(x, y, cos, sin, ready, half, interleaved):  # type: ignore[no-untyped-def]
    """y = the first 2 * half elements of x, rotated; x and y may be one. `ready`: cos, then sin, by `_prepare`."""
    begin, whole = 0, half - half % LANES
    if interleaved:
        if _in_words(x, y):
            for i in range(0, whole, LANES):
                _rotate_words(x, y, ready, shift(ready, half), i, None)
        else:
            for i in range(0, whole, LANES):
                _rotate_block(x, y, cos, sin, i, None)
        for i in range(whole, half):
            c, s, u, v = load(cos, i), load(sin, i), load(x, 2 * i), load(x, 2 * i + 1)
            store(y, 2 * i, u * c - v * s)
            store(y, 2 * i + 1, v * c + u * s)
    else:
        if _in_words(x, y):
            begin = half - half % (2 * LANES)
            for i in range(0, begin, 2 * LANES):
                _rotate_words(x, y, ready, shift(ready, half), i, half)
        for i in range(begin, whole, LANES):
            _rotate_block(x, y, cos, sin, i, half)
        for i in range(whole, half):
            c, s, u, v = load(cos, i), load(sin, i), load(x, i), load(x, half + i)
            store(y, i, u * c - v * s)
            store(y, half + i, v * c + u * s)


@inline
def _widen(x, y, n):  # type: ignore[no-untyped-def]
    for i in range(n):
        store(y, i, load(x, i))


@inline
def _scale_row(x, cache, at, n, kind, scale):  # type: ignore[no-untyped-def]
    if kind == E4M3:
        y = shift(cast(cache, "e4m3"), at)
        for i in range(n):
            store(y, i, load(x, i) / scale)
    else:
        z = shift(cast(cache, "e5m2"), at)
        for i in range(n):
            store(z, i, load(x, i) / scale)


@inline
def _copy(x, x_head, cache, at, c_head, heads, dim):  # type: ignore[no-untyped-def]
    """A token's rows [heads, dim] to element `at` of a cache of their own dtype."""
    y = shift(cast(cache, x), at)
    if x_head == dim and c_head == dim:
        move(y, x, heads * dim)
    else:
        for h in range(heads):
            move(shift(y, h * c_head), shift(x, h * x_head), dim)


def _kernel(  # type: ignore[no-untyped-def]
    counter, grain, n,
    q, q_token, q_head, q_heads, k, k_token, k_head, kv_heads, dim, v, v_token, v_head, v_dim,
    table, table_fp32, max_positions, rotary, positions, positions_64, slots, slots_64, num_slots, page,
    k_cache, kc_kind, kc_page, kc_token, kc_head, k_scale, v_cache, vc_kind, vc_page, vc_token, vc_head, v_scale,
    interleaved, write_k,
):  # fmt: skip
    half = rotary // 2
    scratch = np.empty(2 * rotary + dim + 1, np.float32)
    row = view(scratch.ctypes.data, "fp32")
    ready = shift(row, rotary)
    wide = shift(ready, rotary)
    begin = take(counter, grain) if grain else 0
    while begin < n:
        for t in range(begin, min(begin + grain, n) if grain else n):
            p = load(cast(positions, "i64"), t) if positions_64 else load(cast(positions, "i32"), t)
            if p < 0 or p >= max_positions:
                continue
            if table_fp32:
                cos = shift(cast(table, "fp32"), p * rotary)
            else:
                cos = row
                _widen(shift(cast(table, q), p * rotary), row, rotary)
            sin = shift(cos, half)
            if _in_words(q, q):
                _prepare(cos, ready, half, interleaved)
                _prepare(sin, shift(ready, half), half, interleaved)
            for h in range(q_heads):
                x = shift(q, t * q_token + h * q_head)
                _rotate(x, x, cos, sin, ready, half, interleaved)

            slot = -1
            if num_slots:
                slot = load(cast(slots, "i64"), t) if slots_64 else load(cast(slots, "i32"), t)
                if not 0 <= slot < num_slots:
                    slot = -1
            kt = shift(k, t * k_token)
            if slot < 0:
                if write_k:
                    for h in range(kv_heads):
                        x = shift(kt, h * k_head)
                        _rotate(x, x, cos, sin, ready, half, interleaved)
                continue
            at = slot // page * kc_page + slot % page * kc_token
            if kc_kind == SAME:
                if write_k:
                    for h in range(kv_heads):
                        x = shift(kt, h * k_head)
                        _rotate(x, x, cos, sin, ready, half, interleaved)
                    _copy(kt, k_head, k_cache, at, kc_head, kv_heads, dim)
                else:
                    for h in range(kv_heads):
                        x = shift(kt, h * k_head)
                        y = shift(cast(k_cache, k), at + h * kc_head)
                        _rotate(x, y, cos, sin, ready, half, interleaved)
                        move(shift(y, rotary), shift(x, rotary), dim - rotary)
            else:
                for h in range(kv_heads):
                    x = shift(kt, h * k_head)
                    _rotate(x, wide, cos, sin, ready, half, interleaved)
                    _widen(shift(x, rotary), shift(wide, rotary), dim - rotary)
                    if write_k:
                        _widen(wide, x, rotary)
                    _scale_row(wide, k_cache, at + h * kc_head, dim, kc_kind, k_scale)
            vt = shift(v, t * v_token)
            at = slot // page * vc_page + slot % page * vc_token
            if vc_kind == SAME:
                _copy(vt, v_head, v_cache, at, vc_head, kv_heads, v_dim)
            else:
                for h in range(kv_heads):
                    _scale_row(shift(vt, h * v_head), v_cache, at + h * vc_head, v_dim, vc_kind, v_scale)
        begin = take(counter, grain) if grain else n
    scratch[0] = 0.0  # its last use: numba frees an array right after that, whoever still holds its address


kernel = Kernel(
    _kernel,
    "i64 int int  *x int int int *x int int int int *x int int int  u8 bool int int u8 bool u8 bool int int "
    "u8 int int int int float u8 int int int int float  bool bool",
    shared=True,
)
NONE = (0, SAME, 0, 0, 0, 1.0)

calls = Memo()


def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos_sin_cache: Tensor,
    positions: Tensor,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    slots: Tensor | None = None,
    *,
    interleaved: bool = False,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    write_k: bool = True,
) -> None:
    tensors = q, k, v, cos_sin_cache, positions, k_cache, v_cache, slots
    call = calls.start(tensors, (interleaved, number(k_scale), number(v_scale), write_k))
    if call is None:
        return
    need_cpu("rope_kv_write", *tensors)
    n, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    q_token, q_head, _ = q.stride()
    k_token, k_head, _ = k.stride()
    max_positions, rotary = cos_sin_cache.shape
    v_args, slot_args, k_to, v_to = (0, 0, 0, 0), (0, False, 0, 1), NONE, NONE
    if k_cache is not None and v_cache is not None and slots is not None and v is not None:
        v_token, v_head, _ = v.stride()
        v_args = (v.data_ptr(), v_token, v_head, v.shape[2])
        slot_args = (slots.data_ptr(), slots.dtype is torch.int64, count_slots(k_cache), page_size(k_cache))
        k_to, v_to = place(k_cache, k_scale), place(v_cache, v_scale)
    heads = (q.data_ptr(), q_token, q_head, q_heads, k.data_ptr(), k_token, k_head, kv_heads, dim)
    table = (cos_sin_cache.data_ptr(), cos_sin_cache.dtype is torch.float32, max_positions, rotary)
    places = (positions.data_ptr(), positions.dtype is torch.int64, *slot_args, *k_to, *v_to)
    nbytes = 2 * q.itemsize * dim * (q_heads + 2 * kv_heads)
    run(kernel, (FORMAT[q.dtype],), n, nbytes, (*heads, *v_args, *table, *places, interleaved, write_k), call=call)
