"""What the adapters of FlashInfer's attention share: what they refuse, and a cache as pages of one slot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


def refused(sig: Any, library: str, head_dims: tuple[int, ...]) -> str | None:
    """FlashInfer's limits, and those of these adapters: they hand tensors on as they are, so strides that a library
    only copes with by a copy are refused."""
    q, dims = sig["q"], sig.dims
    if q.dtype not in HALVES:
        return f"adapter: {library} takes fp16 and bf16"
    if sig["k_cache"].dtype != q.dtype:
        return "adapter: fp8 caches are not handed on"
    if sig["logit_cap"] != "off":
        return f"adapter: {library} caps logits by tanh.approx, which is within 2^-11"
    if dims["head_dim"] not in head_dims or dims["v_head_dim"] != dims["head_dim"]:
        shown = ", ".join(map(str, head_dims))
        return f"adapter: {library} has heads of {shown} elements, k's and v's alike"
    for name in ("q", "k_cache", "v_cache", "out"):
        given = sig[name]
        if given is not None and given.stride != "contiguous":
            return f"adapter: {name} must be contiguous"
        if given is not None and not given.aligned:
            return f"adapter: {name} must start on a 16-byte boundary"
    return None


def as_pages(cache: Tensor) -> Tensor:
    """``[slots, 1, kv_heads, head_dim]``: every slot a page, whatever pages the cache has."""
    return cache.view(-1, 1, *cache.shape[-2:])


def slots_of(cache: Tensor) -> int:
    return cache.shape[:-2].numel()


def nothing_seen(out: Tensor, lse: Tensor | None, keys: Tensor) -> None:
    """Zeros, and a log-sum-exp of -inf, for queries without a key: libraries differ in what they leave there."""
    none = keys == 0
    out.masked_fill_(none.view(-1, 1, 1), 0.0)
    if lse is not None:
        lse.masked_fill_(none.view(-1, 1), -torch.inf)


def kept(named: Tensor | None, out: Tensor, lse: Tensor | None, found: Tensor, sums: Tensor | None) -> None:
    """The results into `out` and `lse`, but for rows that are not `named`, which stay as they were."""
    for to, new in ((out, found), (lse, sums)):
        if to is not None and new is not None and to is not new:
            to.copy_(new if named is None else torch.where(named.view(-1, *[1] * (to.ndim - 1)), new, to))
