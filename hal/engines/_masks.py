"""Attention whose new tokens see each other by a mask, as a tree of drafts does, by ops that know lists of slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal.engines._softmax import join_parts


def attend_trees(
    ops: Any,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_indptr: Tensor,
    prefix_indices: Tensor,
    tree_slots: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """As many new tokens of each request: all see its prefix, and each of the new ones those that its list names.

    Two calls, then joined: `extend_attention` over the prefixes, read once for all tokens of a request, and
    `decode_attention` over the new tokens, a list each.

    Args:
        ops: `hal`, or what ``hal.bind`` returned.
        q: ``[bs * new, q_heads, head_dim]``.
        k_cache: with the new tokens' rows.
        v_cache: likewise.
        prefix_indptr: ``[bs + 1]``, of the prefixes alone.
        prefix_indices: their slots.
        tree_slots: ``[bs * new, most]`` int32 or int64, contiguous: the slots of the new tokens that each sees, itself
            too; -1 for one that it does not. Made once a step: ``torch.where(mask, slots.view(bs, 1, new), -1)``.
        out: ``[bs * new, q_heads, v_head_dim]``, written.
        lse: ``[bs * new, q_heads]`` float32, written; None: not asked for.
        options: scale, logit_cap and the cache's scales; no sliding window.

    Returns:
        `out`.
    """
    tokens, most = tree_slots.shape
    requests = prefix_indptr.shape[0] - 1
    sums = torch.empty((2, tokens, q.shape[1]), dtype=torch.float32, device=q.device)
    count = torch.arange(max(requests, tokens) + 1, dtype=prefix_indptr.dtype, device=q.device)
    qo_indptr, tree_indptr = count[: requests + 1] * (tokens // max(requests, 1)), count[: tokens + 1] * most
    ops.extend_attention(
        q, k_cache, v_cache, qo_indptr, prefix_indptr, prefix_indices, out, sums[0], causal=False, **options
    )
    own = torch.empty_like(out)
    ops.decode_attention(q, k_cache, v_cache, tree_indptr, tree_slots.flatten(), own, sums[1], **options)
    return join_parts(out, sums[0], own, sums[1], lse)


def lists_of_tokens(
    mask: Tensor, mask_indptr: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, skip_prefix: bool
) -> tuple[Tensor, Tensor]:
    """A list of slots for each query, by masks of every form: for `decode_attention`, with as many requests as queries.

    As many entries as the masks have; reads two numbers back, so it waits for the device.

    Args:
        mask: flat, of any dtype: for each request its queries' rows over all its keys; 0 hides a key.
        mask_indptr: ``[bs + 1]``, where each request's rows begin.
        qo_indptr: ``[bs + 1]``, where its queries do.
        kv_indptr: ``[bs + 1]``, where its slots do.
        kv_indices: the slots.
        skip_prefix: all keys but a request's last new ones are seen, whatever the mask says of them.

    Returns:
        (indptr ``[n + 1]``, indices), int64; -1 where a key is hidden.
    """
    queries, keys = qo_indptr.to(torch.int64).diff(), kv_indptr.to(torch.int64).diff()
    n = int(queries.sum())
    request = torch.arange(queries.shape[0], dtype=torch.int64, device=mask.device)
    request = request.repeat_interleave(queries, output_size=n)
    lengths = keys[request]
    indptr = torch.zeros(n + 1, dtype=torch.int64, device=mask.device)
    torch.cumsum(lengths, 0, out=indptr[1:])
    total = int(indptr[-1])
    token = torch.arange(n, dtype=torch.int64, device=mask.device).repeat_interleave(lengths, output_size=total)
    row = request[token]
    j = torch.arange(total, dtype=torch.int64, device=mask.device) - indptr[token]
    nth = token - qo_indptr.to(torch.int64)[row]
    seen = mask[mask_indptr.to(torch.int64)[row] + nth * keys[row] + j] != 0
    if skip_prefix:
        seen |= j < (keys - queries)[row]
    return indptr, torch.where(seen, kv_indices[kv_indptr.to(torch.int64)[row] + j].to(torch.int64), -1)
