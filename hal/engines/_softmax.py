"""What follows from the log-sum-exp that every attention op can give: sinks, and one attention made of parts.

No backend needs a line for them.
"""

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


def join_parts(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, merged_lse: Tensor | None = None) -> Tensor:
    """One attention of two over different keys of the same queries, as if all keys had been one list (merge_state).

    Args:
        out: ``[n, q_heads, v_head_dim]``, over the first keys; overwritten with the result.
        lse: ``[n, q_heads]`` float32, natural logarithms. Infinite: there was no key, and its row of `out` is not read.
        other: like `out`, over the other keys.
        other_lse: like `lse`.
        merged_lse: ``[n, q_heads]`` float32, written: of all keys; it may be `lse` itself. None: not asked for.

    Returns:
        `out`, zeros where neither part had a key. Weighted in float32, rounded once.

    Example:
        >>> import torch
        >>> from hal.engines import join_parts
        >>> one, zero = torch.ones(1, 2, 4), torch.zeros(1, 2)
        >>> join_parts(one, zero, 3 * one, torch.tensor([[0.0, -torch.inf]]))[0, :, 0]
        tensor([2., 1.])

    Source: Flash-Decoding (arXiv:2205.14135); cascades: Ye et al., FlashInfer (arXiv:2501.01005).
    """
    a, b = (torch.where(x.isinf(), -torch.inf, x) for x in (lse, other_lse))
    total = torch.logaddexp(a, b)
    # Of no key at all the difference would be a NaN.
    base = torch.where(total.isinf(), 0.0, total)
    first, second = (
        torch.where(w > 0, x.float() * w, 0.0)
        for x, w in ((out, (a - base).exp().unsqueeze(-1)), (other, (b - base).exp().unsqueeze(-1)))
    )
    out.copy_(first + second)
    if merged_lse is not None:
        merged_lse.copy_(total)
    return out
