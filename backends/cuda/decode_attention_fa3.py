"""decode_attention by FlashAttention-3: an adapter, taken where it is named (``decode_attention=cuda/fa3``).

FA3 takes a page table: the listing is made well-formed and spread out to one, a page a slot. The width is the longest
request's, read on the host: one synchronisation a call. Tests prove what is asked of FA3, by a stand-in; this project
has not run it on a device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.backends.cuda._adapter import as_pages, nothing_seen, refused, slots_of
from hal.paging import listed


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
    from flash_attn_interface import flash_attn_with_kvcache

    if out is None:
        out = torch.empty_like(q)
    keys = listed(kv_indptr, kv_indices, slots_of(k_cache), sliding_window)
    if not sum(keys.lengths):
        nothing_seen(out, lse, keys.keys)
        return out
    table, _ = keys.rows(max(keys.lengths))
    # One query, the last: it sees every key that is listed. A window is of positions, which `listed` has applied.
    found, sums, *_ = flash_attn_with_kvcache(
        q.unsqueeze(1), as_pages(k_cache), as_pages(v_cache), cache_seqlens=keys.keys.to(torch.int32),
        page_table=table, softmax_scale=float(scale), causal=True, window_size=(-1, -1),
        return_softmax_lse=True,
    )  # fmt: skip
    out.copy_(found.squeeze(1))
    if lse is not None:
        lse.copy_(sums.squeeze(-1))
    nothing_seen(out, lse, keys.keys)
    return out


def supports(sig: Any) -> str | None:
    return refused(sig, "FA3", (64, 96, 128, 192, 256))


def probe() -> str | None:
    """Why FA3 can't run on this GPU, or None."""
    capability = torch.cuda.get_device_capability()
    return (
        None
        if capability[0] == 9
        else f"FA3 needs compute capability 9.x; this is {capability[0]}.{capability[1]}"
    )
