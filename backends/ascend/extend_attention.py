"""extend_attention for Ascend: the new tokens of each request over the slots that kv_indices lists.

q ``[n, q_heads, head_dim]``, out ``[n, q_heads, v_head_dim]``; see `hal.ops.extend_attention`. A piece of work is a
tile of a request's tokens times the query heads of a key/value head, so that a row of k and v is copied once for all
of them; every P-th is a program's, which reads every request's length to find its own. The rest is `_attention.over`.
"""

# A kernel's parameters have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.backends.ascend._attention import PIECE, over, over_pieces, over_tiles, tiling
from hal.backends.ascend._device import cdiv, pow2
from hal.backends.ascend.rope_kv_write import cache_refusal
from hal.kv.view import count_slots, strides
from hal.lowered import shared_writes
from hal.triton import launch

INTS = tuple(
    """
    bs n nnz num_slots page window q_token q_head kc_page kc_token kc_head vc_page vc_token vc_head o_token o_head
    l_token
    """.split()
)


@triton.jit
def _take(
    at, first, token_step, head_step, tokens, heads, K_DIM: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Numbers `first` and following of a tile's queries, ``[TOKENS * HEADS, WIDE]``."""
    if TOKENS == 1:
        member = tl.arange(0, HEADS)[:, None]
        column = first + tl.arange(0, WIDE)[None, :]
        x = tl.load(at + member * head_step + column, mask=(member < heads) & (column < K_DIM), other=0.0)
    else:
        token = tl.arange(0, TOKENS)[:, None, None]
        member = tl.arange(0, HEADS)[None, :, None]
        column = first + tl.arange(0, WIDE)[None, None, :]
        there = (token < tokens) & (member < heads) & (column < K_DIM)
        x = tl.load(at + token * token_step + member * head_step + column, mask=there, other=0.0)
        x = tl.reshape(x, (TOKENS * HEADS, WIDE))
    return x


@triton.jit
def _put(
    to, rows, token_step, head_step, tokens, heads, DIM: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Stores the first DIM numbers of `rows` ``[TOKENS * HEADS, WIDE]`` where their tokens and heads are."""
    rows = rows.to(to.dtype.element_ty)
    column = tl.arange(0, WIDE)[None, :]
    # Two dimensions at a time: bishengir-compile's A5 form aborts on three next to the cube's products.
    if HEADS == 1:
        line = tl.arange(0, TOKENS)[:, None]
        tl.store(to + line * token_step + column, rows, mask=(line < tokens) & (column < DIM))
    else:
        few = tl.arange(0, HEADS)[:, None]
        for i in tl.static_range(TOKENS):
            these = tl.where(i < tokens, heads, 0)
            one = tl.extract_slice(rows, [i * HEADS, 0], [HEADS, WIDE], [1, 1])
            tl.store(to + i * token_step + few * head_step + column, one, mask=(few < these) & (column < DIM))


@launch.jit(do_not_specialize=(*"q k_cache v_cache qo_indptr kv_indptr indices out lse scale cap".split(), *INTS))
@shared_writes("out", "lse")  # a row of several requests gets the result of one of them
def _extend_attention(
    q, k_cache, v_cache, qo_indptr, kv_indptr, indices, out, lse, scale, cap,
    bs, n, nnz, num_slots, page, window, q_token, q_head, kc_page, kc_token, kc_head, vc_page, vc_token, vc_head,
    o_token, o_head, l_token,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_A: tl.constexpr, K_B: tl.constexpr, B_V: tl.constexpr,
    CAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RUNS: tl.constexpr, SHARED: tl.constexpr,
    PIECES: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    ROWS: tl.constexpr = TOKENS * HEADS
    t = tl.floor(tl.arange(0, ROWS).to(tl.float32) * (1.0 / HEADS))
    programs = tl.num_programs(0)
    # The first of a request's pieces that is this program's.
    mine = tl.cast(tl.program_id(0), tl.int64)
    stop = tl.minimum(tl.maximum(tl.load(qo_indptr).to(tl.int64), 0), n)
    for request in range(bs):
        first = stop
        stop = tl.minimum(tl.maximum(tl.load(qo_indptr + request + 1).to(tl.int64), 0), n)
        news = tl.maximum(stop - first, 0)
        pieces = (news + TOKENS - 1) // TOKENS * (KV_HEADS * TILES)
        for piece in range(mine, pieces, programs):
            start = tl.minimum(tl.maximum(tl.load(kv_indptr + request).to(tl.int64), 0), nnz)
            end = tl.minimum(tl.maximum(tl.load(kv_indptr + request + 1).to(tl.int64), 0), nnz)
            end = tl.maximum(start, end)
            kv_head = piece // TILES % KV_HEADS
            inner = piece % TILES * HEADS
            head = kv_head * GROUP + inner
            heads = tl.minimum(GROUP - inner, HEADS)
            done = piece // (KV_HEADS * TILES) * TOKENS
            tokens = tl.minimum(news - done, TOKENS)
            own = end - news + done
            if WINDOW:
                start = tl.maximum(start, own - window)
            if CAUSAL:
                end = tl.minimum(end, own + tokens)
            # A tile of one token sees just these entries: nothing is left to mask.
            LATER: tl.constexpr = CAUSAL and TOKENS > 1
            EARLIER: tl.constexpr = WINDOW and TOKENS > 1
            at = q + (first + done) * q_token + head * q_head
            to = out + (first + done) * o_token + head * o_head
            x = _take(at, 0, q_token, q_head, tokens, heads, K_DIM, TOKENS, HEADS, PIECE if PIECES else K_A)
            xb = None
            if K_B:
                xb = _take(at, K_A, q_token, q_head, tokens, heads, K_DIM, TOKENS, HEADS, K_B)
            if PIECES:
                x1 = _take(at, PIECE, q_token, q_head, tokens, heads, K_DIM, TOKENS, HEADS, PIECE)
                x2 = _take(at, 2 * PIECE, q_token, q_head, tokens, heads, K_DIM, TOKENS, HEADS, PIECE)
                x3 = _take(at, 3 * PIECE, q_token, q_head, tokens, heads, K_DIM, TOKENS, HEADS, PIECE)
                acc, acc1, acc2, acc3, top, total = over_pieces(
                    x, x1, x2, x3, xb, k_cache + kv_head * kc_head, indices, start, end, num_slots, page, kc_page,
                    kc_token, scale, cap, t[:, None], own, window, ROWS, KEYS, K_DIM, K_B, CAP, LATER, EARLIER,
                )  # fmt: skip
            elif KEYS:
                acc, top, total = over_tiles(
                    x, xb, k_cache + kv_head * kc_head, v_cache + kv_head * vc_head, indices, start, end, num_slots,
                    page, kc_page, kc_token, vc_page, vc_token, scale, cap, t[:, None], own, window, ROWS, KEYS, K_DIM,
                    V_DIM, K_A, K_B, B_V, CAP, LATER, EARLIER, RUNS, SHARED,
                )  # fmt: skip
            else:
                acc, top, total = over(
                    x.to(tl.float32) * scale, k_cache + kv_head * kc_head, v_cache + kv_head * vc_head, indices, start,
                    end, num_slots, page, kc_page, kc_token, vc_page, vc_token, cap, t, own, window, ROWS, K_DIM, V_DIM,
                    K_A, B_V, CAP, LATER, EARLIER,
                )  # fmt: skip
            # Nothing seen: zeros, not 0 / 0.
            by = tl.where(total > 0.0, total, 1.0)[:, None]
            if PIECES:
                _put(to, acc / by, o_token, o_head, tokens, heads, PIECE, TOKENS, HEADS, PIECE)
                _put(to + PIECE, acc1 / by, o_token, o_head, tokens, heads, PIECE, TOKENS, HEADS, PIECE)
                _put(to + 2 * PIECE, acc2 / by, o_token, o_head, tokens, heads, PIECE, TOKENS, HEADS, PIECE)
                _put(to + 3 * PIECE, acc3 / by, o_token, o_head, tokens, heads, PIECE, TOKENS, HEADS, PIECE)
            else:
                _put(to, acc / by, o_token, o_head, tokens, heads, V_DIM, TOKENS, HEADS, B_V)
            if LSE:
                sums = (top + tl.log(total))[:, None] + tl.zeros([ROWS, 8], tl.float32)
                to = lse + (first + done) * l_token + head
                _put(to, sums, l_token, 1, tokens, heads, 1, TOKENS, HEADS, 8)
        mine = (mine - pieces) % programs
        mine = tl.where(mine < 0, mine + programs, mine)


def extend_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int = -1,
    logit_cap: float = 0.0,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> Tensor:
    """The contract is `hal.ops.extend_attention`'s; no fp8 cache, so no scale is read."""
    n, q_heads, _head_dim = q.shape
    kv_heads, v_dim = v_cache.shape[-2:]
    bs = qo_indptr.shape[0] - 1
    if out is None:
        out = torch.empty(n, q_heads, v_dim, dtype=q.dtype, device=q.device)
    if n == 0 or bs == 0:
        return out
    nnz = kv_indices.shape[0]
    group = q_heads // kv_heads
    # A cap takes the unified buffer beyond what is left to the compiler.
    tile = tiling(q, k_cache, v_cache, 64, pieces=logit_cap <= 0)
    # By pieces one token a tile, whose mask would not fit.
    heads = tile.rows if "PIECES" in tile.static else min(pow2(group), tile.rows)
    tokens = tile.rows // heads
    strides_of_all = (*q.stride()[:2], *strides(k_cache), *strides(v_cache), *out.stride()[:2])
    dims = {"KV_HEADS": kv_heads, "GROUP": group, "TOKENS": tokens, "HEADS": heads, "CAP": logit_cap > 0}
    flags = {"CAUSAL": causal, "WINDOW": sliding_window >= 0, "LSE": lse is not None}
    _extend_attention(
        (min(tile.cores, (cdiv(n, tokens) + bs) * kv_heads * cdiv(group, heads)),),
        *(q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, out, lse, float(scale), float(logit_cap)),
        *(bs, n, nnz, count_slots(k_cache), tile.page, min(sliding_window, nnz)),
        *(*strides_of_all, 0 if lse is None else lse.stride(0)),
        **dims,
        **flags,
        **{"PIECES": False, **tile.static},
    )
    return out


def supports(sig: Any) -> str | None:
    """No fp8 (triton-ascend 3.2.0 has no such tensors); a head must fit a tile."""
    return cache_refusal(sig, ("k_cache",), ("head_dim", "v_head_dim"))
