"""What the two attention kernels share: the running softmax of a tile of query rows over listed slots.

Two ways. `over_tiles` takes keys by the tile and multiplies on the cube unit: slots that follow each other are one copy
to it, others are gathered row by row on the vector unit, which also keeps the softmax. `over` takes one key at a time,
all on the vector unit, for heads too wide for a tile.
"""

# A kernel's parameters have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hal.backends.ascend._device import TILE_BYTES, page_of, pow2, vector_cores
from hal.kv.view import count_slots, strides


@triton.jit
def _tanh(x):
    """By its series near 0, where the other form loses all its digits."""
    y = tl.abs(x)
    e = tl.exp(-2.0 * y)
    far = (1.0 - e) / (1.0 + e)
    z = x * x
    near = y * (1.0 + z * (-1.0 / 3 + z * (2.0 / 15 + z * (-17.0 / 315 + z * (62.0 / 2835)))))
    found = tl.where(y < 0.3, near, far)
    return tl.where(x < 0.0, -found, found)


@triton.jit
def over(
    x, k_base, v_base, indices, start, end, num_slots, page, kc_page, kc_token, vc_page, vc_token, cap,
    t, own, window, ROWS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, B_K: tl.constexpr,
    B_V: tl.constexpr, CAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """(acc, top, total) of the rows x ``[ROWS, B_K]``, fp32 and scaled, over the entries [start, end).

    Row r is of token ``t[r]``, a whole fp32 number below ROWS, whose own entry is ``own + t[r]``: with CAUSAL it sees
    no entry after it, with WINDOW none more than `window` before it.
    """
    column_k = tl.arange(0, B_K)
    column_v = tl.arange(0, B_V)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, B_V], 0.0, tl.float32)
    for j in range(start, end):
        slot = tl.load(indices + j).to(tl.int64)
        if (slot >= 0) & (slot < num_slots):
            kc = k_base + (slot // page) * kc_page + (slot % page) * kc_token
            vc = v_base + (slot // page) * vc_page + (slot % page) * vc_token
            k = tl.load(kc + column_k, mask=column_k < K_DIM, other=0.0).to(tl.float32)
            v = tl.load(vc + column_v, mask=column_v < V_DIM, other=0.0).to(tl.float32)
            logit = tl.sum(x * k[None, :], 1)
            if CAP:
                logit = cap * _tanh(logit / cap)
            # Beyond a tile's tokens the distance does not matter: within them it is exact in fp32.
            if CAUSAL:
                after = tl.minimum(tl.maximum(j - own, -1), ROWS).to(tl.float32)
                logit = tl.where(t >= after, logit, float("-inf"))
            if WINDOW:
                before = tl.minimum(tl.maximum(j - own + window, -1), ROWS).to(tl.float32)
                logit = tl.where(t <= before, logit, float("-inf"))
            new = tl.maximum(top, logit)
            base = new
            if CAUSAL or WINDOW:
                # A row that has seen nothing yet: -inf less -inf is NaN.
                base = tl.where(new > float("-inf"), new, 0.0)
            keep = tl.exp(top - base)
            p = tl.exp(logit - base)
            total = total * keep + p
            acc = acc * keep[:, None] + p[:, None] * v[None, :]
            top = new
    return acc, top, total


@triton.jit
def _following(indices, j, end, num_slots, page, KEYS: tl.constexpr, RUNS: tl.constexpr):
    """Entry j's slot, and how many entries from j have right slots that, with RUNS, follow each other in a page."""
    slot = tl.load(indices + j).to(tl.int64)
    limit = tl.minimum(end - j, KEYS)
    ok = (slot >= 0) & (slot < num_slots)
    if RUNS:
        limit = tl.minimum(limit, tl.minimum(page - slot % page, num_slots - slot))
    count = ok.to(tl.int64)
    going = ok
    while going & (count < limit):
        other = tl.load(indices + j + count).to(tl.int64)
        if RUNS:
            going = other == slot + count
        else:
            going = (other >= 0) & (other < num_slots)
        count += going.to(tl.int64)
    return slot, count


@triton.jit
def _weights(
    logit, top, total, count, j, scale, cap, t, own, window, place, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CAP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """(weights, what is kept of earlier sums, top, total) after `count` entries from j, whose products are `logit`."""
    logit = logit * scale
    if CAP:
        logit = cap * _tanh(logit / cap)
    logit = tl.where(place < count.to(tl.float32), logit, float("-inf"))
    # Beyond a tile's keys and tokens the distance does not matter: within them it is exact in fp32.
    if CAUSAL:
        after = tl.minimum(tl.maximum(j - own, -KEYS), ROWS).to(tl.float32)
        logit = tl.where(t >= place + after, logit, float("-inf"))
    if WINDOW:
        before = tl.minimum(tl.maximum(j - own + window, -KEYS - 1), ROWS).to(tl.float32)
        logit = tl.where(t <= place + before, logit, float("-inf"))
    new = tl.maximum(top, tl.max(logit, 1))
    # A row that has seen nothing yet: -inf less -inf is NaN.
    base = tl.where(new > float("-inf"), new, 0.0)
    keep = tl.exp(top - base)
    p = tl.exp(logit - base[:, None])
    return p, keep, new, total * keep + tl.sum(p, 1)


@triton.jit
def over_tiles(
    xa, xb, k_base, v_base, indices, start, end, num_slots, page, kc_page, kc_token, vc_page, vc_token, scale, cap,
    t, own, window, ROWS: tl.constexpr, KEYS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    K_A: tl.constexpr, K_B: tl.constexpr, B_V: tl.constexpr, CAP: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, RUNS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """As `over`, of rows in two parts, xa ``[ROWS, K_A]`` and xb ``[ROWS, K_B]`` (None: K_B is 0), not scaled.

    A tile is at most KEYS entries. With RUNS their slots follow each other in a page; else they only are slots. With
    SHARED a key's first V_DIM = K_A numbers are its value. t is ``[ROWS, 1]``.
    """
    r = tl.arange(0, KEYS)
    column_a = tl.arange(0, K_A)
    column_v = tl.arange(0, B_V)
    place = r[None, :].to(tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, B_V], 0.0, tl.float32)
    j = start
    while j < end:
        slot, count = _following(indices, j, end, num_slots, page, KEYS, RUNS)
        if RUNS:
            kc = k_base + (slot // page) * kc_page + (slot % page) * kc_token
            there = r[:, None] < count.to(tl.int32)
            ka = tl.load(
                kc + r[:, None] * kc_token + column_a[None, :], mask=there & (column_a[None, :] < K_DIM), other=0.0
            )
            if K_B:
                column_b = K_A + tl.arange(0, K_B)
                kb = tl.load(
                    kc + r[:, None] * kc_token + column_b[None, :], mask=there & (column_b[None, :] < K_DIM), other=0.0
                )
            if SHARED:
                v = ka
            else:
                vc = v_base + (slot // page) * vc_page + (slot % page) * vc_token
                v = tl.load(
                    vc + r[:, None] * vc_token + column_v[None, :], mask=there & (column_v[None, :] < V_DIM), other=0.0
                )
        else:
            ka = tl.full([KEYS, K_A], 0.0, k_base.dtype.element_ty)
            kb = tl.full([KEYS, K_B if K_B else 16], 0.0, k_base.dtype.element_ty)
            v = tl.full([KEYS, B_V], 0.0, k_base.dtype.element_ty)
            for i in range(count.to(tl.int32)):
                one = tl.load(indices + j + i).to(tl.int64)
                kc = k_base + (one // page) * kc_page + (one % page) * kc_token
                row = tl.load(kc + column_a, mask=column_a < K_DIM, other=0.0)
                ka = tl.insert_slice(ka, row[None, :], [i, 0], [1, K_A], [1, 1])
                if K_B:
                    column_b = K_A + tl.arange(0, K_B)
                    row = tl.load(kc + column_b, mask=column_b < K_DIM, other=0.0)
                    kb = tl.insert_slice(kb, row[None, :], [i, 0], [1, K_B], [1, 1])
                if not SHARED:
                    vc = v_base + (one // page) * vc_page + (one % page) * vc_token
                    row = tl.load(vc + column_v, mask=column_v < V_DIM, other=0.0)
                    v = tl.insert_slice(v, row[None, :], [i, 0], [1, B_V], [1, 1])
            if SHARED:
                v = ka
        logit = tl.dot(xa, tl.trans(ka), input_precision="ieee")
        if K_B:
            logit = tl.dot(xb, tl.trans(kb), logit, input_precision="ieee")
        p, keep, top, total = _weights(
            logit, top, total, count, j, scale, cap, t, own, window, place, ROWS, KEYS, CAP, CAUSAL, WINDOW
        )
        acc = acc * keep[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        j += tl.maximum(count, 1)
    return acc, top, total


@triton.jit
def over_pieces(
    x0, x1, x2, x3, xb, k_base, indices, start, end, num_slots, page, kc_page, kc_token, scale, cap, t, own, window,
    ROWS: tl.constexpr, KEYS: tl.constexpr, K_DIM: tl.constexpr, K_B: tl.constexpr, CAP: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """As `over_tiles` with RUNS and SHARED, of rows in four PIECEs and a rest. The first result is four PIECEs too."""
    r = tl.arange(0, KEYS)
    column = tl.arange(0, PIECE)[None, :]
    column_b = 4 * PIECE + tl.arange(0, K_B)[None, :]
    place = r[None, :].to(tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    acc0 = tl.full([ROWS, PIECE], 0.0, tl.float32)
    acc1 = tl.full([ROWS, PIECE], 0.0, tl.float32)
    acc2 = tl.full([ROWS, PIECE], 0.0, tl.float32)
    acc3 = tl.full([ROWS, PIECE], 0.0, tl.float32)
    j = start
    while j < end:
        slot, count = _following(indices, j, end, num_slots, page, KEYS, True)
        at = k_base + (slot // page) * kc_page + (slot % page) * kc_token + r[:, None] * kc_token
        there = r[:, None] < count.to(tl.int32)
        whole = there & (column < PIECE)
        k0 = tl.load(at + column, mask=whole, other=0.0)
        k1 = tl.load(at + PIECE + column, mask=whole, other=0.0)
        k2 = tl.load(at + 2 * PIECE + column, mask=whole, other=0.0)
        k3 = tl.load(at + 3 * PIECE + column, mask=whole, other=0.0)
        kb = tl.load(at + column_b, mask=there & (column_b < K_DIM), other=0.0)
        logit = tl.dot(x0, tl.trans(k0), input_precision="ieee")
        logit = tl.dot(x1, tl.trans(k1), logit, input_precision="ieee")
        logit = tl.dot(x2, tl.trans(k2), logit, input_precision="ieee")
        logit = tl.dot(x3, tl.trans(k3), logit, input_precision="ieee")
        logit = tl.dot(xb, tl.trans(kb), logit, input_precision="ieee")
        p, keep, top, total = _weights(
            logit, top, total, count, j, scale, cap, t, own, window, place, ROWS, KEYS, CAP, CAUSAL, WINDOW
        )
        p = p.to(k0.dtype)
        acc0 = acc0 * keep[:, None] + tl.dot(p, k0, input_precision="ieee")
        acc1 = acc1 * keep[:, None] + tl.dot(p, k1, input_precision="ieee")
        acc2 = acc2 * keep[:, None] + tl.dot(p, k2, input_precision="ieee")
        acc3 = acc3 * keep[:, None] + tl.dot(p, k3, input_precision="ieee")
        j += tl.maximum(count, 1)
    return acc0, acc1, acc2, acc3, top, total


def rows(b_k: int, b_v: int) -> int:
    """Query rows of a tile: what is kept of both halves, in fp32, takes 24 KiB. At most 64, since what is one number a
    row takes 32 bytes.
    """
    return max(1, min(64, pow2(TILE_BYTES * 3 // 8 // (b_k + b_v) + 1) // 2))


PIECE: tl.constexpr = tl.constexpr(128)
WIDEST = 128
"""A head's elements, rounded to a power of two, that are a tile of the cube's: of 512 (MLA) two tiles and what is kept
of their products overflow the unified buffer, or abort bishengir-compile 1.2.0. Four PIECEs of them don't."""


@dataclass(frozen=True)
class Tiling:
    """How keys and queries are cut: `rows` of queries a tile, programs, what to take for the page, constexprs."""

    rows: int
    cores: int
    page: int
    static: dict[str, Any]


def tiling(q: Tensor, k_cache: Tensor, v_cache: Tensor, wanted: int, pieces: bool = False) -> Tiling:
    """For the heads of these arguments, and at most as many rows as are `wanted`, rounded up to a power of two.

    With `pieces` the kernel has `over_pieces`.
    """
    k_dim, v_dim = q.shape[-1], v_cache.shape[-1]
    page, slots = page_of(k_cache), count_slots(k_cache)
    cores, of_k, of_v = vector_cores(q.device), strides(k_cache), strides(v_cache)
    b_v, part = max(16, pow2(v_dim)), max(16, pow2(k_dim + 1) // 2)
    rest = max(0, k_dim - part)
    static = {"K_DIM": k_dim, "V_DIM": v_dim}
    runs = page >= 16
    # Where a page follows the one before, so do their slots.
    flat = all(p == page * token for p, token, _ in (of_k, of_v))
    shared = v_cache.data_ptr() == k_cache.data_ptr() and of_v == of_k and v_dim == part
    if pieces and runs and shared and part == 4 * PIECE.value and rest:
        # bishengir-compile-a5 1.2.0 does not end on 64 keys of fp32.
        static |= {"KEYS": 128 // q.element_size(), "K_A": part, "K_B": max(16, pow2(rest)), "B_V": b_v}
        static |= {"RUNS": True, "SHARED": True, "PIECES": True}
        return Tiling(16, cores // 2, max(1, slots) if flat else page, static)
    if max(b_v, part) > WIDEST:
        b_k, b_v = pow2(k_dim), pow2(v_dim)
        static |= {"KEYS": 0, "K_A": b_k, "K_B": 0, "B_V": b_v, "RUNS": False, "SHARED": False}
        return Tiling(min(rows(b_k, b_v), pow2(wanted)), cores, page, static)
    # What is kept of the rows, of their logits and, where it is gathered, of the tile fits the unified buffer; a
    # product has at least 16 rows.
    tile = min(32, max(16, pow2(wanted)))
    keys = 64 if tile == 16 or runs else 32
    static |= {"KEYS": keys, "K_A": part, "K_B": max(16, pow2(rest)) if rest else 0, "B_V": b_v}
    return Tiling(tile, cores // 2, max(1, slots) if flat else page, {**static, "RUNS": runs, "SHARED": shared})
