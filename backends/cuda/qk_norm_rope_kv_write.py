# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated"
# A kernel is typed by its arguments at run time.
"""qk_norm_rope_kv_write: RMSNorm per head, rotation and the write to the cache, in one kernel.

A program has ROWS heads of q, or of k and v, each a row of its own: the sum of squares never leaves it. fp32
arithmetic, one rounding, from the very same registers for k and for its cache.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda._cache import refuse_fp8
from hal.backends.cuda._device import next_power_of_2
from hal.backends.cuda.rope_kv_write import _angles, _load_pairs, _rotated, _store, _store_pairs, shape_of
from hal.triton import launch
from hal.triton.plans import Plan, Step, length, plans

ROWS = 8


@triton.jit
def _rest(row, mask, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr):
    """What of a head is not rotated."""
    i = ROTARY + tl.arange(0, next_power_of_2(HEAD_DIM - ROTARY))[None, :]
    return tl.load(row + i, mask & (i < HEAD_DIM), other=0.0).to(tl.float32)


@triton.jit
def _store_rest(
    row, x, mask, scale, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, KIND: tl.constexpr, FP8: tl.constexpr
):  # fmt: skip
    i = ROTARY + tl.arange(0, next_power_of_2(HEAD_DIM - ROTARY))[None, :]
    _store(row + i, x, mask & (i < HEAD_DIM), scale, KIND, FP8)


@triton.jit
def _normalise_and_rotate(
    row, mask, weight, eps, cos_sin, position, known, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr,
    HALF_PAD: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The heads at `row`, normalised and rotated: both halves of the pairs, and the rest."""
    HALF: tl.constexpr = ROTARY // 2
    a, b = _load_pairs(row, mask, HALF, HALF_PAD, INTERLEAVED)
    a, b = a.to(tl.float32), b.to(tl.float32)
    every = tl.full((1, 1), 1, tl.int1)
    u, w = _load_pairs(weight, every, HALF, HALF_PAD, INTERLEAVED)
    total = tl.sum(a * a, 1) + tl.sum(b * b, 1)
    rest = a
    if ROTARY < HEAD_DIM:
        rest = _rest(row, mask, HEAD_DIM, ROTARY)
        total += tl.sum(rest * rest, 1)
    r = tl.rsqrt(total / HEAD_DIM + eps)[:, None]
    if ROTARY < HEAD_DIM:
        rest = rest * r * _rest(weight, every, HEAD_DIM, ROTARY)
    cos, sin = _angles(cos_sin, position, known, ROTARY, HALF_PAD)
    c, d = _rotated(a * r * u.to(tl.float32), b * r * w.to(tl.float32), cos, sin)
    return c, d, rest


