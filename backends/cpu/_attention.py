"""What the two attention ops share on the CPU: one request's rows, and attention over them.

torch's own fused kernel (blocks of keys, fp32 sums, the matrix units of the CPU) where its contract fits: equal head
dims, no logit cap, no scale for v, no log-sum-exp of 16-bit queries. Its output is rounded once. Elsewhere the
same in fp32, with torch's matrix products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hal.ops.spec import FP8

TOKENS = 128
"""Queries of a request that are done together where a mask is needed: it has their number times that of the keys."""

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def rows(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """``[len, kv_heads, dim]`` of the cache at int64 `slots`, all of them in range."""
    raw = cache.view(torch.uint8) if cache.dtype in FP8 else cache
    if cache.ndim == 4:
        page = cache.shape[1]
        found = raw[slots, 0] if page == 1 else raw[slots // page, slots % page]
    else:
        found = raw.index_select(0, slots)
    return found.view(cache.dtype).to(dtype) if cache.dtype in FP8 else found


def fits(q: Tensor, v_head_dim: int, logit_cap: float, v_scale: object, lse: Tensor | None) -> bool:
    """Whether torch's fused kernel computes this. Of 16-bit queries its log-sum-exp has 17 right bits only."""
    if lse is not None and q.dtype != torch.float32:
        return False
    return q.shape[2] == v_head_dim and not logit_cap and v_scale is None


def fused(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse): ``q [heads, rows, dim]``, ``k, v [len, kv_heads, dim]``; seen ``[rows, len]``, None: all.

    causal: row i sees keys up to i.
    """
    mask = None
    if seen is not None:
        mask = (
            torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
            .masked_fill_(~seen, -torch.inf)
            .view(1, 1, *seen.shape)
        )
    out, lse = _fused(
        q.unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        0.0,
        causal,
        attn_mask=mask,
        scale=scale,
    )
    out, lse = out[0], lse[0]
    if seen is not None:
        none = ~seen.any(dim=-1)
        if bool(none.any()):
            out, lse = out.masked_fill(none.view(1, -1, 1), 0.0), lse.masked_fill(none, -torch.inf)
    return out, lse


def plain(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float, logit_cap: float, v_scale: float
) -> tuple[Tensor, Tensor]:
    """The same in fp32."""
    kv_heads, group = k.shape[1], q.shape[0] // k.shape[1]
    x = q.float().reshape(kv_heads, group * q.shape[1], q.shape[2])
    logits = torch.bmm(x, k.float().permute(1, 2, 0)).mul_(scale)
    if logit_cap:
        logits = logits.div_(logit_cap).tanh_().mul_(logit_cap)
    if seen is not None:
        logits.view(kv_heads, group, *seen.shape).masked_fill_(~seen, -torch.inf)
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)
    p = logits.sub_(torch.where(lse == -torch.inf, 0.0, lse)).exp_()
    out = torch.bmm(p, v.float().transpose(0, 1)).mul_(v_scale)
    return out.view(*q.shape[:2], v.shape[2]), lse.view(q.shape[:2])
