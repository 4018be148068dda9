"""extend_attention by FlashAttention-3: an adapter, taken where it is named (``extend_attention=cuda/fa3``).

FA3 aligns a request's last query with its last key: the batch is made into runs of which that is true
(`hal.paging.runs`), whose keys are spread out to a page table, a page a slot. The longest run is read on the host: one
synchronisation a call. Tests prove what is asked of FA3, by a stand-in; this project has not run it on a device.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hal.backends.cuda._adapter import as_pages, kept, nothing_seen, refused, slots_of
from hal.paging import runs


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
    from flash_attn_interface import flash_attn_with_kvcache

    if out is None:
        out = torch.empty_like(q)
    batch = runs(qo_indptr, kv_indptr, kv_indices, q.shape[0], slots_of(k_cache), causal, sliding_window)
    found: Tensor = torch.zeros_like(q)
    sums: Tensor | None = None if lse is None else torch.zeros_like(lse)
    if sum(batch.keys.lengths):
        table, _ = batch.keys.rows(max(batch.keys.lengths))
        found, sums, *_ = flash_attn_with_kvcache(
            q, as_pages(k_cache), as_pages(v_cache), cache_seqlens=batch.keys.keys.to(torch.int32), page_table=table,
            cu_seqlens_q=torch.tensor(batch.rows, dtype=torch.int32, device=q.device),
            max_seqlen_q=max(b - a for a, b in pairwise(batch.rows)), softmax_scale=float(scale), causal=causal,
            window_size=(batch.window, 0 if causal else -1), return_softmax_lse=True,
        )  # fmt: skip
        sums = sums.T if lse is not None else None
    nothing_seen(found, sums, batch.seen)
    kept(batch.named, out, lse, found, sums)
    return out


def supports(sig: Any) -> str | None:
    return refused(sig, "FA3", (64, 96, 128, 192, 256))
