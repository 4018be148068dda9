"""rope_kv_write: rotates q and k in place and writes k and v into the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hal._errors import ArgumentError
from hal.kv.view import count_slots
from hal.ops._checks import check_cache, check_range
from hal.ops._torch import in_range, saturate, store_rows
from hal.ops.spec import FLOATS, FP8, INDEX, SHORT, OpSpec, ScaleArg, TensorArg, ValueArg, describe


def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos_sin_cache: Tensor,
    positions: Tensor,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    slots: Tensor | None = None,
    *,
    interleaved: bool = False,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    write_k: bool = True,
) -> None:
    """Rotates q and k in place by their positions, and writes k and v to the KV cache, in one kernel.

    With ``c, s = cos_sin_cache[p, :rotary_dim/2], cos_sin_cache[p, rotary_dim/2:]`` each pair (x, y) of the
    first `rotary_dim` elements of a head becomes ``(x c - y s, y c + x s)`` in fp32, rounded once; the rest
    of the head passes through. Then ``k_cache[slot] = k`` and ``v_cache[slot] = v``.

    Args:
        q: ``[n, q_heads, head_dim]`` fp16, bf16 or fp32; head and token strides are free, the last dim is
            contiguous (a view of a fused qkv works). Rotated in place.
        k: ``[n, kv_heads, head_dim]``, like q. Rotated in place unless ``write_k=False``.
        v: ``[n, kv_heads, v_head_dim]``, like q. Not changed. None where there are no caches.
        cos_sin_cache: ``[max_positions, rotary_dim]``, cos then sin, fp32 or q's dtype (read as fp32).
            rotary_dim is even, at least 2 and at most head_dim.
        positions: ``[n]`` int32 or int64. Out of range: the token is neither rotated nor written.
        k_cache: ``[slots, kv_heads, head_dim]`` or ``[pages, page_size, kv_heads, head_dim]``, any strides but
            the last dim's. Of k's dtype it gets exactly the rotated k; of an fp8 dtype it gets ``k / k_scale``
            from the unrounded fp32 value, saturating (+-Inf to the largest, NaN stays NaN).
            None, with v_cache and slots: rope alone.
        v_cache: like k_cache, with v_head_dim.
        slots: ``[n]`` int32 or int64. -1 or out of range: the token is rotated and not written. Equal slots
            in one call: each element is one of the candidates'.
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
        >>> cos_sin = torch.cat([angle.cos(), angle.sin()], dim=-1)
        >>> k_cache, v_cache = torch.zeros(32, 2, 64), torch.zeros(32, 2, 64)
        >>> hal.rope_kv_write(q, k, v, cos_sin, torch.tensor([0, 1]), k_cache, v_cache, torch.tensor([5, 9]))
        >>> torch.equal(k_cache[9], k[1]), torch.equal(v_cache[5], v[0])
        (True, True)

    Source: Su et al., RoFormer (arXiv:2104.09864); NeoX pairing as in GPT-NeoX.
    """
    max_positions, rotary = cos_sin_cache.shape
    if q.shape[0] == 0 or max_positions == 0:
        return
    valid = in_range(positions, max_positions)
    cos, sin = cos_sin_cache[torch.where(valid, positions, 0)].float().unsqueeze(1).chunk(2, dim=-1)
    where = valid.view(-1, 1, 1)
    rotated_k = rotate(k, cos, sin, interleaved)
    q[..., :rotary] = torch.where(where, rotate(q, cos, sin, interleaved).to(q.dtype), q[..., :rotary])
    if k_cache is not None and v_cache is not None and slots is not None and v is not None:
        new_k = torch.cat([rotated_k.to(k.dtype), k[..., rotary:]], dim=-1)
        if k_cache.dtype != k.dtype:
            new_k = scale_to(torch.cat([rotated_k, k[..., rotary:].float()], dim=-1), k_scale, k_cache.dtype)
        new_v = v if v_cache.dtype == v.dtype else scale_to(v.float(), v_scale, v_cache.dtype)
        written = valid & in_range(slots, count_slots(k_cache))
        store_rows(k_cache, slots, written, new_k)
        store_rows(v_cache, slots, written, new_v)
    if write_k:
        k[..., :rotary] = torch.where(where, rotated_k.to(k.dtype), k[..., :rotary])


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The first rotary_dim elements of each head, rotated, in cos's dtype."""
    half = cos.shape[-1]
    part = x[..., : 2 * half].to(cos.dtype)
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])
    pair = (a * cos - b * sin, b * cos + a * sin)
    return torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)


