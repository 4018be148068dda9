"""kv_write: writes k and v, as they are, into the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hal._errors import ArgumentError
from hal.kv.view import count_slots
from hal.ops._checks import check_cache, check_range
from hal.ops._torch import in_range, store_rows
from hal.ops.rope_kv_write import scale_to
from hal.ops.spec import FLOATS, FP8, INDEX, OpSpec, ScaleArg, TensorArg, describe


def kv_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> None:
    """``k_cache[slots[i]] = k[i]`` and ``v_cache[slots[i]] = v[i]``: `rope_kv_write` without the rotation.

    Args:
        k: ``[n, kv_heads, head_dim]`` fp16, bf16 or fp32; head and token strides are free, the last dim is
            contiguous (a view of a fused qkv works).
        v: ``[n, kv_heads, v_head_dim]``, like k.
        k_cache: ``[slots, kv_heads, head_dim]`` or ``[pages, page_size, kv_heads, head_dim]``, any strides but
            the last dim's. Of k's dtype it gets k bit for bit; of an fp8 dtype it gets ``k / k_scale`` in fp32,
            rounded once, saturating (+-Inf to the largest, NaN stays NaN).
        v_cache: like k_cache, with v_head_dim.
        slots: ``[n]`` int32 or int64. -1 or out of range: the token is not written. Equal slots in one call:
            each element is one of the candidates'.
        k_scale: for an fp8 cache: a float or a one-element float32 tensor; None is 1.
        v_scale: likewise.

    Raises:
        ArgumentError: an argument breaks this contract; nothing is written.

    Example:
        >>> import torch, hal
        >>> k, v = torch.randn(2, 2, 64), torch.randn(2, 2, 64)
        >>> k_cache, v_cache = torch.zeros(32, 2, 64), torch.zeros(32, 2, 64)
        >>> hal.kv_write(k, v, k_cache, v_cache, torch.tensor([5, -1]))
        >>> torch.equal(k_cache[5], k[0]), int(v_cache.count_nonzero(dim=(1, 2)).count_nonzero())
        (True, 1)

    Source: the contract of vLLM's ``reshape_and_cache_flash``, with every slot defined.
    """
    written = in_range(slots, count_slots(k_cache))
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        rows = x if x.dtype == cache.dtype else scale_to(x.float(), scale, cache.dtype)
        store_rows(cache, slots, written, rows)


def _check(a: Mapping[str, Any], dims: Mapping[str, int]) -> None:
    for x in ("k", "v"):
        check_cache("kv_write", a, f"{x}_cache", x, f"{x}_scale")
    if a["k_cache"].shape[:-1] != a["v_cache"].shape[:-1]:
        raise ArgumentError(
            "kv_write",
            "v_cache",
            f"{describe(a['k_cache'])} but for the last dim, like k_cache",
            describe(a["v_cache"]),
        )


def _check_values(a: Mapping[str, Any]) -> None:
    check_range("kv_write", "slots", a["slots"], -1, count_slots(a["k_cache"]) - 1)


SPEC = OpSpec(
    kv_write,
    static=frozenset({"kv_heads", "head_dim", "v_head_dim", "page_size"}),
    args={
        "k": TensorArg("n kv_heads head_dim", FLOATS, stride="inner"),
        "v": TensorArg("n kv_heads v_head_dim", "k", stride="inner"),
        "k_cache": TensorArg(
            "slots kv_heads head_dim | pages page_size kv_heads head_dim", FLOATS + FP8, stride="inner", mutated=True
        ),
        "v_cache": TensorArg(
            "slots kv_heads v_head_dim | pages page_size kv_heads v_head_dim",
            FLOATS + FP8,
            stride="inner",
            mutated=True,
        ),
        "slots": TensorArg("n", INDEX),
        "k_scale": ScaleArg(),
        "v_scale": ScaleArg(),
    },
    check=_check,
    check_values=_check_values,
    proof="hal.ops.proofs.kv_write",
)
