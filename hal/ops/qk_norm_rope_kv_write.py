"""qk_norm_rope_kv_write: normalises q and k per head, rotates them in place and writes k and v into the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hal._errors import ArgumentError
from hal._memory import finite, show
from hal.kv.view import count_slots
from hal.ops._torch import in_range, store_rows
from hal.ops.rope_kv_write import SPEC as ROPE
from hal.ops.rope_kv_write import check_call, check_values, rotate, scale_to
from hal.ops.spec import FLOATS, SHORT, OpSpec, TensorArg, ValueArg, describe


def qk_norm_rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    slots: Tensor | None = None,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    write_k: bool = True,
) -> None:
    """RMSNorm of each head of q and k, rotation by position, and the write of k and v, in one kernel.

    A head x becomes ``y = x / sqrt(mean(x²) + eps) * weight``; then each pair of the first `rotary_dim` elements of y
    is rotated as in `rope_kv_write`, and the rest of y stays. All in fp32, rounded once. Then ``k_cache[slot] = k``
    and ``v_cache[slot] = v``.

    Args:
        q: ``[n, q_heads, head_dim]`` fp16, bf16 or fp32; head and token strides are free, the last dim is
            contiguous (a view of a fused qkv works). Normalised and rotated in place.
        k: ``[n, kv_heads, head_dim]``, like q. Changed in place unless ``write_k=False``.
        v: ``[n, kv_heads, v_head_dim]``, like q. Not changed. None where there are no caches.
        q_weight: ``[head_dim]``, the norm's weight for all heads of q, fp32 or q's dtype.
        k_weight: ``[head_dim]``, that of k; q_weight's dtype.
        cos_sin_cache: ``[max_positions, rotary_dim]``, cos then sin, fp32 or q's dtype (read as fp32).
            rotary_dim is even, at least 2 and at most head_dim.
        positions: ``[n]`` int32 or int64. Out of range: the token stays as it is and is not written.
        k_cache: ``[slots, kv_heads, head_dim]`` or ``[pages, page_size, kv_heads, head_dim]``, any strides but
            the last dim's. Of k's dtype it gets exactly the new k; of an fp8 dtype it gets ``k / k_scale``
            from the unrounded fp32 value, saturating (+-Inf to the largest, NaN stays NaN).
            None, with v_cache and slots: norm and rope alone.
        v_cache: like k_cache, with v_head_dim.
        slots: ``[n]`` int32 or int64. -1 or out of range: q and k are changed, nothing is written. Equal slots
            in one call: each element is one of the candidates'.
        eps: a finite float above 0, read as fp32.
        interleaved: pairs are (0, 1), (2, 3), ... instead of NeoX's (0, rotary_dim/2), (1, rotary_dim/2 + 1), ...
        k_scale: for an fp8 cache: a float or a one-element float32 tensor; None is 1.
        v_scale: likewise.
        write_k: False (needs caches) leaves k itself as it was, for engines that read it from the cache.

    Raises:
        ArgumentError: an argument breaks this contract; nothing is written.

    Example:
        >>> import torch, hal
        >>> q, k, v = torch.randn(2, 8, 64), torch.randn(2, 2, 64), torch.randn(2, 2, 64)
        >>> angle = torch.outer(torch.arange(16.0), 10000 ** (-torch.arange(0, 64, 2) / 64))
        >>> cos_sin, one = torch.cat([angle.cos(), angle.sin()], dim=-1), torch.ones(64)
        >>> k_cache, v_cache, slots = torch.zeros(32, 2, 64), torch.zeros(32, 2, 64), torch.tensor([5, 9])
        >>> hal.qk_norm_rope_kv_write(q, k, v, one, one, cos_sin, torch.tensor([0, 1]), k_cache, v_cache, slots)
        >>> torch.equal(k_cache[slots], k), torch.allclose(q.square().mean(-1), torch.ones(2, 8))
        (True, True)

    Source: Zhang and Sennrich, RMSNorm (arXiv:1910.07467), per head as in Qwen3 (arXiv:2505.09388); RoFormer
    (arXiv:2104.09864).
    """
    max_positions, rotary = cos_sin_cache.shape
    if q.shape[0] == 0 or max_positions == 0:
        return
    valid = in_range(positions, max_positions)
    cos, sin = cos_sin_cache[torch.where(valid, positions, 0)].float().unsqueeze(1).chunk(2, dim=-1)
    new = {}
    for name, x, weight in (("q", q, q_weight), ("k", k, k_weight)):
        y = normalize(x.float(), weight.float(), eps)
        new[name] = torch.cat([rotate(y, cos, sin, interleaved), y[..., rotary:]], dim=-1)
    where = valid.view(-1, 1, 1)
    if k_cache is not None and v_cache is not None and slots is not None and v is not None:
        rows_k, rows_v = new["k"].to(k.dtype), v
        if k_cache.dtype != k.dtype:
            rows_k = scale_to(new["k"], k_scale, k_cache.dtype)
        if v_cache.dtype != v.dtype:
            rows_v = scale_to(v.float(), v_scale, v_cache.dtype)
        written = valid & in_range(slots, count_slots(k_cache))
        store_rows(k_cache, slots, written, rows_k)
        store_rows(v_cache, slots, written, rows_v)
    q.copy_(torch.where(where, new["q"].to(q.dtype), q))
    if write_k:
        k.copy_(torch.where(where, new["k"].to(k.dtype), k))


def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim, in x's dtype."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def _check(a: Mapping[str, Any], dims: Mapping[str, int]) -> None:
    weight, q = a["q_weight"], a["q"]
    if weight.dtype not in (torch.float32, q.dtype):
        raise ArgumentError(
            "qk_norm_rope_kv_write", "q_weight", f"fp32 or {SHORT[q.dtype]}, q's dtype", describe(weight)
        )
    check_call("qk_norm_rope_kv_write", a, dims)


def _check_sizes(*values: Any) -> None:
    """eps is no size, but like one it may change from call to call."""
    eps = values[_EPS]
    if not finite(eps) or not eps > 0:
        raise ArgumentError("qk_norm_rope_kv_write", "eps", "a finite float above 0", show(eps))


SPEC = OpSpec(
    qk_norm_rope_kv_write,
    static=ROPE.static,
    args={
        **{name: ROPE.args[name] for name in ("q", "k", "v")},
        "q_weight": TensorArg("head_dim", FLOATS),
        "k_weight": TensorArg("head_dim", "q_weight"),
        **{n: ROPE.args[n] for n in ("cos_sin_cache", "positions", "k_cache", "v_cache", "slots")},
        "eps": ValueArg(),
        **{name: ROPE.args[name] for name in ("interleaved", "k_scale", "v_scale", "write_k")},
    },
    check=_check,
    check_sizes=_check_sizes,
    check_values=partial(check_values, "qk_norm_rope_kv_write"),
    proof="hal.ops.proofs.qk_norm_rope_kv_write",
)

_EPS = list(SPEC.args).index("eps")
