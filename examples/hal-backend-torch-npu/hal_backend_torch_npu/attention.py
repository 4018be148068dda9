"""decode_attention and extend_attention by torch_npu's npu_fused_infer_attention_score.

It wants lengths on the host, and whole pages of a multiple of 16 slots, or of 128 where a request has several queries.
A listing that is made of such pages goes by block table; any other has its rows gathered first. To see which costs a
synchronisation, where the cache has such pages; the lengths cost another one in decode_attention, and one to three in
extend_attention.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import hal
from hal.kv.paging import Listing, list_keys, runs

MAX_REQUESTS = 65536
"""In a call."""
MAX_KEYS = {True: 262144, False: 20971520}
"""Of a request, by whether it has a single query."""


def probe() -> str | None:
    """Why it can't run here, or None."""
    try:
        import torch_npu  # noqa: F401
    except Exception as e:
        return f"torch_npu does not load: {e}"
    npu = getattr(torch, "npu", None)
    return None if npu and npu.is_available() else "torch_npu sees no NPU"


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
    keys = list_keys(kv_indptr, kv_indices, k_cache.shape[:-2].numel(), sliding_window)
    _check_lengths("decode_attention", keys.lengths, 1)
    if sum(keys.lengths):
        found, sums = _attend(q.unsqueeze(1), k_cache, v_cache, keys, scale=scale, causal=False, lse=lse is not None)
        out.copy_(found.squeeze(1))
        if lse is not None and sums is not None:
            lse.copy_(sums.squeeze(1))
    _clear(out, lse, keys.keys == 0)
    return out


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
    # torch_npu aligns a request's last query with its last key: `runs` cuts the batch so that this is true.
    batch = runs(qo_indptr, kv_indptr, kv_indices, q.shape[0], k_cache.shape[:-2].numel(), causal)
    lengths = batch.keys.lengths
    # Runs with as many queries make one call, so that no query is padding: its layout of queries end to end is for
    # few shapes only.
    alike: dict[int, list[int]] = defaultdict(list)
    for i, (begin, end) in enumerate(pairwise(batch.rows)):
        if lengths[i]:
            alike[end - begin].append(i)
    for queries, members in alike.items():
        _check_lengths("extend_attention", [lengths[i] for i in members], queries)

    for queries, members in alike.items():
        which = torch.tensor(members, dtype=torch.int64, device=q.device)
        keys = Listing(batch.keys.slots, batch.keys.begin[which], batch.keys.keys[which], [lengths[i] for i in members])
        first = torch.tensor([batch.rows[i] for i in members], dtype=torch.int64, device=q.device)
        rows = first.view(-1, 1) + torch.arange(queries, dtype=torch.int64, device=q.device)
        found, sums = _attend(q[rows], k_cache, v_cache, keys, scale=scale, causal=causal, lse=lse is not None)
        out[rows] = found
        if lse is not None and sums is not None:
            lse[rows] = sums
    none = batch.seen == 0
    _clear(out, lse, none if batch.owned is None else none & batch.owned)
    return out


def supports_decode_attention(sig: Any) -> str | None:
    return _unsupported(sig)


def supports_extend_attention(sig: Any) -> str | None:
    if sig["sliding_window"] != "off":
        return "torch-npu: no windows where a request has several queries"
    if sig.dims["q_heads"] * sig.dims["head_dim"] >= 65535:
        return "torch-npu: fewer than 65535 elements in a row of q"
    return _unsupported(sig)


def _unsupported(sig: Any) -> str | None:
    q, dims = sig["q"], sig.dims
    if q.dtype not in (torch.float16, torch.bfloat16) or sig["k_cache"].dtype != q.dtype:
        return "torch-npu: fp16 and bf16, caches of q's dtype"
    if sig["logit_cap"] != "off":
        return "torch-npu: it caps no logits"
    if dims["head_dim"] % 16 or dims["head_dim"] > 512 or dims["v_head_dim"] != dims["head_dim"]:
        return "torch-npu: heads of a multiple of 16 and at most 512 elements, k's and v's alike"
    if dims["q_heads"] > 256 or dims["q_heads"] // dims["kv_heads"] > 64:
        return "torch-npu: at most 256 query heads, and 64 a key/value head"
    for name in ("q", "k_cache", "v_cache"):
        if sig[name].stride != "contiguous":
            return f"torch-npu: {name} must be contiguous"
    return None


def _check_lengths(op: str, lengths: list[int], queries: int) -> None:
    """The limits on a call that only lengths tell of."""
    if len(lengths) > MAX_REQUESTS:
        raise hal.ArgumentError(
            op, "q", f"at most {MAX_REQUESTS} requests of {queries} queries, by torch_npu", str(len(lengths))
        )
    limit = MAX_KEYS[queries == 1]
    if max(lengths, default=0) > limit:
        raise hal.ArgumentError(
            op, "kv_indptr", f"at most {limit} keys of {queries} queries, by torch_npu", str(max(lengths))
        )


def _clear(out: Tensor, lse: Tensor | None, none: Tensor) -> None:
    """What the contract says of rows that see no key."""
    out.masked_fill_(none.view(-1, 1, 1), 0.0)
    if lse is not None:
        lse.masked_fill_(none.view(-1, 1), -torch.inf)


def _attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, keys: Listing, *, scale: float, causal: bool, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """``q [requests, queries, heads, dim]`` over each request's `keys`, some of which has any: the output, and
    ``[requests, queries, heads]`` log-sum-exps. What a request without keys gets is garbage."""
    import torch_npu

    requests, queries, heads, dim = q.shape
    # Its documentation does not say what a length of 0 gives: such a request sees one key.
    lengths = [max(n, 1) for n in keys.lengths]
    k, v, how = _rows(k_cache, v_cache, keys, lengths, 16 if queries == 1 else 128)
    if causal and queries > 1:
        # Mode 3 aligns the last query with the last key, by each request's own lengths, and tiles this mask.
        at = torch.arange(2048, dtype=torch.int64, device=q.device)
        how |= {"sparse_mode": 3, "atten_mask": at > at.view(-1, 1)}
    found, sums = torch_npu.npu_fused_infer_attention_score(
        q.view(requests, queries, heads * dim),
        k,
        v,
        num_heads=heads,
        num_key_value_heads=k_cache.shape[-2],
        input_layout="BSH",
        scale=float(scale),
        softmax_lse_flag=lse,
        actual_seq_lengths_kv=lengths,
        **how,
    )
    return found.view(q.shape), sums.squeeze(-1).transpose(1, 2) if lse else None


def _rows(
    k_cache: Tensor, v_cache: Tensor, keys: Listing, lengths: list[int], multiple: int
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Keys, values and the options that find each request's: pages and a block table where they serve, or rows
    ``[bs, longest, heads * dim]``."""
    longest = max(lengths)
    pages, page = k_cache.shape[:2] if k_cache.ndim == 4 else (0, 1)
    row = k_cache.shape[-2] * k_cache.shape[-1]
    if (
        page % multiple == 0
        and page <= 512
        and row <= 65535
        and k_cache.numel() < 2**31
        # Requests that share pages may list more of them than there are, which it refuses.
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
