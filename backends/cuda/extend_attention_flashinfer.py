"""extend_attention by FlashInfer: an adapter, chosen by name alone (``extend_attention=cuda/flashinfer``).

FlashInfer aligns a request's last query with its last key and plans on the host: the batch is made into runs of which
that is true (`hal.kv.paging.runs`), a page a slot, one synchronisation a call. On Hopper its kernels are those of
FlashAttention-3. Its others sum weights that are rounded to q's dtype: no log-sum-exp is asked of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hal._errors import ArgumentError
from hal.backends.cuda import _flashinfer
from hal.kv.paging import runs


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
    (n, q_heads, dim), kv_heads = q.shape, k_cache.shape[-2]
    if out is None:
        out = torch.empty_like(q)
    with _flashinfer.hold(
        "BatchPrefillWithPagedKVCacheWrapper",
        q.device,
        q_heads // kv_heads,
        dim,
        backend="fa3" if _flashinfer.hopper(q.device) else "fa2",
    ) as wrapper:
        batch = runs(qo_indptr, kv_indptr, kv_indices, n, k_cache.shape[:-2].numel(), causal, sliding_window)
        count = len(batch.keys.lengths)
        if count > _flashinfer.REQUESTS:
            raise ArgumentError(
                "extend_attention",
                "qo_indptr",
                f"at most {_flashinfer.REQUESTS} runs of queries, by FlashInfer",
                str(count),
            )
        # Rows of no request are not to be written, and FlashInfer writes all.
        found = out if batch.owned is None else torch.empty_like(out)
        sums = lse if batch.owned is None or lse is None else torch.empty_like(lse)
        if sum(batch.keys.lengths):
            lengths = torch.tensor(batch.keys.lengths, dtype=torch.int32, device="cpu")
            indptr = torch.zeros(count + 1, dtype=torch.int32, device="cpu")
            indptr[1:] = lengths.cumsum(0)
            rows = torch.tensor(batch.rows, dtype=torch.int32, device="cpu")
            wrapper.plan(
                rows,
                indptr,
                batch.keys.slots,
                lengths.clamp(max=1),
                q_heads,
                kv_heads,
                dim,
                1,
                causal=causal,
                window_left=batch.window,
                q_data_type=q.dtype,
                kv_data_type=k_cache.dtype,
                sm_scale=float(scale),
            )
            caches = (_flashinfer.as_pages(k_cache), _flashinfer.as_pages(v_cache))
            wrapper.run(q, caches, out=found, lse=sums, return_lse=sums is not None)
    if sums is not None:
        sums *= math.log(2.0)  # FlashInfer's is to the base 2
    _flashinfer.clear_empty(found, sums, batch.seen)
    _flashinfer.copy_owned(batch.owned, out, lse, found, sums)
    return out


def supports(sig: Any) -> str | None:
    why = _flashinfer.unsupported(sig)
    if why is None and sig["lse"] is not None and not _flashinfer.hopper(torch.device(sig.device)):
        return "adapter: FlashInfer has an exact log-sum-exp on compute capability 9.0"
    return why
