"""mla_rope_kv_write: rotates MLA's rope parts in place and writes the joint rows into the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal._errors import ArgumentError
from hal.ops._checks import check_range
from hal.ops.mla_kv_write import CACHE, STATIC, as_kv_write, check_rows, check_slots
from hal.ops.rope_kv_write import SPEC as ROPE
from hal.ops.spec import FLOATS, INDEX, SHORT, OpSpec, ScaleArg, TensorArg, ValueArg, describe


def mla_rope_kv_write(
    q_rope: Tensor,
    k_rope: Tensor,
    kv_lora: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    *,
    interleaved: bool = False,
    kv_scale: float | Tensor | None = None,
    write_k: bool = True,
) -> None:
    """Rotates q_rope and k_rope in place, and writes ``kv_lora ‖ rotated k_rope`` to the KV cache, in one kernel.

    With ``c, s = cos_sin_cache[p, :rotary_dim/2], cos_sin_cache[p, rotary_dim/2:]`` each pair (x, y) of the
    first `rotary_dim` elements of a rope part becomes ``(x c - y s, y c + x s)`` in fp32, rounded once; what is left
    of it passes through. Then ``kv_cache[slot] = kv_lora ‖ k_rope``.

    Args:
        q_rope: ``[n, q_heads, rope_dim]`` fp16, bf16 or fp32; head and token strides are free, the last dim is
            contiguous (the last part of each head of q works). Rotated in place.
        k_rope: ``[n, rope_dim]`` or ``[n, 1, rope_dim]``, like q_rope. Rotated in place unless ``write_k=False``.
        kv_lora: ``[n, lora_dim]`` or ``[n, 1, lora_dim]``, the latent part, like k_rope. Not changed.
        cos_sin_cache: ``[max_positions, rotary_dim]``, cos then sin, fp32 or q_rope's dtype (read as fp32).
            rotary_dim is even, at least 2 and at most rope_dim.
        positions: ``[n]`` int32 or int64. Out of range: the token is neither rotated nor written.
        kv_cache: ``[slots, row_dim]``, ``[pages, page_size, row_dim]`` or ``[pages, page_size, 1, row_dim]``
            (``[slots, 1, row_dim]`` is pages of one), row_dim = lora_dim + rope_dim; any strides but the last dim's.
            Of q_rope's dtype it gets kv_lora and exactly the rotated k_rope; of an fp8 dtype it gets
            ``row / kv_scale`` from the unrounded fp32 values, saturating (+-Inf to the largest, NaN stays NaN).
        slots: ``[n]`` int32 or int64. -1 or out of range: the token is rotated and not written. Equal slots
            in one call: each element is one of the candidates'.
        interleaved: pairs are (0, 1), (2, 3), ... (DeepSeek's) instead of NeoX's (0, rotary_dim/2), ...
        kv_scale: for an fp8 cache: a float or a one-element float32 tensor; None is 1.
        write_k: False leaves k_rope itself as it was, for engines that read it from the cache.

    Raises:
        ArgumentError: an argument breaks this contract; nothing is written.

    Example:
        >>> import torch, hal
        >>> q, kv_a = torch.randn(2, 16, 192), torch.randn(2, 576)
        >>> lora, k_rope = kv_a[:, :512], kv_a[:, 512:]
        >>> angle = torch.outer(torch.arange(16.0), 10000 ** (-torch.arange(0, 64, 2) / 64))
        >>> cos_sin = torch.cat([angle.cos(), angle.sin()], dim=-1)
        >>> kv_cache, slots = torch.zeros(32, 576), torch.tensor([5, 9])
        >>> hal.mla_rope_kv_write(
        ...     q[..., 128:], k_rope, lora, cos_sin, torch.tensor([0, 1]), kv_cache, slots, interleaved=True
        ... )
        >>> torch.equal(kv_cache[slots], kv_a)
        True

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1; Su et al., RoFormer (arXiv:2104.09864).
    """
    ROPE.reference(**as_rope_kv_write(locals()))


def as_rope_kv_write(a: Mapping[str, Any]) -> dict[str, Any]:
    """The call as one of `rope_kv_write`: the rope part is k, the latent part v, of one head."""
    same = {x: a[x] for x in ("cos_sin_cache", "positions", "interleaved", "write_k")}
    return {"q": a["q_rope"], **as_kv_write(a), **same}


def _check(a: Mapping[str, Any], dims: Mapping[str, int]) -> None:
    q, cos_sin, rotary, rope = a["q_rope"], a["cos_sin_cache"], dims["rotary_dim"], dims["rope_dim"]
    if cos_sin.dtype not in (torch.float32, q.dtype):
        expected = f"fp32 or {SHORT[q.dtype]}, q_rope's dtype"
        raise ArgumentError("mla_rope_kv_write", "cos_sin_cache", expected, describe(cos_sin))
    if rotary % 2 or not 0 < rotary <= rope:
        expected = f"an even rotary_dim, at least 2 and at most rope_dim {rope}"
        raise ArgumentError("mla_rope_kv_write", "cos_sin_cache", expected, f"rotary_dim {rotary}")
    check_rows("mla_rope_kv_write", a, dims)


def _check_values(a: Mapping[str, Any]) -> None:
    check_range("mla_rope_kv_write", "positions", a["positions"], 0, a["cos_sin_cache"].shape[0] - 1)
    check_slots("mla_rope_kv_write", a)


SPEC = OpSpec(
    mla_rope_kv_write,
    static=STATIC | {"q_heads", "rotary_dim"},
    args={
        "q_rope": TensorArg("n q_heads rope_dim", FLOATS, stride="inner", mutated=True),
        "k_rope": TensorArg("n rope_dim | n one rope_dim", "q_rope", stride="inner", mutated=True),
        "kv_lora": TensorArg("n lora_dim | n one lora_dim", "q_rope", stride="inner"),
        "cos_sin_cache": TensorArg("max_positions rotary_dim", FLOATS),
        "positions": TensorArg("n", INDEX),
        "kv_cache": CACHE,
        "slots": TensorArg("n", INDEX),
        "interleaved": ValueArg((False, True)),
        "kv_scale": ScaleArg(),
        "write_k": ValueArg((True, False)),
    },
    check=_check,
    check_values=_check_values,
    proof="hal.ops.proofs.mla_rope_kv_write",
)
