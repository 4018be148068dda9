"""decode_attention by torch_npu's fused attention: an adapter, taken where it is named
(``decode_attention=ascend/fused``).

npu_fused_infer_attention_score wants lengths on the host, and whole pages of a multiple of 16 slots. A listing that
is made of such pages goes by block table; any other has its rows gathered first. Two synchronisations a call, one
where the cache has no such pages. Tests
prove what is asked of torch_npu, by a stand-in; this project has not run it on an NPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.paging import Listing, listed


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
    import torch_npu

    (bs, q_heads, dim), kv_heads = q.shape, k_cache.shape[-2]
    if out is None:
        out = torch.empty_like(q)
    keys = listed(kv_indptr, kv_indices, k_cache.shape[:-2].numel(), sliding_window)
    none = keys.keys == 0
    if sum(keys.lengths):
        k, v, paged = _handed(k_cache, v_cache, keys)
        found, sums = torch_npu.npu_fused_infer_attention_score(
            q.view(bs, 1, q_heads * dim), k, v, num_heads=q_heads, num_key_value_heads=kv_heads, input_layout="BSH",
            scale=float(scale), sparse_mode=0, softmax_lse_flag=lse is not None,
            # It is not said what a length of 0 gives: such a request sees one key, and its result is dropped.
            actual_seq_lengths_kv=[max(n, 1) for n in keys.lengths], **paged,
        )  # fmt: skip
        out.copy_(found.view(bs, q_heads, dim))
        if lse is not None:
            lse.copy_(sums.reshape(bs, q_heads))
    out.masked_fill_(none.view(-1, 1, 1), 0.0)
    if lse is not None:
        lse.masked_fill_(none.view(-1, 1), -torch.inf)
    return out


def _handed(k_cache: Tensor, v_cache: Tensor, keys: Listing) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Keys, values and what says where in them: pages and a block table, or rows ``[bs, longest, heads * dim]``."""
    longest = max(keys.lengths)
    page = k_cache.shape[1] if k_cache.ndim == 4 else 1
    if page % 16 == 0 and page <= 512:
        slots, own = keys.rows(-(-longest // page) * page)
        in_pages = slots.view(slots.shape[0], -1, page)
        whole = in_pages[..., :1] + torch.arange(page, device=slots.device)
        first = in_pages[..., 0]
        if bool(((first % page == 0) & ((in_pages == whole) | ~own.view_as(in_pages)).all(-1)).all()):
            k, v = (c.view(*c.shape[:2], -1) for c in (k_cache, v_cache))
            return k, v, {"block_table": (first // page).to(torch.int32), "block_size": page}
    slots, own = keys.rows(longest)
    k, v = (
        c.view(-1, c.shape[-2] * c.shape[-1])[slots].masked_fill(~own.unsqueeze(-1), 0)
        for c in (k_cache, v_cache)
    )
    return k, v, {}


def supports(sig: Any) -> str | None:
    q, dims = sig["q"], sig.dims
    if q.dtype not in (torch.float16, torch.bfloat16) or sig["k_cache"].dtype != q.dtype:
        return "adapter: fp16 and bf16, caches of q's dtype"
    if sig["logit_cap"] != "off":
        return "adapter: torch_npu's fused attention caps no logits"
    if dims["head_dim"] % 16 or dims["head_dim"] > 512 or dims["v_head_dim"] != dims["head_dim"]:
        return "adapter: heads of a multiple of 16 and at most 512 elements, k's and v's alike"
    if dims["q_heads"] // dims["kv_heads"] > 64:
        return "adapter: at most 64 query heads a key/value head"
    for name in ("q", "k_cache", "v_cache"):
        if sig[name].stride != "contiguous":
            return f"adapter: {name} must be contiguous"
    return None
