"""extend_attention by torch_npu's fused attention: an adapter, taken where it is named
(``extend_attention=ascend/fused``).

It aligns a request's last query with its last key: the batch is made into runs of which that is true
(`hal.kv.paging.runs`). The runs that have as many queries make one call, so that no query is padding: its layout of
queries end to end is for few shapes only. A synchronisation a batch, or three where entries are no key; and one a call
where the cache has pages that may be handed on as they are (`hal.backends.ascend._fused`). Tests prove what is asked
of torch_npu, by a stand-in; this project has not run it on an NPU.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hal.backends.ascend import _fused
from hal.kv.paging import Listing, runs


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
    if out is None:
        out = torch.empty_like(q)
    batch = runs(qo_indptr, kv_indptr, kv_indices, q.shape[0], k_cache.shape[:-2].numel(), causal)
    lengths = batch.keys.lengths
    alike: dict[int, list[int]] = defaultdict(list)
    for i, (begin, end) in enumerate(pairwise(batch.rows)):
        if lengths[i]:
            alike[end - begin].append(i)
    for queries, members in alike.items():
        _fused.check("extend_attention", [lengths[i] for i in members], queries)

    for queries, members in alike.items():
        which = torch.tensor(members, dtype=torch.int64, device=q.device)
        keys = Listing(
            batch.keys.slots, batch.keys.begin[which], batch.keys.keys[which], [lengths[i] for i in members]
        )
        first = torch.tensor([batch.rows[i] for i in members], dtype=torch.int64, device=q.device)
        rows = first.view(-1, 1) + torch.arange(queries, dtype=torch.int64, device=q.device)
        found, sums = _fused.attend(
            q[rows], k_cache, v_cache, keys, scale=scale, causal=causal, lse=lse is not None
        )
        out[rows] = found
        if lse is not None and sums is not None:
            lse[rows] = sums
    none = batch.seen == 0
    if batch.named is not None:
        none &= batch.named
    out.masked_fill_(none.view(-1, 1, 1), 0.0)
    if lse is not None:
        lse.masked_fill_(none.view(-1, 1), -torch.inf)
    return out


def supports(sig: Any) -> str | None:
    if sig["sliding_window"] != "off":
        return "adapter: torch_npu's fused attention is asked for no windows"
    if sig.dims["q_heads"] * sig.dims["head_dim"] >= 65535:
        return "adapter: fewer than 65535 elements in a row of q"
    return _fused.refused(sig)
