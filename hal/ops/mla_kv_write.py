"""mla_kv_write: writes MLA's joint rows, latent part and rope part, into the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from hal._errors import ArgumentError
from hal.kv.view import count_slots
from hal.ops._checks import check_cache, check_range
from hal.ops.kv_write import SPEC as KV_WRITE
from hal.ops.spec import FLOATS, FP8, INDEX, OpSpec, ScaleArg, TensorArg, describe


def mla_kv_write(
    kv_lora: Tensor, k_rope: Tensor, kv_cache: Tensor, slots: Tensor, *, kv_scale: float | Tensor | None = None
) -> None:
    """``kv_cache[slots[i]] = kv_lora[i] ‖ k_rope[i]``: the one row that MLA keeps of a token, already rotated.

    Args:
        kv_lora: ``[n, lora_dim]`` or ``[n, 1, lora_dim]`` fp16, bf16 or fp32, the latent part; any token stride, the
            last dim is contiguous (a view of a fused projection works).
        k_rope: ``[n, rope_dim]`` or ``[n, 1, rope_dim]``, like kv_lora.
        kv_cache: ``[slots, row_dim]``, ``[pages, page_size, row_dim]`` or ``[pages, page_size, 1, row_dim]``
            (``[slots, 1, row_dim]`` is pages of one), row_dim = lora_dim + rope_dim; any strides but the last dim's.
            Of kv_lora's dtype it gets the row bit for bit; of an fp8 dtype it gets ``row / kv_scale`` in fp32, rounded
            once, saturating (+-Inf to the largest, NaN stays NaN).
        slots: ``[n]`` int32 or int64. -1 or out of range: the token is not written. Equal slots in one call:
            each element is one of the candidates'.
        kv_scale: for an fp8 cache: a float or a one-element float32 tensor; None is 1.

    Raises:
        ArgumentError: an argument breaks this contract; nothing is written.

    Example:
        >>> import torch, hal
        >>> kv_a = torch.randn(2, 576)
        >>> kv_cache = torch.zeros(8, 16, 576)
        >>> hal.mla_kv_write(kv_a[:, :512], kv_a[:, 512:], kv_cache, torch.tensor([17, -1]))
        >>> torch.equal(kv_cache[1, 1], kv_a[0]), int(kv_cache.count_nonzero(dim=2).count_nonzero())
        (True, 1)

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1; the contract of vLLM's ``concat_and_cache_mla``, every slot
    defined.
    """
    KV_WRITE.reference(**as_kv_write(locals()))


def one_head(x: Tensor) -> Tensor:
    """``[n, d]`` as ``[n, 1, d]``."""
    return x if x.ndim == 3 else x.unsqueeze(1)


def halves(cache: Tensor, lora_dim: int) -> tuple[Tensor, Tensor]:
    """The latent and the rope part of a cache of joint rows, as caches of one head each."""
    heads = cache if cache.ndim == 4 else cache.unsqueeze(-2)
    return heads[..., :lora_dim], heads[..., lora_dim:]


def as_kv_write(a: Mapping[str, Any]) -> dict[str, Any]:
    """The call as one of `kv_write`: the rope part is k, the latent part v, of one head."""
    v_cache, k_cache = halves(a["kv_cache"], a["kv_lora"].shape[-1])
    return {
        "k": one_head(a["k_rope"]),
        "v": one_head(a["kv_lora"]),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slots": a["slots"],
        "k_scale": a["kv_scale"],
        "v_scale": a["kv_scale"],
    }


def check_rows(op: str, a: Mapping[str, Any], dims: Mapping[str, int]) -> None:
    """The rules on a cache of joint rows, its parts and its scale."""
    for name in ("kv_lora", "k_rope"):
        if a[name].ndim == 3 and a[name].shape[1] != 1:
            raise ArgumentError(op, name, "one head at most", describe(a[name]))
    cache = a["kv_cache"]
    if cache.ndim == 4 and cache.shape[2] != 1:
        raise ArgumentError(op, "kv_cache", "one head", describe(cache))
    row = dims["lora_dim"] + dims["rope_dim"]
    if dims["row_dim"] != row:
        raise ArgumentError(op, "kv_cache", f"rows of lora_dim + rope_dim = {row} elements", describe(cache))
    check_cache(op, a, "kv_cache", "kv_lora", "kv_scale")


def check_slots(op: str, a: Mapping[str, Any]) -> None:
    """Slots out of range."""
    check_range(op, "slots", a["slots"], -1, count_slots(a["kv_cache"], row_dims=1) - 1)


CACHE = TensorArg(
    "slots row_dim | pages page_size row_dim | pages page_size one row_dim", FLOATS + FP8, stride="inner", mutated=True
)


STATIC = frozenset({"lora_dim", "rope_dim", "row_dim", "page_size"})


SPEC = OpSpec(
    mla_kv_write,
    static=STATIC,
    args={
        "kv_lora": TensorArg("n lora_dim | n one lora_dim", FLOATS, stride="inner"),
        "k_rope": TensorArg("n rope_dim | n one rope_dim", "kv_lora", stride="inner"),
        "kv_cache": CACHE,
        "slots": TensorArg("n", INDEX),
        "kv_scale": ScaleArg(),
    },
    check=partial(check_rows, "mla_kv_write"),
    check_values=partial(check_slots, "mla_kv_write"),
    proof="hal.ops.proofs.mla_kv_write",
)
