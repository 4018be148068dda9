"""qk_norm_rope_kv_write on the CPU: RMSNorm per head, rotation, write to the cache slots, a token at a time.

Layouts are those of `rope_kv_write`. Invariants: a head is normalised into an fp32 scratch row and rotated from there
straight to where it belongs, so everything is rounded once; a row of the cache that has k's dtype is a copy
of the new k, or made from the very same fp32 row.
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

from hal.backends.cpu._again import Memo
from hal.backends.cpu._bits import F32, FORMATS, I32, I64, Pointer, cast, decode, load, shift, store, types, view
from hal.backends.cpu._call import FORMAT, SAME, need_cpu, number, place
from hal.backends.cpu._index import get, index
from hal.backends.cpu._jit import Kernel, inline
from hal.backends.cpu._pool import run
from hal.backends.cpu._team import take
from hal.backends.cpu.rope_kv_write import LANES, NONE, _copy, _rotate, _scale_row, _widen
from hal.kv.view import count_slots, page_size


@intrinsic  # type: ignore[untyped-decorator]
def _squares(typingctx: Any, x: Any, n: Any) -> Any:
    """The sum of the squares of x's first n elements, a multiple of LANES, in as many sums: one chain of additions
    would wait for each, and nothing but contraction may reorder what LLVM is given."""
    if not isinstance(x, Pointer):
        raise TypeError("a hal Pointer is needed")
    lanes = ir.VectorType(F32, LANES)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        sums = cgutils.alloca_once_value(b, ir.Constant(lanes, [F32(0.0)] * LANES))
        b.store(ir.Constant(lanes, [F32(0.0)] * LANES), sums)
        with cgutils.for_range_slice(b, I64(0), args[1], I64(LANES), I64) as (i, _):
            raw = b.gep(args[0], [i])
            block = b.bitcast(raw, ir.VectorType(raw.type.pointee, LANES).as_pointer())
            v = decode(b, x.kind, b.load(block, align=FORMATS[x.kind].bits // 8))
            square = b.fmul(v, v, ("contract",))
            b.store(b.fadd(b.load(sums), square, ("contract",)), sums)
        found = b.load(sums)
        parts = [b.extract_element(found, I32(i)) for i in range(LANES)]
        while len(parts) > 1:
            parts = [b.fadd(p, q) for p, q in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    return types.float32(x, types.int64), codegen


@inline
def _normalise(x, weight, y, n, eps):  # type: ignore[no-untyped-def]
    """The fp32 row y = the head x, normalised."""
    whole = n - n % LANES
    total = _squares(x, whole)
    for i in range(whole, n):
        total += load(x, i) * load(x, i)
    r = np.float32(1.0) / math.sqrt(total / np.float32(n) + eps)
    for i in range(n):
        store(y, i, load(x, i) * r * load(weight, i))


def _kernel(  # type: ignore[no-untyped-def]
    counter, grain, n,
    q, q_token, q_head, q_heads, k, k_token, k_head, kv_heads, dim, v, v_token, v_head, v_dim, q_weight, k_weight, eps,
    table, table_fp32, max_positions, rotary, positions, positions_64, slots, slots_64, num_slots, page,
    k_cache, kc_kind, kc_page, kc_token, kc_head, k_scale, v_cache, vc_kind, vc_page, vc_token, vc_head, v_scale,
    interleaved, write_k,
):  # fmt: skip
    half = rotary // 2
    scratch = np.empty(rotary + 4 * dim + 1, np.float32)
    row = view(scratch.ctypes.data, "fp32")
    wide, turned = shift(row, rotary), shift(row, rotary + dim)
    q_w, k_w = shift(row, rotary + 2 * dim), shift(row, rotary + 3 * dim)
    _widen(q_weight, q_w, dim)
    _widen(k_weight, k_w, dim)
    begin = take(counter, grain) if grain else 0
    while begin < n:
        for t in range(begin, min(begin + grain, n) if grain else n):
            p = get(positions, positions_64, t)
            if p < 0 or p >= max_positions:
                continue
            if table_fp32:
                cos = shift(cast(table, "fp32"), p * rotary)
            else:
                cos = row
                _widen(shift(cast(table, q), p * rotary), row, rotary)
            sin = shift(cos, half)
            for h in range(q_heads):
                x = shift(q, t * q_token + h * q_head)
                _normalise(x, q_w, wide, dim, eps)
                _rotate(wide, x, cos, sin, cos, half, interleaved)
                _widen(shift(wide, rotary), shift(x, rotary), dim - rotary)
            slot = -1
            if num_slots:
                slot = get(slots, slots_64, t)
                if not 0 <= slot < num_slots:
                    slot = -1
            if slot < 0 and not write_k:
                continue
            kt = shift(k, t * k_token)
            at = slot // page * kc_page + slot % page * kc_token
            for h in range(kv_heads):
                x = shift(kt, h * k_head)
                _normalise(x, k_w, wide, dim, eps)
                _rotate(wide, turned, cos, sin, cos, half, interleaved)
                _widen(shift(wide, rotary), shift(turned, rotary), dim - rotary)
                if write_k:
                    _widen(turned, x, dim)
                if slot >= 0:
                    if kc_kind == SAME:
                        _widen(turned, shift(cast(k_cache, k), at + h * kc_head), dim)
                    else:
                        _scale_row(turned, k_cache, at + h * kc_head, dim, kc_kind, k_scale)
            if slot < 0:
                continue
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
    "i64 int int  *x int int int *x int int int int *x int int int *w *w float  u8 bool int int u8 bool "
    "u8 bool int int  u8 int int int int float u8 int int int int float  bool bool",
    shared=True,
)

calls = Memo()


def qk_norm_rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    slots: Tensor | None = None,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    write_k: bool = True,
) -> None:
    tensors = q, k, v, q_weight, k_weight, cos_sin_cache, positions, k_cache, v_cache, slots
    call = calls.start(tensors, (eps, interleaved, number(k_scale), number(v_scale), write_k))
    if call is None:
        return
    need_cpu("qk_norm_rope_kv_write", *tensors)
    n, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    max_positions, rotary = cos_sin_cache.shape
    v_args, slot_args, k_to, v_to = (0, 0, 0, 0), (0, False, 0, 1), NONE, NONE
    if k_cache is not None and v_cache is not None and slots is not None and v is not None:
        v_args = (v.data_ptr(), v.stride(0), v.stride(1), v.shape[2])
        slot_args = (*index(slots), count_slots(k_cache), page_size(k_cache))
        k_to, v_to = place(k_cache, k_scale), place(v_cache, v_scale)
    heads = (q.data_ptr(), *q.stride()[:2], q_heads, k.data_ptr(), *k.stride()[:2], kv_heads, dim)
    norm = (q_weight.data_ptr(), k_weight.data_ptr(), float(eps))
    table = (cos_sin_cache.data_ptr(), cos_sin_cache.dtype is torch.float32, max_positions, rotary)
    places = (*index(positions), *slot_args, *k_to, *v_to)
    nbytes = 2 * q.itemsize * dim * (q_heads + 2 * kv_heads)
    args = (*heads, *v_args, *norm, *table, *places, interleaved, write_k)
    run(kernel, (FORMAT[q.dtype], FORMAT[q_weight.dtype]), n, nbytes, args, call=call)
