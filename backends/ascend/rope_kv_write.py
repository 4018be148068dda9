"""rope_kv_write for Ascend: rotates q and k in place, and writes k and v to the cache.

q ``[n, q_heads, head_dim]``, k ``[n, kv_heads, head_dim]``, v ``[n, kv_heads, v_head_dim]``; see
`hal.ops.rope_kv_write`. A program takes every P-th token: position and slot are scalars, and a tile of
heads is one strided copy in and one out, whose rows are contiguous in memory. Every mask is a prefix of
heads and of columns, so no lane outside the tensors is touched. NeoX halves are two tiles; interleaved
pairs are one tile, split in the unified buffer.
"""

# A kernel's parameters have no Python types.
# ruff: noqa: SIM102 - `CACHE` is settled when the kernel is compiled, `write` when it runs: two ifs.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from hal.backends.ascend._device import TILE_BYTES, page_of, pow2, vector_cores
from hal.kv.view import count_slots, strides
from hal.lowered import shared_writes
from hal.triton import launch

INTS = tuple(
    """
    n max_positions num_slots page q_token q_head k_token k_head v_token v_head kc_page kc_token kc_head vc_page
    vc_token vc_head
    """.split()
)
TENSORS = ("q", "k", "v", "cos_sin", "positions", "k_cache", "v_cache", "slots")


