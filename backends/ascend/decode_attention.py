"""decode_attention for Ascend: one query a request over the slots that kv_indices lists.

q ``[bs, q_heads, head_dim]``, out ``[bs, q_heads, v_head_dim]``; see `hal.ops.decode_attention`. A program takes every
P-th piece of work: a request, a key/value head and a tile of the query heads that it serves. The rest is
`_attention.over`.
"""

# A kernel's parameters have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from hal.backends.ascend._attention import PIECE, over, over_pieces, over_tiles, tiling
from hal.backends.ascend._device import cdiv
from hal.backends.ascend.rope_kv_write import cache_refusal
from hal.kv.view import count_slots, strides
from hal.triton import launch

INTS = tuple(
    """
    bs nnz num_slots page window q_token q_head kc_page kc_token kc_head vc_page vc_token vc_head o_token o_head
    l_token
    """.split()
)


@launch.jit(do_not_specialize=("q", "k_cache", "v_cache", "indptr", "indices", "out", "lse", "scale", "cap", *INTS))
def _decode_attention(
    q, k_cache, v_cache, indptr, indices, out, lse, scale, cap,
    bs, nnz, num_slots, page, window, q_token, q_head, kc_page, kc_token, kc_head, vc_page, vc_token, vc_head,
    o_token, o_head, l_token,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, K_DIM: tl.constexpr,
    V_DIM: tl.constexpr, K_A: tl.constexpr, K_B: tl.constexpr, B_V: tl.constexpr, CAP: tl.constexpr,
    RUNS: tl.constexpr, SHARED: tl.constexpr, PIECES: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (GROUP + TILE - 1) // TILE
    row = tl.arange(0, TILE)[:, None]
    wide_a = tl.arange(0, K_A)[None, :]
    wide_v = tl.arange(0, B_V)[None, :]
    for piece in range(tl.program_id(0), bs * (KV_HEADS * TILES), tl.num_programs(0)):
        request = piece // (KV_HEADS * TILES)
        kv_head = piece // TILES % KV_HEADS
        inner = piece % TILES * TILE
        i = tl.cast(request, tl.int64)
        head = kv_head * GROUP + inner
        heads = tl.minimum(GROUP - inner, TILE)
        start = tl.minimum(tl.maximum(tl.load(indptr + request).to(tl.int64), 0), nnz)
        end = tl.minimum(tl.maximum(tl.load(indptr + request + 1).to(tl.int64), 0), nnz)
        if window >= 0:
            start = tl.maximum(start, end - 1 - window)
        at = q + i * q_token + head * q_head
        to = out + i * o_token + head * o_head + row * o_head
        if PIECES:
            column = tl.arange(0, PIECE)[None, :]
            at += row * q_head
            there = (row < heads) & (column < PIECE)
            x0 = tl.load(at + column, mask=there, other=0.0)
            x1 = tl.load(at + PIECE + column, mask=there, other=0.0)
            x2 = tl.load(at + 2 * PIECE + column, mask=there, other=0.0)
            x3 = tl.load(at + 3 * PIECE + column, mask=there, other=0.0)
            wide_b = 4 * PIECE + tl.arange(0, K_B)[None, :]
            xb = tl.load(at + wide_b, mask=(row < heads) & (wide_b < K_DIM), other=0.0)
            acc0, acc1, acc2, acc3, top, total = over_pieces(
                x0, x1, x2, x3, xb, k_cache + kv_head * kc_head, indices, start, end, num_slots, page, kc_page,
                kc_token, scale, cap, row, 0, 0, TILE, KEYS, K_DIM, K_B, CAP, False, False,
            )  # fmt: skip
            by = tl.where(total > 0.0, total, 1.0)[:, None]
            tl.store(to + column, (acc0 / by).to(out.dtype.element_ty), mask=there)
            tl.store(to + PIECE + column, (acc1 / by).to(out.dtype.element_ty), mask=there)
            tl.store(to + 2 * PIECE + column, (acc2 / by).to(out.dtype.element_ty), mask=there)
            tl.store(to + 3 * PIECE + column, (acc3 / by).to(out.dtype.element_ty), mask=there)
        else:
            x = tl.load(at + row * q_head + wide_a, mask=(row < heads) & (wide_a < K_DIM), other=0.0)
            if KEYS:
                xb = None
                if K_B:
                    wide_b = K_A + tl.arange(0, K_B)[None, :]
                    xb = tl.load(at + row * q_head + wide_b, mask=(row < heads) & (wide_b < K_DIM), other=0.0)
                acc, top, total = over_tiles(
                    x, xb, k_cache + kv_head * kc_head, v_cache + kv_head * vc_head, indices, start, end, num_slots,
                    page, kc_page, kc_token, vc_page, vc_token, scale, cap, row, 0, 0, TILE, KEYS, K_DIM, V_DIM, K_A,
                    K_B, B_V, CAP, False, False, RUNS, SHARED,
                )  # fmt: skip
            else:
                acc, top, total = over(
                    x.to(tl.float32) * scale, k_cache + kv_head * kc_head, v_cache + kv_head * vc_head, indices, start,
                    end, num_slots, page, kc_page, kc_token, vc_page, vc_token, cap, row, 0, 0, TILE, K_DIM, V_DIM,
                    K_A, B_V, CAP, False, False,
                )  # fmt: skip
            # Nothing seen: zeros, not 0 / 0.
            found = acc / tl.where(total > 0.0, total, 1.0)[:, None]
            tl.store(to + wide_v, found.to(out.dtype.element_ty), mask=(row < heads) & (wide_v < V_DIM))
        if LSE:
            lane = tl.arange(0, TILE)
            tl.store(lse + i * l_token + head + lane, top + tl.log(total), mask=lane < heads)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    scale: float,
    sliding_window: int = -1,
    logit_cap: float = 0.0,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> Tensor:
    """The contract is `hal.ops.decode_attention`'s; no fp8 cache, so no scale is read."""
    bs, q_heads, _head_dim = q.shape
    kv_heads, v_dim = v_cache.shape[-2:]
    if out is None:
        out = torch.empty(bs, q_heads, v_dim, dtype=q.dtype, device=q.device)
    if bs == 0:
        return out
    nnz = kv_indices.shape[0]
    group = q_heads // kv_heads
    # A cap takes the unified buffer beyond what is left to the compiler.
    tile = tiling(q, k_cache, v_cache, group, pieces=logit_cap <= 0)
    strides_of_all = (*q.stride()[:2], *strides(k_cache), *strides(v_cache), *out.stride()[:2])
    dims = {"KV_HEADS": kv_heads, "GROUP": group, "TILE": tile.rows, "CAP": logit_cap > 0, "LSE": lse is not None}
    _decode_attention(
        (min(tile.cores, bs * kv_heads * cdiv(group, tile.rows)),),
        *(q, k_cache, v_cache, kv_indptr, kv_indices, out, lse, float(scale), float(logit_cap)),
        *(bs, nnz, count_slots(k_cache), tile.page, min(sliding_window, nnz)),
        *(*strides_of_all, 0 if lse is None else lse.stride(0)),
        **dims,
        **{"PIECES": False, **tile.static},
    )
    return out


def supports(sig: Any) -> str | None:
    """No fp8 (triton-ascend 3.2.0 has no such tensors); a head must fit a tile."""
    return cache_refusal(sig, ("k_cache",), ("head_dim", "v_head_dim"))