@launch.jit(
    do_not_specialize="""
    positions slots k_scale v_scale eps q_token q_head k_token k_head v_token v_head kc_page kc_token
    kc_head vc_page vc_token vc_head max_positions num_slots n
    """.split()
)
def qk_norm_rope_kv_write_kernel(
    q, k, v, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slots, k_scale, v_scale, eps,
    q_token: tl.int64, q_head: tl.int64, k_token: tl.int64, k_head: tl.int64, v_token: tl.int64, v_head: tl.int64,
    kc_page: tl.int64, kc_token: tl.int64, kc_head: tl.int64,
    vc_page: tl.int64, vc_token: tl.int64, vc_head: tl.int64,
    max_positions: tl.int64, num_slots: tl.int64, n: tl.int64,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr, PAGE: tl.constexpr, INTERLEAVED: tl.constexpr, CACHE: tl.constexpr,
    WRITE_K: tl.constexpr, K_FP8: tl.constexpr, V_FP8: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    HALF: tl.constexpr = ROTARY // 2
    HALF_PAD: tl.constexpr = next_power_of_2(HALF)
    # A product with a constant is how Triton learns that rows are aligned; it ignores hints on parameters.
    q_token, q_head, k_token, k_head = q_token * UNIT, q_head * UNIT, k_token * UNIT, k_head * UNIT
    v_token, v_head = v_token * UNIT, v_head * UNIT
    kc_page, kc_token, kc_head = kc_page * UNIT, kc_token * UNIT, kc_head * UNIT
    vc_page, vc_token, vc_head = vc_page * UNIT, vc_token * UNIT, vc_head * UNIT
    program = tl.program_id(0).to(tl.int64)
    kv_programs = tl.cdiv(n * KV_HEADS, ROWS)
    if program >= kv_programs:
        q_row = ((program - kv_programs) * ROWS + tl.arange(0, ROWS))[:, None]
        token, there = q_row // Q_HEADS, q_row < n * Q_HEADS
        position = tl.load(positions + token, there, other=-1).to(tl.int64)
        known = there & (position >= 0) & (position < max_positions)
        at = q + token * q_token + q_row % Q_HEADS * q_head
        a, b, rest = _normalise_and_rotate(
            at, known, q_weight, eps, cos_sin, position, known, HEAD_DIM, ROTARY, HALF_PAD, INTERLEAVED
        )
        _store_pairs(at, a, b, known, eps, HALF, HALF_PAD, INTERLEAVED, 0, False)
        if ROTARY < HEAD_DIM:
            _store_rest(at, rest, known, eps, HEAD_DIM, ROTARY, 0, False)
    else:
        row = (program * ROWS + tl.arange(0, ROWS))[:, None]
        token, head, there = row // KV_HEADS, row % KV_HEADS, row < n * KV_HEADS
        position = tl.load(positions + token, there, other=-1).to(tl.int64)
        known = there & (position >= 0) & (position < max_positions)
        at = k + token * k_token + head * k_head
        a, b, rest = _normalise_and_rotate(
            at, known, k_weight, eps, cos_sin, position, known, HEAD_DIM, ROTARY, HALF_PAD, INTERLEAVED
        )
        if CACHE:
            j = tl.arange(0, next_power_of_2(V_HEAD_DIM))[None, :]
            x = tl.load(v + token * v_token + head * v_head + j, known & (j < V_HEAD_DIM), other=0.0)
            slot = tl.load(slots + token, there, other=-1).to(tl.int64)
            written = known & (slot >= 0) & (slot < num_slots)
            slot = tl.where(written, slot, 0)
            to_k = k_cache + (slot // PAGE) * kc_page + (slot % PAGE) * kc_token + head * kc_head
            to_v = v_cache + (slot // PAGE) * vc_page + (slot % PAGE) * vc_token + head * vc_head
            _store_pairs(to_k, a, b, written, k_scale, HALF, HALF_PAD, INTERLEAVED, K_KIND, K_FP8)
            _store(to_v + j, x, written & (j < V_HEAD_DIM), v_scale, V_KIND, V_FP8)
            if ROTARY < HEAD_DIM:
                _store_rest(to_k, rest, written, k_scale, HEAD_DIM, ROTARY, K_KIND, K_FP8)
        if WRITE_K:
            _store_pairs(at, a, b, known, eps, HALF, HALF_PAD, INTERLEAVED, 0, False)
            if ROTARY < HEAD_DIM:
                _store_rest(at, rest, known, eps, HEAD_DIM, ROTARY, 0, False)


@plans
def _plans(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slots: Tensor | None,
    eps: float,
    interleaved: bool,
    k_scale: object,
    v_scale: object,
    write_k: bool,
) -> Plan:
    units, num_slots, static = shape_of(q, k, v, k_cache, v_cache, k_scale, v_scale, interleaved, write_k)
    v_, *caches = ("v", "k_cache", "v_cache", "slots") if static["CACHE"] else (None,) * 4
    run = qk_norm_rope_kv_write_kernel.bind(
        Q_HEADS=q.shape[1], KV_HEADS=k.shape[1], ROTARY=cos_sin_cache.shape[1], ROWS=ROWS, num_warps=4, **static
    )
    args = (
        "q",
        "k",
        v_,
        "q_weight",
        "k_weight",
        "cos_sin_cache",
        "positions",
        *caches,
        "k_scale",
        "v_scale",
        "eps",
        *units,
        length("cos_sin_cache"),
        num_slots,
        length("q"),
    )
    programs = length("q", by=k.shape[1], per=ROWS) + length("q", by=q.shape[1], per=ROWS)
    return Plan((Step(run, programs, args),))


@_plans.launcher
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
    _plans.start(
        q,
        k,
        v,
        q_weight,
        k_weight,
        cos_sin_cache,
        positions,
        k_cache,
        v_cache,
        slots,
        eps,
        interleaved,
        k_scale,
        v_scale,
        write_k,
    )


def supports(sig: Any) -> str | None:
    """Everything, but fp8 caches on devices that can't convert to fp8."""
    return refuse_fp8(sig, "k_cache", "v_cache")