@launch.jit(do_not_specialize=(*TENSORS, *INTS))
@shared_writes("k_cache", "v_cache")
def _rope_kv_write(
    q, k, v, cos_sin, positions, k_cache, v_cache, slots, n, max_positions, num_slots, page,
    q_token, q_head, k_token, k_head, v_token, v_head, kc_page, kc_token, kc_head, vc_page, vc_token, vc_head,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, TAIL: tl.constexpr, V_DIM: tl.constexpr,
    Q_TILE: tl.constexpr, K_TILE: tl.constexpr, B_HALF: tl.constexpr, B_TAIL: tl.constexpr, B_V: tl.constexpr,
    PAIRS: tl.constexpr, CACHE: tl.constexpr, WRITE_K: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, B_HALF)[None, :]
    for token in range(tl.program_id(0), n, tl.num_programs(0)):
        position = tl.load(positions + token).to(tl.int64)
        if (position >= 0) & (position < max_positions):
            t = tl.cast(token, tl.int64)
            angle = cos_sin + position * (2 * HALF) + tl.arange(0, B_HALF)
            fits = tl.arange(0, B_HALF) < HALF
            cos = tl.load(angle, mask=fits, other=0.0).to(tl.float32)[None, :]
            sin = tl.load(angle + HALF, mask=fits, other=0.0).to(tl.float32)[None, :]
            for first in range(0, Q_HEADS, Q_TILE):
                head = tl.arange(0, Q_TILE)[:, None]
                at = q + t * q_token + first * q_head + head * q_head
                if PAIRS:
                    both = tl.arange(0, 2 * B_HALF)[None, :]
                    mask = (head < Q_HEADS - first) & (both < 2 * HALF)
                    x = tl.load(at + both, mask=mask, other=0.0).to(tl.float32)
                    a, b = tl.split(tl.reshape(x, (Q_TILE, B_HALF, 2)))
                    x = tl.interleave(a * cos - b * sin, b * cos + a * sin)
                    tl.store(at + both, x.to(q.dtype.element_ty), mask=mask)
                else:
                    mask = (head < Q_HEADS - first) & (column < HALF)
                    a = tl.load(at + column, mask=mask, other=0.0).to(tl.float32)
                    b = tl.load(at + HALF + column, mask=mask, other=0.0).to(tl.float32)
                    tl.store(at + column, (a * cos - b * sin).to(q.dtype.element_ty), mask=mask)
                    tl.store(at + HALF + column, (b * cos + a * sin).to(q.dtype.element_ty), mask=mask)
            write = False
            slot = position * 0
            if CACHE:
                slot = tl.load(slots + token).to(tl.int64)
                write = (slot >= 0) & (slot < num_slots)
            kc = (slot // page) * kc_page + (slot % page) * kc_token if CACHE else slot
            vc = (slot // page) * vc_page + (slot % page) * vc_token if CACHE else slot
            for first in range(0, KV_HEADS, K_TILE):
                head = tl.arange(0, K_TILE)[:, None]
                at = k + t * k_token + first * k_head + head * k_head
                if PAIRS:
                    both = tl.arange(0, 2 * B_HALF)[None, :]
                    mask = (head < KV_HEADS - first) & (both < 2 * HALF)
                    x = tl.load(at + both, mask=mask, other=0.0).to(tl.float32)
                    a, b = tl.split(tl.reshape(x, (K_TILE, B_HALF, 2)))
                    x = tl.interleave(a * cos - b * sin, b * cos + a * sin).to(k.dtype.element_ty)
                    if WRITE_K:
                        tl.store(at + both, x, mask=mask)
                    if CACHE:
                        if write:
                            tl.store(k_cache + kc + first * kc_head + head * kc_head + both, x, mask=mask)
                else:
                    mask = (head < KV_HEADS - first) & (column < HALF)
                    a = tl.load(at + column, mask=mask, other=0.0).to(tl.float32)
                    b = tl.load(at + HALF + column, mask=mask, other=0.0).to(tl.float32)
                    x = (a * cos - b * sin).to(k.dtype.element_ty)
                    y = (b * cos + a * sin).to(k.dtype.element_ty)
                    if WRITE_K:
                        tl.store(at + column, x, mask=mask)
                        tl.store(at + HALF + column, y, mask=mask)
                    if CACHE:
                        if write:
                            to = k_cache + kc + first * kc_head + head * kc_head + column
                            tl.store(to, x, mask=mask)
                            tl.store(to + HALF, y, mask=mask)
                if CACHE:
                    if write:
                        if TAIL > 0:
                            tail = tl.arange(0, B_TAIL)[None, :]
                            in_tail = (head < KV_HEADS - first) & (tail < TAIL)
                            rest = tl.load(at + 2 * HALF + tail, mask=in_tail)
                            tail_to = k_cache + kc + first * kc_head + head * kc_head + 2 * HALF + tail
                            tl.store(tail_to, rest, mask=in_tail)
                        wide = tl.arange(0, B_V)[None, :]
                        in_v = (head < KV_HEADS - first) & (wide < V_DIM)
                        row = tl.load(v + t * v_token + first * v_head + head * v_head + wide, mask=in_v)
                        v_to = v_cache + vc + first * vc_head + head * vc_head + wide
                        tl.store(v_to, row, mask=in_v)


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
    """The contract is `hal.ops.rope_kv_write`'s; no fp8 cache, so no scale is read."""
    n, q_heads, head_dim = q.shape
    kv_heads = k.shape[1]
    max_positions, rotary = cos_sin_cache.shape
    if n == 0 or max_positions == 0:
        return
    cached, v_dim, ints = addresses(q, k, v, k_cache, v_cache)
    half, tail = rotary // 2, head_dim - rotary
    wide = half_tile(half, interleaved)
    q_tile, k_tile = _tiles(q_heads, kv_heads, wide, max(tail, v_dim), interleaved)
    _rope_kv_write(
        (min(n, vector_cores(q.device)),),
        q, k, v if cached else None, cos_sin_cache, positions, k_cache, v_cache, slots,
        n, max_positions, *ints,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HALF=half, TAIL=tail, V_DIM=v_dim,
        Q_TILE=q_tile, K_TILE=k_tile, B_HALF=wide, B_TAIL=pow2(tail), B_V=pow2(v_dim),
        PAIRS=interleaved, CACHE=cached, WRITE_K=write_k,
    )  # fmt: skip


def addresses(
    q: Tensor, k: Tensor, v: Tensor | None, k_cache: Tensor | None, v_cache: Tensor | None
) -> tuple[bool, int, tuple[int, ...]]:
    """(whether there are caches, v's head dim or 1, `INTS` from the number of slots on)."""
    here = q.stride(0), q.stride(1), k.stride(0), k.stride(1)
    if k_cache is None or v_cache is None or v is None:
        return False, 1, (0, 1, *here, *(0,) * 8)
    sizes = count_slots(k_cache), page_of(k_cache)
    return True, v.shape[-1], (*sizes, *here, v.stride(0), v.stride(1), *strides(k_cache), *strides(v_cache))


def half_tile(half: int, interleaved: bool) -> int:
    """Lanes for half a head. bishengir-compile-a5 1.2.0 aborts on a loop over tiles of 32 interleaved 16-bit pairs."""
    return max(64, pow2(half)) if interleaved else pow2(half)


def _tiles(q_heads: int, kv_heads: int, half: int, row: int, interleaved: bool) -> tuple[int, int]:
    """Heads in a tile of q and of k: as many as fit `TILE_BYTES` of fp32 halves, or of rows as they are.

    Taking pairs apart and together again needs two more tiles than halves do, so those are half as large.
    """
    heads = TILE_BYTES // (16 if interleaved else 8) // pow2(half)
    q_tile = max(1, min(pow2(q_heads), heads))
    k_tile = max(1, min(pow2(kv_heads), heads, TILE_BYTES // 4 // pow2(row)))
    return q_tile, k_tile


def cache_refusal(sig: Any, caches: tuple[str, ...], dims: tuple[str, ...]) -> str | None:
    """No fp8 cache, and no row wider than a tile; else None."""
    for name in caches:
        cache = sig[name]
        if cache is not None and cache.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"fp8: {name} is {cache.dtype}, and triton-ascend 3.2.0 has no fp8 tensors"
    widest = TILE_BYTES // 8
    for name in dims:
        if sig.dims.get(name, 0) > widest:
            return f"head_dim: {name} is {sig.dims[name]}, a tile of the unified buffer takes {widest}"
    return None


def supports(sig: Any) -> str | None:
    """No fp8 (triton-ascend 3.2.0 has no such tensors); a head's half and a row of v must fit a tile."""
    return cache_refusal(sig, ("k_cache", "v_cache"), ("head_dim", "v_head_dim"))
