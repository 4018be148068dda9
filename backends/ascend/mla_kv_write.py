"""mla_kv_write for Ascend: MLA's joint rows to their cache slots.

kv_lora ``[n, lora_dim]``, k_rope ``[n, rope_dim]``, kv_cache rows of both; see `hal.ops.mla_kv_write`. The two parts
of a row are a k and a v of one head, side by side in one cache: `kv_write`'s kernel, on views.
"""

from typing import Any

from torch import Tensor

from hal.backends.ascend.kv_write import kv_write
from hal.backends.ascend.rope_kv_write import cache_refusal
from hal.ops.mla_kv_write import as_kv_write


def mla_kv_write(
    kv_lora: Tensor, k_rope: Tensor, kv_cache: Tensor, slots: Tensor, *, kv_scale: float | Tensor | None = None
) -> None:
    """The contract is `hal.ops.mla_kv_write`'s; no fp8 cache, so no scale is read."""
    kv_write(**as_kv_write(locals()))


def supports(sig: Any) -> str | None:
    """No fp8 (triton-ascend 3.2.0 has no such tensors); a part of a row must fit a tile."""
    return cache_refusal(sig, ("kv_cache",), ("lora_dim", "rope_dim"))
