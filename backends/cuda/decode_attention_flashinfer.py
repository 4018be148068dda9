"""decode_attention by FlashInfer: an adapter, chosen by name alone (``decode_attention=cuda/flashinfer``).

FlashInfer plans on the host: the listing is made well-formed (a page a slot, none that is not there) and its lengths
are read, one synchronisation a call. Its kernels on tensor cores sum weights that are rounded to q's dtype, so a
log-sum-exp is asked of the others, which take some numbers of query heads a key/value head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hal.backends.cuda import _flashinfer
from hal.kv.paging import list_keys

GROUPS = (1, 2, 3, 4, 8)
"""Query heads a key/value head that its kernels without tensor cores take."""


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
    (bs, q_heads, dim), kv_heads = q.shape, k_cache.shape[-2]
    if out is None:
        out = torch.empty(bs, q_heads, dim, dtype=q.dtype, device=q.device)
    group = q_heads // kv_heads
    # Without tensor cores the time grows with the group.
    tensor_cores = group not in GROUPS or (lse is None and group >= 4)
    with _flashinfer.hold(
        "BatchDecodeWithPagedKVCacheWrapper", q.device, group, dim, use_tensor_cores=tensor_cores, backend="fa2"
    ) as wrapper:
        keys = list_keys(kv_indptr, kv_indices, k_cache.shape[:-2].numel(), sliding_window)
        if not sum(keys.lengths):
            _flashinfer.clear_empty(out, lse, keys.keys)
            return out
        lengths = torch.tensor(keys.lengths, dtype=torch.int32, device="cpu")
        indptr = torch.zeros(bs + 1, dtype=torch.int32, device="cpu")
        indptr[1:] = lengths.cumsum(0)
        # A window is of positions, which `list_keys` has applied already.
        wrapper.plan(
            indptr,
            keys.slots,
            lengths.clamp(max=1),
            q_heads,
            kv_heads,
            dim,
            1,
            window_left=-1,
            q_data_type=q.dtype,
            kv_data_type=k_cache.dtype,
            sm_scale=float(scale),
        )
        caches = (_flashinfer.as_pages(k_cache), _flashinfer.as_pages(v_cache))
        wrapper.run(q, caches, out=out, lse=lse, return_lse=lse is not None)
    if lse is not None:
        lse *= math.log(2.0)  # FlashInfer's is to the base 2
    _flashinfer.clear_empty(out, lse, keys.keys)
    return out


def supports(sig: Any) -> str | None:
    why = _flashinfer.unsupported(sig)
    if why is None and sig["lse"] is not None and sig.dims["q_heads"] // sig.dims["kv_heads"] not in GROUPS:
        shown = ", ".join(map(str, GROUPS))
        return f"adapter: FlashInfer has an exact log-sum-exp for {shown} query heads a key/value head"
    return why
