"""decode_attention by torch_npu's fused attention: an adapter, taken where it is named
(``decode_attention=ascend/fused``).

Lengths are read on the host: one synchronisation a call, or two where the cache has pages that may be handed on as
they are (`hal.backends.ascend._fused`). Tests prove what is asked of torch_npu, by a stand-in; this project has not
run it on an NPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.backends.ascend import _fused
from hal.kv.paging import listed


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
    if out is None:
        out = torch.empty_like(q)
    keys = listed(kv_indptr, kv_indices, k_cache.shape[:-2].numel(), sliding_window)
    _fused.check("decode_attention", keys.lengths, 1)
    none = keys.keys == 0
    if sum(keys.lengths):
        found, sums = _fused.attend(
            q.unsqueeze(1), k_cache, v_cache, keys, scale=scale, causal=False, lse=lse is not None
        )
        out.copy_(found.squeeze(1))
        if lse is not None and sums is not None:
            lse.copy_(sums.squeeze(1))
    out.masked_fill_(none.view(-1, 1, 1), 0.0)
    if lse is not None:
        lse.masked_fill_(none.view(-1, 1), -torch.inf)
    return out


def supports(sig: Any) -> str | None:
    return _fused.refused(sig)
