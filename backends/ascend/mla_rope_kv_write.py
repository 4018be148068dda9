"""mla_rope_kv_write for Ascend: rotates MLA's rope parts in place and writes the joint rows.

q_rope ``[n, q_heads, rope_dim]``, k_rope ``[n, rope_dim]``, kv_lora ``[n, lora_dim]``; see `hal.ops.mla_rope_kv_write`.
The rope part is a k, the latent part a v, of one head, side by side in one cache: `rope_kv_write`'s kernel, on views.
"""

from typing import Any

from torch import Tensor

from hal.backends.ascend.rope_kv_write import cache_refusal, rope_kv_write
from hal.ops.mla_rope_kv_write import as_rope_kv_write


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
    """The contract is `hal.ops.mla_rope_kv_write`'s; no fp8 cache, so no scale is read."""
    rope_kv_write(**as_rope_kv_write(locals()))


def supports(sig: Any) -> str | None:
    """No fp8 (triton-ascend 3.2.0 has no such tensors); a part of a row must fit a tile."""
    return cache_refusal(sig, ("kv_cache",), ("lora_dim", "rope_dim"))
