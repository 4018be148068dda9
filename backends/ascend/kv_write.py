"""kv_write for Ascend: k and v to their cache slots.

k ``[n, kv_heads, head_dim]``, v ``[n, kv_heads, v_head_dim]``; see `hal.ops.kv_write`. A program takes every P-th
token: its slot is a scalar, and a tile of heads is one strided copy in and one out, whose rows are contiguous in
memory. Every mask is a prefix of heads and of columns.
"""

# A kernel's parameters have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any

import triton.language as tl
from torch import Tensor

from hal.backends.ascend._device import TILE_BYTES, page_of, pow2, vector_cores
from hal.backends.ascend.rope_kv_write import cache_refusal
from hal.kv.view import count_slots, strides
from hal.lowered import shared_writes
from hal.triton import launch

INTS = tuple(
    """
    n num_slots page k_token k_head v_token v_head kc_page kc_token kc_head vc_page vc_token vc_head
    """.split()
)


@launch.jit(do_not_specialize=("k", "v", "k_cache", "v_cache", "slots", *INTS))
@shared_writes("k_cache", "v_cache")
def _kv_write(
    k, v, k_cache, v_cache, slots, n, num_slots, page, k_token, k_head, v_token, v_head,
    kc_page, kc_token, kc_head, vc_page, vc_token, vc_head,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, TILE: tl.constexpr,
    B_K: tl.constexpr, B_V: tl.constexpr,
):  # fmt: skip
    column_k = tl.arange(0, B_K)[None, :]
    column_v = tl.arange(0, B_V)[None, :]
    for token in range(tl.program_id(0), n, tl.num_programs(0)):
        slot = tl.load(slots + token).to(tl.int64)
        if (slot >= 0) & (slot < num_slots):
            t = tl.cast(token, tl.int64)
            kc = (slot // page) * kc_page + (slot % page) * kc_token
            vc = (slot // page) * vc_page + (slot % page) * vc_token
            for first in range(0, HEADS, TILE):
                head = tl.arange(0, TILE)[:, None]
                in_k = (head < HEADS - first) & (column_k < K_DIM)
                x = tl.load(k + t * k_token + first * k_head + head * k_head + column_k, mask=in_k)
                tl.store(k_cache + kc + first * kc_head + head * kc_head + column_k, x, mask=in_k)
                in_v = (head < HEADS - first) & (column_v < V_DIM)
                y = tl.load(v + t * v_token + first * v_head + head * v_head + column_v, mask=in_v)
                tl.store(v_cache + vc + first * vc_head + head * vc_head + column_v, y, mask=in_v)


def kv_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> None:
    """The contract is `hal.ops.kv_write`'s; no fp8 cache, so no scale is read."""
    n, heads, head_dim = k.shape
    v_dim = v.shape[2]
    page, num_slots = page_of(k_cache), count_slots(k_cache)
    if n == 0 or num_slots == 0:
        return
    b_k, b_v = pow2(head_dim), pow2(v_dim)
    sizes = (n, num_slots, page, *k.stride()[:2], *v.stride()[:2], *strides(k_cache), *strides(v_cache))
    tile = max(1, min(pow2(heads), TILE_BYTES // k.element_size() // max(b_k, b_v)))
    static = {"HEADS": heads, "K_DIM": head_dim, "V_DIM": v_dim, "B_K": b_k, "B_V": b_v, "TILE": tile}
    _kv_write((min(n, vector_cores(k.device)),), k, v, k_cache, v_cache, slots, *sizes, **static)


def supports(sig: Any) -> str | None:
    """No fp8 (triton-ascend 3.2.0 has no such tensors); a head must fit a tile."""
    return cache_refusal(sig, ("k_cache", "v_cache"), ("head_dim", "v_head_dim"))
