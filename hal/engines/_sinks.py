"""Attention sinks by the log-sum-exp that every attention op can give: no backend needs a line for them."""

from __future__ import annotations

import torch
from torch import Tensor


def room_for(q: Tensor, sinks: Tensor | None) -> Tensor | None:
    """An `lse` for a call with q ``[n, q_heads, head_dim]``; None for layers without sinks."""
    return None if sinks is None else torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


def join_sinks(out: Tensor, lse: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Attention whose softmax has one logit more for each head, with no value behind it, of one that has not.

    ``out * exp(lse) / (exp(lse) + exp(sink))``, in float32, rounded to out's dtype once more.

    Args:
        out: ``[n, q_heads, v_head_dim]``, as an attention op wrote it; changed in place.
        lse: ``[n, q_heads]`` float32, that op's. -inf, a query that sees nothing: its zeros stay.
        sinks: ``[q_heads]``, natural logits of any float dtype, neither scaled nor capped. None, as `lse`: none.

    Returns:
        `out`.

    Example:
        >>> import torch
        >>> from hal.engines import join_sinks
        >>> join_sinks(torch.ones(1, 2, 4), torch.zeros(1, 2), torch.tensor([0.0, -100.0]))[0, :, 0]
        tensor([0.5000, 1.0000])

    Source: Xiao et al., StreamingLLM (arXiv:2309.17453); learned sinks by head as in gpt-oss (arXiv:2508.10925).
    """
    if lse is None or sinks is None:
        return out
    return out.mul_(torch.sigmoid(lse - sinks).unsqueeze(-1))
