# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated"
# A kernel is typed by its arguments at run time.
"""rope_kv_write: rotate q and k in place, write k and v to the cache, in one kernel.

A program has a tile of [tokens, heads] of q, or of k and v: many heads of a token where there are
many, several tokens where there are few. cos and sin are read once for all heads of a token, and what doesn't
depend on the position is asked for before it. fp32 arithmetic, one rounding.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda._cache import refuse_fp8, scale_kind
from hal.backends.cuda._device import next_power_of_2, pdl
from hal.kv.view import copy_unit, fuse_pages_of_both, page_size
from hal.ops.spec import FP8
from hal.triton import launch
from hal.triton.plans import Plan, Size, Step, length, plans

Tile = tuple[int, int, int, int]
"""Up to so many tokens, heads of q in a program (of one token or of several), of k and v; warps."""
MANY = 1 << 62
TILES: tuple[tuple[int, tuple[Tile, ...]], ...] = (
    (8, ((32, 8, 1, 1), (1024, 8, 2, 1), (MANY, 16, 4, 2))),
    (40, ((96, 8, 4, 1), (1024, 32, 8, 8), (MANY, 16, 8, 4))),
    (MANY, ((96, 8, 4, 1), (1024, 16, 8, 2), (MANY, 16, 8, 4))),
)
"""Up to so many heads of q: the tiles. Measured on an H200 (sm_90); elsewhere untuned: compile-checked."""


@triton.jit
def _scaled(x, scale, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """x / scale in fp8, saturating: the comparisons leave NaN as it is."""
    x = x.to(tl.float32)
    if KIND == 1:
        x = x / scale
    if KIND == 2:
        x = x / tl.load(scale)
    limit: tl.constexpr = 448.0 if tl.float8e4nv == DTYPE else 57344.0
    x = tl.where(x > limit, limit, x)
    return tl.where(x < -limit, -limit, x)


@triton.jit
def _store(to, x, mask, scale, KIND: tl.constexpr, FP8: tl.constexpr):
    if FP8:
        x = _scaled(x, scale, KIND, to.dtype.element_ty)
    tl.store(to, x.to(to.dtype.element_ty), mask)


@triton.jit
def _rotated(a, b, cos, sin):
    a, b = a.to(tl.float32), b.to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _load_pairs(row, mask, HALF: tl.constexpr, HALF_PAD: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        both = tl.arange(0, 2 * HALF_PAD)[None, :]
        x = tl.load(row + both, mask & (both < 2 * HALF), other=0.0)
        a, b = tl.split(tl.reshape(x, (x.shape[0], HALF_PAD, 2)))
    else:
        i = tl.arange(0, HALF_PAD)[None, :]
        a = tl.load(row + i, mask & (i < HALF), other=0.0)
        b = tl.load(row + HALF + i, mask & (i < HALF), other=0.0)
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


@triton.jit
def _angles(cos_sin, position, known, ROTARY: tl.constexpr, HALF_PAD: tl.constexpr):
    i = tl.arange(0, HALF_PAD)[None, :]
    angle = cos_sin + tl.where(known, position, 0) * ROTARY + i
    cos = tl.load(angle, known & (i < ROTARY // 2), other=0.0).to(tl.float32)
    sin = tl.load(angle + ROTARY // 2, known & (i < ROTARY // 2), other=0.0).to(tl.float32)
    return cos, sin


@launch.jit(
    do_not_specialize="""
    positions slots k_scale v_scale q_token q_head k_token k_head v_token v_head kc_page kc_token
    kc_head vc_page vc_token vc_head max_positions num_slots n
    """.split()
)
def rope_kv_write_kernel(
    q, k, v, cos_sin, positions, k_cache, v_cache, slots, k_scale, v_scale,
    q_token: tl.int64, q_head: tl.int64, k_token: tl.int64, k_head: tl.int64, v_token: tl.int64, v_head: tl.int64,
    kc_page: tl.int64, kc_token: tl.int64, kc_head: tl.int64,
    vc_page: tl.int64, vc_token: tl.int64, vc_head: tl.int64,
    max_positions: tl.int64, num_slots: tl.int64, n: tl.int32,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr, PAGE: tl.constexpr, K_AT: tl.constexpr, INTERLEAVED: tl.constexpr, CACHE: tl.constexpr,
    WRITE_K: tl.constexpr, K_FP8: tl.constexpr, V_FP8: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    UNIT: tl.constexpr,
    Q_TOKENS: tl.constexpr, Q_TILE: tl.constexpr, KV_TOKENS: tl.constexpr, KV_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    HALF: tl.constexpr = ROTARY // 2
    HALF_PAD: tl.constexpr = next_power_of_2(HALF)
    Q_PARTS: tl.constexpr = (Q_HEADS + Q_TILE - 1) // Q_TILE
    KV_PARTS: tl.constexpr = (KV_HEADS + KV_TILE - 1) // KV_TILE
    # A product with a constant is how Triton learns that rows are aligned; it ignores hints on parameters.
    q_token, q_head, k_token, k_head = q_token * UNIT, q_head * UNIT, k_token * UNIT, k_head * UNIT
    v_token, v_head = v_token * UNIT, v_head * UNIT
    kc_page, kc_token, kc_head = kc_page * UNIT, kc_token * UNIT, kc_head * UNIT
    vc_page, vc_token, vc_head = vc_page * UNIT, vc_token * UNIT, vc_head * UNIT
    # Programs of k and v, which have more to do, go first. All tokens' loads stand before the first store: the
    # compiler, which can't know that they don't alias, would leave them behind it.
    program = tl.program_id(0)
    kv_programs = tl.cdiv(n, KV_TOKENS) * KV_PARTS
    if program >= kv_programs:
        q_program = program - kv_programs
        q_first = (q_program // Q_PARTS).to(tl.int64) * Q_TOKENS
        q_heads = (q_program % Q_PARTS * Q_TILE + tl.arange(0, Q_TILE))[:, None]
        q_loaded = ()
        for i in tl.static_range(Q_TOKENS):
            q_row = q + (q_first + i) * q_token + q_heads * q_head
            q_mask = (q_first + i < n) & (q_heads < Q_HEADS)
            q_pairs = _load_pairs(q_row, q_mask, HALF, HALF_PAD, INTERLEAVED)
            q_position = tl.load(positions + q_first + i, q_first + i < n, other=-1).to(tl.int64)
            q_loaded = q_loaded + ((q_row, q_mask, q_pairs, q_position),)  # noqa: RUF005 - Triton has no other way
        q_turned = ()
        for i in tl.static_range(Q_TOKENS):
            q_known = (q_loaded[i][3] >= 0) & (q_loaded[i][3] < max_positions)
            q_angles = _angles(cos_sin, q_loaded[i][3], q_known, ROTARY, HALF_PAD)
            q_turned = q_turned + ((q_angles[0], q_angles[1], q_known),)  # noqa: RUF005
        for i in tl.static_range(Q_TOKENS):
            c, d = _rotated(q_loaded[i][2][0], q_loaded[i][2][1], q_turned[i][0], q_turned[i][1])
            _store_pairs(
                q_loaded[i][0], c, d, q_turned[i][2] & q_loaded[i][1], q_head, HALF, HALF_PAD, INTERLEAVED, 0, False
            )
    else:
        first = (program // KV_PARTS).to(tl.int64) * KV_TOKENS
        head = (program % KV_PARTS * KV_TILE + tl.arange(0, KV_TILE))[:, None]
        j = tl.arange(0, next_power_of_2(V_HEAD_DIM))[None, :]
        loaded = ()
        for i in tl.static_range(KV_TOKENS):
            row = k + (first + i) * k_token + head * k_head
            mask = (first + i < n) & (head < KV_HEADS)
            pairs = _load_pairs(row, mask, HALF, HALF_PAD, INTERLEAVED)
            position = tl.load(positions + first + i, first + i < n, other=-1).to(tl.int64)
            if CACHE:
                x = tl.load(v + (first + i) * v_token + head * v_head + j, mask & (j < V_HEAD_DIM))
                slot = tl.load(slots + first + i, first + i < n, other=-1).to(tl.int64)
            else:
                x = position
                slot = position
            loaded = loaded + ((row, mask, pairs, position, x, slot),)  # noqa: RUF005
        turned = ()
        for i in tl.static_range(KV_TOKENS):
            known = (loaded[i][3] >= 0) & (loaded[i][3] < max_positions)
            angles = _angles(cos_sin, loaded[i][3], known, ROTARY, HALF_PAD)
            turned = turned + ((angles[0], angles[1], known),)  # noqa: RUF005
        for i in tl.static_range(KV_TOKENS):
            at, there, known = loaded[i][0], loaded[i][1], turned[i][2]
            a, b = _rotated(loaded[i][2][0], loaded[i][2][1], turned[i][0], turned[i][1])
            if CACHE:
                slot = loaded[i][5]
                written = known & (slot >= 0) & (slot < num_slots)
                slot = tl.where(written, slot, 0)
                written = written & there
                to_k = k_cache + K_AT + (slot // PAGE) * kc_page + (slot % PAGE) * kc_token + head * kc_head
                to_v = v_cache + (slot // PAGE) * vc_page + (slot % PAGE) * vc_token + head * vc_head
                _store_pairs(to_k, a, b, written, k_scale, HALF, HALF_PAD, INTERLEAVED, K_KIND, K_FP8)
                _store(to_v + j, loaded[i][4], written & (j < V_HEAD_DIM), v_scale, V_KIND, V_FP8)
                if ROTARY < HEAD_DIM:
                    rest = ROTARY + tl.arange(0, next_power_of_2(HEAD_DIM - ROTARY))[None, :]
                    y = tl.load(at + rest, there & (rest < HEAD_DIM))
                    _store(to_k + rest, y, written & (rest < HEAD_DIM), k_scale, K_KIND, K_FP8)
            if WRITE_K:
                _store_pairs(at, a, b, known & there, k_head, HALF, HALF_PAD, INTERLEAVED, 0, False)


@plans
def _plans(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos_sin_cache: Tensor,
    positions: Tensor,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slots: Tensor | None,
    interleaved: bool,
    k_scale: object,
    v_scale: object,
    write_k: bool,
) -> Plan:
    units, num_slots, static = shape_of(q, k, v, k_cache, v_cache, k_scale, v_scale, interleaved, write_k)
    v_, *caches = ("v", "k_cache", "v_cache", "slots") if static["CACHE"] else (None,) * 4
    args = (
        "q",
        "k",
        v_,
        "cos_sin_cache",
        "positions",
        *caches,
        "k_scale",
        "v_scale",
        *units,
        length("cos_sin_cache"),
        num_slots,
        length("q"),
    )
    return tiled("q", args, q.shape[1], k.shape[1], ROTARY=cos_sin_cache.shape[1], K_AT=0, **static)


def shape_of(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    k_scale: object,
    v_scale: object,
    interleaved: bool,
    write_k: bool,
) -> tuple[list[int], Size, dict[str, Any]]:
    """(the strides in units that divide all of them, the cache's slots, the constants that follow) of q, k, v and the
    caches, or of none."""
    page, kc, vc, v_strides, v_head_dim, num_slots = 1, (0, 0, 0), (0, 0, 0), (0, 0), 16, Size()
    if k_cache is not None and v_cache is not None and v is not None:
        page, kc, vc = fuse_pages_of_both(k_cache, v_cache)
        v_strides, v_head_dim = v.stride()[:2], v.shape[2]
        num_slots = length("k_cache", by=page_size(k_cache))
    strides = (*q.stride()[:2], *k.stride()[:2], *v_strides, *kc, *vc)
    unit = copy_unit(strides)
    on = pdl(q.get_device())
    fp8 = [cache is not None and cache.dtype in FP8 for cache in (k_cache, v_cache)]
    static = {
        "HEAD_DIM": q.shape[2],
        "V_HEAD_DIM": v_head_dim,
        "PAGE": page,
        "INTERLEAVED": bool(interleaved),
        "CACHE": num_slots != Size(),
        "WRITE_K": bool(write_k),
        "K_FP8": fp8[0],
        "V_FP8": fp8[1],
        "K_KIND": scale_kind(k_scale),
        "V_KIND": scale_kind(v_scale),
        "UNIT": unit,
        "PDL": on,
        "launch_pdl": on,
    }
    return [s // unit for s in strides], num_slots, static


def tiled(
    q: str, args: tuple[Any, ...], q_heads: int, kv_heads: int, tiles: tuple[Tile, ...] | None = None, **static: Any
) -> Plan:
    """A launch for each range of tokens, of which `q` names the argument that has as many."""
    steps = []
    fewest = 0
    for most, q_rows, kv_rows, warps in tiles or next(found for heads, found in TILES if q_heads <= heads):
        # Of no heads there are no programs, whatever their tile.
        q_tile = min(q_rows, next_power_of_2(max(1, q_heads)))
        kv_tile = min(kv_rows, next_power_of_2(max(1, kv_heads)))
        q_tokens, kv_tokens = q_rows // q_tile, kv_rows // kv_tile
        bound = rope_kv_write_kernel.bind(
            Q_HEADS=q_heads,
            KV_HEADS=kv_heads,
            Q_TOKENS=q_tokens,
            Q_TILE=q_tile,
            KV_TOKENS=kv_tokens,
            KV_TILE=kv_tile,
            num_warps=warps,
            **static,
        )
        programs = length(q, per=kv_tokens, times=-(-kv_heads // kv_tile))
        programs += length(q, per=q_tokens, times=-(-q_heads // q_tile))
        steps.append(Step(bound, programs, args, ((q, fewest, most),)))
        fewest = most
    return Plan(tuple(steps))


@_plans.launcher
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
    _plans.start(q, k, v, cos_sin_cache, positions, k_cache, v_cache, slots, interleaved, k_scale, v_scale, write_k)


def warm(device: torch.device, args: dict[str, Any] | None) -> None:
    """Positions of -1: nothing is rotated, nothing is written."""
    if args is None:
        q = torch.zeros(1, 32, 128, dtype=torch.bfloat16, device=device)
        k, cache = q[:, :8].contiguous(), torch.zeros(1, 8, 128, dtype=torch.bfloat16, device=device)
        at = torch.zeros(1, dtype=torch.int64, device=device)
        args = {
            "q": q,
            "k": k,
            "v": k.clone(),
            "positions": at,
            "cos_sin_cache": torch.zeros(1, 128, dtype=torch.float32, device=device),
            "k_cache": cache,
            "v_cache": cache.clone(),
            "slots": at,
        }
    rope_kv_write(**{**args, "positions": torch.full_like(args["positions"], -1)})


def supports(sig: Any) -> str | None:
    """Everything, but fp8 caches on devices that can't convert to fp8."""
    return refuse_fp8(sig, "k_cache", "v_cache")
