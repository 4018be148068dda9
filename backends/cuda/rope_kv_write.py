"""rope_kv_write: rotate q and k in place, write k and v to the cache, in one kernel.

A program has one token and HEADS heads of q, or of k and v. cos and sin are read once for all of them,
and nothing that does not depend on the position waits for it. fp32 arithmetic, one rounding.
"""

import triton
import triton.language as tl
from torch import Tensor, float8_e4m3fn, float8_e5m2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal import launch
from hal.backends.cuda._device import pdl

HEADS = 16
WARPS = 4
NONE, FLOAT, POINTER = 0, 1, 2


@triton.jit
def _scaled(x, scale, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """x / scale in fp8, saturating: the comparisons leave NaN as it is."""
    x = x.to(tl.float32)
    if KIND == 1:
        x = x / scale
    if KIND == 2:
        x = x / tl.load(scale)
    limit: tl.constexpr = 448.0 if DTYPE == tl.float8e4nv else 57344.0
    x = tl.where(x > limit, limit, x)
    return tl.where(x < -limit, -limit, x)


@triton.jit
def _store(to, x, mask, scale, KIND: tl.constexpr, FP8: tl.constexpr):
    if FP8:
        x = _scaled(x, scale, KIND, to.dtype.element_ty)
    tl.store(to, x.to(to.dtype.element_ty), mask)


@triton.jit
def _rotated(x, cos, sin, INTERLEAVED: tl.constexpr):
    """x: (first, second) of each pair."""
    a, b = x
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _load_pairs(row, mask, HALF: tl.constexpr, HALF_PAD: tl.constexpr, INTERLEAVED: tl.constexpr):
    i = tl.arange(0, HALF_PAD)[None, :]
    if INTERLEAVED:
        both = tl.arange(0, 2 * HALF_PAD)[None, :]
        x = tl.load(row + both, mask & (both < 2 * HALF), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (x.shape[0], HALF_PAD, 2)))
    else:
        a = tl.load(row + i, mask & (i < HALF), other=0.0).to(tl.float32)
        b = tl.load(row + HALF + i, mask & (i < HALF), other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_pairs(
    row, a, b, mask, scale, HALF: tl.constexpr, HALF_PAD: tl.constexpr, INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    if INTERLEAVED:
        both = tl.arange(0, 2 * HALF_PAD)[None, :]
        x = tl.reshape(tl.join(a, b), (a.shape[0], 2 * HALF_PAD))
        _store(row + both, x, mask & (both < 2 * HALF), scale, KIND, FP8)
    else:
        i = tl.arange(0, HALF_PAD)[None, :]
        _store(row + i, a, mask & (i < HALF), scale, KIND, FP8)
        _store(row + HALF + i, b, mask & (i < HALF), scale, KIND, FP8)


@launch.jit(
    do_not_specialize=(
        "positions", "slots", "k_scale", "v_scale", "q_token", "q_head", "k_token", "k_head", "v_token",
        "v_head", "kc_page", "kc_token", "kc_head", "vc_page", "vc_token", "vc_head", "max_positions", "num_slots",
    )
)  # fmt: skip
def rope_kv_write_kernel(
    q, k, v, cos_sin, positions, k_cache, v_cache, slots, k_scale, v_scale,
    q_token: tl.int64, q_head: tl.int64, k_token: tl.int64, k_head: tl.int64, v_token: tl.int64, v_head: tl.int64,
    kc_page: tl.int64, kc_token: tl.int64, kc_head: tl.int64,
    vc_page: tl.int64, vc_token: tl.int64, vc_head: tl.int64,
    max_positions: tl.int64, num_slots: tl.int64,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr, PAGE: tl.constexpr, INTERLEAVED: tl.constexpr, CACHE: tl.constexpr,
    WRITE_K: tl.constexpr, K_FP8: tl.constexpr, V_FP8: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    UNIT: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    HALF: tl.constexpr = ROTARY // 2
    HALF_PAD: tl.constexpr = triton.next_power_of_2(HALF)
    Q_PARTS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    PARTS: tl.constexpr = Q_PARTS + (KV_HEADS + HEADS - 1) // HEADS
    # A product with a constant is how Triton learns that rows are aligned; it ignores hints on parameters.
    q_token, q_head, k_token, k_head = q_token * UNIT, q_head * UNIT, k_token * UNIT, k_head * UNIT
    v_token, v_head = v_token * UNIT, v_head * UNIT
    kc_page, kc_token, kc_head = kc_page * UNIT, kc_token * UNIT, kc_head * UNIT
    vc_page, vc_token, vc_head = vc_page * UNIT, vc_token * UNIT, vc_head * UNIT
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    position = tl.load(positions + token).to(tl.int64)
    known = (position >= 0) & (position < max_positions)
    i = tl.arange(0, HALF_PAD)[None, :]
    angle = cos_sin + tl.where(known, position, 0) * ROTARY + i
    cos = tl.load(angle, known & (i < HALF), other=0.0).to(tl.float32)
    sin = tl.load(angle + HALF, known & (i < HALF), other=0.0).to(tl.float32)
    if part < Q_PARTS:
        head = (part * HEADS + tl.arange(0, HEADS))[:, None]
        row = q + token * q_token + head * q_head
        a, b = _load_pairs(row, head < Q_HEADS, HALF, HALF_PAD, INTERLEAVED)
        a, b = _rotated((a, b), cos, sin, INTERLEAVED)
        _store_pairs(row, a, b, known & (head < Q_HEADS), q_head, HALF, HALF_PAD, INTERLEAVED, 0, False)
    else:
        head = ((part - Q_PARTS) * HEADS + tl.arange(0, HEADS))[:, None]
        row = k + token * k_token + head * k_head
        a, b = _load_pairs(row, head < KV_HEADS, HALF, HALF_PAD, INTERLEAVED)
        a, b = _rotated((a, b), cos, sin, INTERLEAVED)
        if CACHE:
            slot = tl.load(slots + token).to(tl.int64)
            written = known & (slot >= 0) & (slot < num_slots)
            slot = tl.where(written, slot, 0)
            to_k = k_cache + (slot // PAGE) * kc_page + (slot % PAGE) * kc_token + head * kc_head
            to_v = v_cache + (slot // PAGE) * vc_page + (slot % PAGE) * vc_token + head * vc_head
            mask = written & (head < KV_HEADS)
            d = tl.arange(0, triton.next_power_of_2(V_HEAD_DIM))[None, :]
            x = tl.load(v + token * v_token + head * v_head + d, mask & (d < V_HEAD_DIM))
            _store_pairs(to_k, a, b, mask, k_scale, HALF, HALF_PAD, INTERLEAVED, K_KIND, K_FP8)
            _store(to_v + d, x, mask & (d < V_HEAD_DIM), v_scale, V_KIND, V_FP8)
            if ROTARY < HEAD_DIM:
                d = ROTARY + tl.arange(0, triton.next_power_of_2(HEAD_DIM - ROTARY))[None, :]
                x = tl.load(row + d, mask & (d < HEAD_DIM))
                _store(to_k + d, x, mask & (d < HEAD_DIM), k_scale, K_KIND, K_FP8)
        if WRITE_K:
            _store_pairs(row, a, b, known & (head < KV_HEADS), k_head, HALF, HALF_PAD, INTERLEAVED, 0, False)


_plans: dict[tuple[object, ...], tuple[launch.Launch, int, tuple[int, ...]]] = launch.keeps({})
_FP8 = (float8_e4m3fn, float8_e5m2)


def _plan(
    q: Tensor, k: Tensor, v: Tensor | None, cos_sin: Tensor, k_cache: Tensor | None, v_cache: Tensor | None,
    interleaved: bool, k_scale: object, v_scale: object, write_k: bool,
) -> tuple[launch.Launch, int, tuple[int, ...]]:  # fmt: skip
    """The bound launch, programs a token and strides (in units) for calls of this form."""
    page, kc, vc, v_strides, v_head_dim = 1, (0, 0, 0), (0, 0, 0), (0, 0), 16
    if k_cache is not None and v_cache is not None and v is not None:
        page, kc, vc = _paging(k_cache, v_cache)
        v_strides, v_head_dim = v.stride()[:2], v.shape[2]
    strides = (*q.stride()[:2], *k.stride()[:2], *v_strides, *kc, *vc)
    unit = next(u for u in (16, 8, 1) if all(s % u == 0 for s in strides))
    on = pdl(q.get_device())
    q_heads, kv_heads = q.shape[1], k.shape[1]
    heads = min(HEADS, triton.next_power_of_2(max(q_heads, kv_heads)))
    bound = rope_kv_write_kernel.bind(
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HEAD_DIM=q.shape[2], V_HEAD_DIM=v_head_dim, ROTARY=cos_sin.shape[1],
        PAGE=page, INTERLEAVED=bool(interleaved), CACHE=k_cache is not None, WRITE_K=bool(write_k),
        K_FP8=k_cache is not None and k_cache.dtype in _FP8, V_FP8=v_cache is not None and v_cache.dtype in _FP8,
        K_KIND=_kind(k_scale), V_KIND=_kind(v_scale), UNIT=unit, HEADS=heads, PDL=on, num_warps=WARPS, launch_pdl=on,
    )  # fmt: skip
    return bound, -(-q_heads // heads) + -(-kv_heads // heads), tuple(s // unit for s in strides)


def _paging(k_cache: Tensor, v_cache: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Page size and the strides (page, token, head) of both; 1 and no page stride where pages are seamless."""
    if k_cache.ndim == 3:
        return 1, (k_cache.stride(0), 0, k_cache.stride(1)), (v_cache.stride(0), 0, v_cache.stride(1))
    page, kc, vc = k_cache.shape[1], k_cache.stride(), v_cache.stride()
    if kc[0] == page * kc[1] and vc[0] == page * vc[1]:
        return 1, (kc[1], 0, kc[2]), (vc[1], 0, vc[2])
    return page, kc[:3], vc[:3]


def _kind(scale: object) -> int:
    return NONE if scale is None else POINTER if isinstance(scale, Tensor) else FLOAT


def rope_kv_write(
    q: Tensor, k: Tensor, v: Tensor | None, cos_sin_cache: Tensor, positions: Tensor,
    k_cache: Tensor | None = None, v_cache: Tensor | None = None, slots: Tensor | None = None, *,
    interleaved: bool = False, k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None,
    write_k: bool = True,
) -> None:  # fmt: skip
    n, q_heads, head_dim = q.shape
    if not n:
        return
    max_positions, rotary = cos_sin_cache.shape
    device = q.get_device()
    num_slots = 0
    if k_cache is None or v_cache is None or v is None:
        v = k_cache = v_cache = slots = None
        key: tuple[object, ...] = (q_heads, head_dim, rotary, interleaved, device, k.shape[1], q.stride(), k.stride())
    else:
        num_slots, *inner, _ = k_cache.shape
        if len(inner) == 2:
            num_slots *= inner[0]
        key = (
            q_heads, head_dim, rotary, interleaved, write_k, device, *inner, v.shape[2], q.stride(), k.stride(),
            v.stride(), k_cache.stride(), v_cache.stride(), k_cache.dtype, v_cache.dtype,
            k_scale.__class__, v_scale.__class__,
        )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= 4096:
            _plans.clear()
        plan = _plans[key] = _plan(q, k, v, cos_sin_cache, k_cache, v_cache, interleaved, k_scale, v_scale, write_k)
    run, parts, strides = plan
    run.start(
        (n * parts, 1, 1),
        q, k, v, cos_sin_cache, positions, k_cache, v_cache, slots,
        float(k_scale) if k_scale.__class__ is int else k_scale,
        float(v_scale) if v_scale.__class__ is int else v_scale,
        *strides, max_positions, num_slots,
    )  # fmt: skip


def supports(sig: object) -> None | str:
    return None
