"""What the adapters of torch_npu's fused attention share: what they refuse, and the call.

npu_fused_infer_attention_score wants lengths on the host, and whole pages of a multiple of 16 slots, or of 128 where
a request has several queries. A listing that is made of such pages goes by block table; any other has its rows
gathered first. To see which costs a synchronisation, where the cache has such pages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal._errors import ArgumentError
from hal.kv.paging import Listing

REQUESTS = 65536
"""In a call."""
KEYS = {True: 262144, False: 20971520}
"""Of a request, by whether it has a single query."""


def check(op: str, lengths: list[int], queries: int) -> None:
    """The limits on a call that only lengths tell of."""
    if len(lengths) > REQUESTS:
        raise ArgumentError(
            op, "q", f"at most {REQUESTS} requests of {queries} queries, by torch_npu", str(len(lengths))
        )
    most = KEYS[queries == 1]
    if max(lengths, default=0) > most:
        raise ArgumentError(
            op, "kv_indptr", f"at most {most} keys of {queries} queries, by torch_npu", str(max(lengths))
        )


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, keys: Listing, *, scale: float, causal: bool, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """``q [requests, queries, heads, dim]`` over each request's `keys`, some of which has any: the output, and
    ``[requests, queries, heads]`` log-sum-exps. What a request without keys gets is garbage."""
    import torch_npu

    requests, queries, heads, dim = q.shape
    # It is not said what a length of 0 gives: such a request sees one key.
    lengths = [max(n, 1) for n in keys.lengths]
    k, v, how = _handed(k_cache, v_cache, keys, lengths, 16 if queries == 1 else 128)
    if causal and queries > 1:
        # Mode 3 aligns the last query with the last key, by each request's own lengths, and tiles this mask.
        at = torch.arange(2048, dtype=torch.int64, device=q.device)
        how |= {"sparse_mode": 3, "atten_mask": at > at.view(-1, 1)}
    found, sums = torch_npu.npu_fused_infer_attention_score(
        q.view(requests, queries, heads * dim), k, v, num_heads=heads, num_key_value_heads=k_cache.shape[-2],
        input_layout="BSH", scale=float(scale), softmax_lse_flag=lse, actual_seq_lengths_kv=lengths, **how,
    )  # fmt: skip
    return found.view(q.shape), sums.squeeze(-1).transpose(1, 2) if lse else None


def _handed(
    k_cache: Tensor, v_cache: Tensor, keys: Listing, lengths: list[int], multiple: int
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Keys, values and what says where in them: pages and a block table, or rows ``[bs, longest, heads * dim]``."""
    longest = max(lengths)
    pages, page = k_cache.shape[:2] if k_cache.ndim == 4 else (0, 1)
    row = k_cache.shape[-2] * k_cache.shape[-1]
    if (
        page % multiple == 0
        and page <= 512
        and row <= 65535
        and k_cache.numel() < 2**31
        # Requests that share pages may list more of them than there are, which is not taken.
        and sum(-(-n // page) for n in lengths) <= pages
    ):
        slots, own = keys.rows(-(-longest // page) * page)
        in_pages = slots.view(slots.shape[0], -1, page)
        whole = in_pages[..., :1] + torch.arange(page, dtype=torch.int64, device=slots.device)
        first = in_pages[..., 0]
        if bool(((first % page == 0) & ((in_pages == whole) | ~own.view_as(in_pages)).all(-1)).all()):
            k, v = (c.view(*c.shape[:2], -1) for c in (k_cache, v_cache))
            return k, v, {"block_table": (first // page).to(torch.int32), "block_size": page}
    slots, own = keys.rows(longest)
    k, v = (c.view(-1, row)[slots].masked_fill(~own.unsqueeze(-1), 0) for c in (k_cache, v_cache))
    return k, v, {}


def refused(sig: Any) -> str | None:
    """The limits of its interface, and those of these adapters: they hand tensors on as they are."""
    q, dims = sig["q"], sig.dims
    if q.dtype not in (torch.float16, torch.bfloat16) or sig["k_cache"].dtype != q.dtype:
        return "adapter: fp16 and bf16, caches of q's dtype"
    if sig["logit_cap"] != "off":
        return "adapter: torch_npu's fused attention caps no logits"
    if dims["head_dim"] % 16 or dims["head_dim"] > 512 or dims["v_head_dim"] != dims["head_dim"]:
        return "adapter: heads of a multiple of 16 and at most 512 elements, k's and v's alike"
    if dims["q_heads"] > 256 or dims["q_heads"] // dims["kv_heads"] > 64:
        return "adapter: at most 256 query heads, and 64 a key/value head"
    for name in ("q", "k_cache", "v_cache"):
        if sig[name].stride != "contiguous":
            return f"adapter: {name} must be contiguous"
    return None
