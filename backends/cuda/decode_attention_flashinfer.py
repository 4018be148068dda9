"""decode_attention by FlashInfer: an adapter, taken where it is named (``decode_attention=cuda/flashinfer``).

FlashInfer plans on the host: the listing is made well-formed (a page a slot, none that is not there) and its lengths
are read, one synchronisation a call. Tests prove what is asked of FlashInfer, by a stand-in; this project has not run
it on a device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hal import launch
from hal.backends.cuda._adapter import as_pages, nothing_seen, refused, slots_of
from hal.paging import listed

WORKSPACE = 128 << 20
"""Bytes of scratch a device and stream, as FlashInfer's documentation advises."""

_wrappers: dict[tuple[torch.device, int], Any] = {}


def _wrapper(device: torch.device) -> Any:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    key = (device, launch._stream(device.index) if device.type == "cuda" else 0)
    if key not in _wrappers:
        scratch = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        # Its tensor-core kernels take any number of query heads a key/value head; the others do not.
        _wrappers[key] = BatchDecodeWithPagedKVCacheWrapper(scratch, "NHD", use_tensor_cores=True)
    return _wrappers[key]


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
    keys = listed(kv_indptr, kv_indices, slots_of(k_cache), sliding_window)
    if not sum(keys.lengths):
        nothing_seen(out, lse, keys.keys)
        return out
    lengths = torch.tensor(keys.lengths, dtype=torch.int32)
    indptr = torch.zeros(bs + 1, dtype=torch.int32)
    indptr[1:] = lengths.cumsum(0)
    wrapper = _wrapper(q.device)
    # A window is of positions, which `listed` has applied already.
    wrapper.plan(
        indptr, keys.slots, lengths.clamp(max=1), q_heads, kv_heads, dim, 1, window_left=-1,
        logits_soft_cap=float(logit_cap), q_data_type=q.dtype, kv_data_type=k_cache.dtype, sm_scale=float(scale),
    )  # fmt: skip
    caches = (as_pages(k_cache), as_pages(v_cache))
    wrapper.run(q, caches, out=out, lse=lse, return_lse=lse is not None)
    if lse is not None:
        lse *= math.log(2.0)  # FlashInfer's is to the base 2
    nothing_seen(out, lse, keys.keys)
    return out


def supports(sig: Any) -> str | None:
    return refused(sig, "FlashInfer", (64, 128, 256))
