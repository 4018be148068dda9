"""qk_norm_rope_kv_write for Ascend: RMSNorm of each head of q and k, rope, and k and v to the cache, in one kernel.

q ``[n, q_heads, head_dim]``, k ``[n, kv_heads, head_dim]``, v ``[n, kv_heads, v_head_dim]``, weights ``[head_dim]``;
see `hal.ops.qk_norm_rope_kv_write`. As `rope_kv_write`: a program takes every P-th token, position and slot are
scalars, a tile of heads is one strided copy in and one out, every mask a prefix. A head is held in fp32 from its norm
to its one rounding, in two halves and what rope leaves alone, or, for interleaved pairs, whole.
"""

# A kernel's parameters have no Python types.
# ruff: noqa: SIM102 - `CACHE` is settled when the kernel is compiled, `write` when it runs: two ifs.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hal.backends.ascend._device import TILE_BYTES, page_of, pow2, vector_cores
from hal.backends.ascend.rope_kv_write import INTS, TENSORS, cache_refusal, half_tile
from hal.kv.view import count_slots, strides
from hal.lowered import shared_writes
from hal.triton import launch


@triton.jit
def _weights(
    weight, HALF: tl.constexpr, TAIL: tl.constexpr, B_HALF: tl.constexpr, B_TAIL: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """A norm's weights, in fp32, in the parts in which `_heads` has a head."""
    column = tl.arange(0, B_HALF)[None, :]
    both = tl.arange(0, 2 * B_HALF)[None, :]
    tail = tl.arange(0, B_TAIL)[None, :]
    rest = tl.full([1, B_TAIL], 0.0, tl.float32)
    if TAIL > 0:
        rest = tl.load(weight + 2 * HALF + tail, mask=tail < TAIL, other=0.0).to(tl.float32)
    if PAIRS:
        a = tl.load(weight + both, mask=both < 2 * HALF, other=0.0).to(tl.float32)
        b = a
    else:
        a = tl.load(weight + column, mask=column < HALF, other=0.0).to(tl.float32)
        b = tl.load(weight + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
    return a, b, rest


@triton.jit
def _heads(
    at, weight_a, weight_b, weight_rest, cos, sin, heads, stride, eps,
    HALF: tl.constexpr, TAIL: tl.constexpr, TILE: tl.constexpr, B_HALF: tl.constexpr, B_TAIL: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """`heads` heads from `at` on, normed and rotated, in fp32: (first half, or all pairs; second half; the rest)."""
    head = tl.arange(0, TILE)[:, None]
    mine = head < heads
    column = tl.arange(0, B_HALF)[None, :]
    both = tl.arange(0, 2 * B_HALF)[None, :]
    tail = tl.arange(0, B_TAIL)[None, :]
    rest = tl.full([TILE, B_TAIL], 0.0, tl.float32)
    square = tl.full([TILE], 0.0, tl.float32)
    if TAIL > 0:
        rest = tl.load(at + head * stride + 2 * HALF + tail, mask=mine & (tail < TAIL), other=0.0).to(tl.float32)
        square = tl.sum(rest * rest, 1)
    if PAIRS:
        a = tl.load(at + head * stride + both, mask=mine & (both < 2 * HALF), other=0.0).to(tl.float32)
        b = a
        square = square + tl.sum(a * a, 1)
    else:
        a = tl.load(at + head * stride + column, mask=mine & (column < HALF), other=0.0).to(tl.float32)
        b = tl.load(at + head * stride + HALF + column, mask=mine & (column < HALF), other=0.0).to(tl.float32)
        square = square + tl.sum(a * a, 1) + tl.sum(b * b, 1)
    scale = (1.0 / tl.sqrt(square / (2 * HALF + TAIL) + eps))[:, None]
    if TAIL > 0:
        rest = rest * scale * weight_rest
    if PAIRS:
        a = a * scale * weight_a
        x, y = tl.split(tl.reshape(a, (TILE, B_HALF, 2)))
        a = tl.interleave(x * cos - y * sin, y * cos + x * sin)
        b = a
    else:
        x = a * scale * weight_a
        y = b * scale * weight_b
        a = x * cos - y * sin
        b = y * cos + x * sin
    return a, b, rest


@triton.jit
def _store(
    to, a, b, rest, heads, stride,
    HALF: tl.constexpr, TAIL: tl.constexpr, TILE: tl.constexpr, B_HALF: tl.constexpr, B_TAIL: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """What `_heads` gave, rounded once."""
    head = tl.arange(0, TILE)[:, None]
    mine = head < heads
    if PAIRS:
        both = tl.arange(0, 2 * B_HALF)[None, :]
        tl.store(to + head * stride + both, a.to(to.dtype.element_ty), mask=mine & (both < 2 * HALF))
    else:
        column = tl.arange(0, B_HALF)[None, :]
        tl.store(to + head * stride + column, a.to(to.dtype.element_ty), mask=mine & (column < HALF))
        tl.store(to + head * stride + HALF + column, b.to(to.dtype.element_ty), mask=mine & (column < HALF))
    if TAIL > 0:
        tail = tl.arange(0, B_TAIL)[None, :]
        tl.store(to + head * stride + 2 * HALF + tail, rest.to(to.dtype.element_ty), mask=mine & (tail < TAIL))


@launch.jit(do_not_specialize=(*TENSORS, "q_weight", "k_weight", "eps", *INTS))
@shared_writes("k_cache", "v_cache")
def _qk_norm_rope_kv_write(
    q, k, v, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slots, eps, n, max_positions, num_slots, page,
    q_token, q_head, k_token, k_head, v_token, v_head, kc_page, kc_token, kc_head, vc_page, vc_token, vc_head,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, TAIL: tl.constexpr, V_DIM: tl.constexpr,
    Q_TILE: tl.constexpr, K_TILE: tl.constexpr, B_HALF: tl.constexpr, B_TAIL: tl.constexpr, B_V: tl.constexpr,
    PAIRS: tl.constexpr, CACHE: tl.constexpr, WRITE_K: tl.constexpr,
):  # fmt: skip
    q_a, q_b, q_rest = _weights(q_weight, HALF, TAIL, B_HALF, B_TAIL, PAIRS)
    k_a, k_b, k_rest = _weights(k_weight, HALF, TAIL, B_HALF, B_TAIL, PAIRS)
    for token in range(tl.program_id(0), n, tl.num_programs(0)):
        position = tl.load(positions + token).to(tl.int64)
        if (position >= 0) & (position < max_positions):
            t = tl.cast(token, tl.int64)
            angle = cos_sin + position * (2 * HALF) + tl.arange(0, B_HALF)
            fits = tl.arange(0, B_HALF) < HALF
            cos = tl.load(angle, mask=fits, other=0.0).to(tl.float32)[None, :]
            sin = tl.load(angle + HALF, mask=fits, other=0.0).to(tl.float32)[None, :]
            for first in range(0, Q_HEADS, Q_TILE):
                at = q + t * q_token + first * q_head
                heads = Q_HEADS - first
                a, b, rest = _heads(
                    at, q_a, q_b, q_rest, cos, sin, heads, q_head, eps, HALF, TAIL, Q_TILE, B_HALF, B_TAIL, PAIRS
                )
                _store(at, a, b, rest, heads, q_head, HALF, TAIL, Q_TILE, B_HALF, B_TAIL, PAIRS)
            write = False
            slot = position * 0
            if CACHE:
                slot = tl.load(slots + token).to(tl.int64)
                write = (slot >= 0) & (slot < num_slots)
            kc = (slot // page) * kc_page + (slot % page) * kc_token if CACHE else slot
            vc = (slot // page) * vc_page + (slot % page) * vc_token if CACHE else slot
            for first in range(0, KV_HEADS, K_TILE):
                at = k + t * k_token + first * k_head
                heads = KV_HEADS - first
                a, b, rest = _heads(
                    at, k_a, k_b, k_rest, cos, sin, heads, k_head, eps, HALF, TAIL, K_TILE, B_HALF, B_TAIL, PAIRS
                )
                if WRITE_K:
                    _store(at, a, b, rest, heads, k_head, HALF, TAIL, K_TILE, B_HALF, B_TAIL, PAIRS)
                if CACHE:
                    if write:
                        to = k_cache + kc + first * kc_head
                        _store(to, a, b, rest, heads, kc_head, HALF, TAIL, K_TILE, B_HALF, B_TAIL, PAIRS)
                        head = tl.arange(0, K_TILE)[:, None]
                        wide = tl.arange(0, B_V)[None, :]
                        in_v = (head < heads) & (wide < V_DIM)
                        row = tl.load(v + t * v_token + first * v_head + head * v_head + wide, mask=in_v)
                        tl.store(v_cache + vc + first * vc_head + head * vc_head + wide, row, mask=in_v)


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
    """The contract is `hal.ops.qk_norm_rope_kv_write`'s; no fp8 cache, so no scale is read."""
    n, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    max_positions, rotary = cos_sin_cache.shape
    if n == 0 or max_positions == 0:
        return
    cached = False
    v_dim, page, num_slots = 1, 1, 0
    kc = vc = (0, 0, 0)
    v_token = v_head = 0
    if k_cache is not None and v_cache is not None and v is not None:
        cached = True
        v_dim, v_token, v_head = v.shape[-1], v.stride(0), v.stride(1)
        page, num_slots = page_of(k_cache), count_slots(k_cache)
        kc, vc = strides(k_cache), strides(v_cache)
    half, tail = rotary // 2, head_dim - rotary
    # Twice what rope alone keeps, and pairs, which are taken apart and together, four times that: measured.
    wide = half_tile(half, interleaved)
    fit = max(1, TILE_BYTES // (64 if interleaved else 16) // max(wide, pow2(tail // 2)))
    k_tile = max(1, min(pow2(kv_heads), fit, TILE_BYTES // 4 // pow2(v_dim)))
    tensors = (q, k, v if cached else None, q_weight, k_weight, cos_sin_cache, positions, k_cache, v_cache, slots)
    sizes = (n, max_positions, num_slots, page, *q.stride()[:2], *k.stride()[:2], v_token, v_head, *kc, *vc)
    dims = {"Q_HEADS": q_heads, "KV_HEADS": kv_heads, "HALF": half, "TAIL": tail, "V_DIM": v_dim}
    tiles = {"Q_TILE": min(pow2(q_heads), fit), "K_TILE": k_tile, "B_HALF": wide, "B_TAIL": pow2(tail)}
    flags = {"B_V": pow2(v_dim), "PAIRS": interleaved, "CACHE": cached, "WRITE_K": write_k}
    _qk_norm_rope_kv_write((min(n, vector_cores(q.device)),), *tensors, float(eps), *sizes, **dims, **tiles, **flags)


def supports(sig: Any) -> str | None:
    """No fp8 (triton-ascend 3.2.0 has no such tensors); a head and a row of v must fit a tile, of pairs a quarter."""
    if sig["interleaved"] and sig.dims["head_dim"] > TILE_BYTES // 32:
        return f"head_dim: {sig.dims['head_dim']}, the unified buffer takes {TILE_BYTES // 32} of interleaved pairs"
    return cache_refusal(sig, ("k_cache", "v_cache"), ("head_dim", "v_head_dim"))