def scale_to(x: Tensor, scale: float | Tensor | None, dtype: torch.dtype) -> Tensor:
    return saturate(x if scale is None else x / (scale.view(()) if isinstance(scale, Tensor) else scale), dtype)


def check_call(op: str, a: Mapping[str, Any], dims: Mapping[str, int]) -> None:
    """The rules on the table, the caches and their scales."""

    def bad(argument: str, expected: str, got: str) -> ArgumentError:
        return ArgumentError(op, argument, expected, got)

    q, cos_sin = a["q"], a["cos_sin_cache"]
    if cos_sin.dtype not in (torch.float32, q.dtype):
        raise bad("cos_sin_cache", f"fp32 or {SHORT[q.dtype]}, q's dtype", describe(cos_sin))
    rotary = dims["rotary_dim"]
    if rotary % 2 or not 0 < rotary <= dims["head_dim"]:
        raise bad(
            "cos_sin_cache",
            f"an even rotary_dim, at least 2 and at most head_dim {dims['head_dim']}",
            f"rotary_dim {rotary}",
        )
    given = [n for n in ("k_cache", "v_cache", "slots") if a[n] is not None]
    if given and len(given) < 3:
        missing = next(n for n in ("k_cache", "v_cache", "slots") if a[n] is None)
        raise bad(missing, f"a tensor, since {given[0]} is given (k_cache, v_cache and slots: all or none)", "None")
    if not given:
        if a["write_k"] is False:
            raise bad("write_k", "True where there are no caches (else the rotated k would be lost)", "False")
    elif a["v"] is None:
        raise bad("v", "a tensor, since v_cache is given", "None")
    for x in ("k", "v"):
        check_cache(op, a, f"{x}_cache", x, f"{x}_scale")
    if given and a["k_cache"].shape[:-1] != a["v_cache"].shape[:-1]:
        raise bad("v_cache", f"k_cache's shape but for the last dim, {describe(a['k_cache'])}", describe(a["v_cache"]))


def check_values(op: str, a: Mapping[str, Any]) -> None:
    """Positions and slots out of range."""
    check_range(op, "positions", a["positions"], 0, a["cos_sin_cache"].shape[0] - 1)
    if a["slots"] is not None:
        check_range(op, "slots", a["slots"], -1, count_slots(a["k_cache"]) - 1)


SPEC = OpSpec(
    rope_kv_write,
    core=True,
    static=frozenset({"q_heads", "kv_heads", "head_dim", "v_head_dim", "rotary_dim", "page_size"}),
    args={
        "q": TensorArg("n q_heads head_dim", FLOATS, stride="inner", mutated=True),
        "k": TensorArg("n kv_heads head_dim", "q", stride="inner", mutated=True),
        "v": TensorArg("n kv_heads v_head_dim", "q", stride="inner", optional=True),
        "cos_sin_cache": TensorArg("max_positions rotary_dim", FLOATS),
        "positions": TensorArg("n", INDEX),
        "k_cache": TensorArg(
            "slots kv_heads head_dim | pages page_size kv_heads head_dim",
            FLOATS + FP8,
            stride="inner",
            optional=True,
            mutated=True,
        ),
        "v_cache": TensorArg(
            "slots kv_heads v_head_dim | pages page_size kv_heads v_head_dim",
            FLOATS + FP8,
            stride="inner",
            optional=True,
            mutated=True,
        ),
        "slots": TensorArg("n", INDEX, optional=True),
        "interleaved": ValueArg((False, True)),
        "k_scale": ScaleArg(),
        "v_scale": ScaleArg(),
        "write_k": ValueArg((True, False)),
    },
    check=partial(check_call, "rope_kv_write"),
    check_values=partial(check_values, "rope_kv_write"),
    proof="hal.ops.proofs.rope_kv_write",
)
