"""mla_rope_kv_write: rotate q's and k's rope parts in place, write the joint row to the cache, in one kernel.

It is rope_kv_write's kernel with one head of k: the rope part is k, the latent part v, both in the one cache.
"""

from typing import Any

from torch import Tensor

from hal.backends.cuda._cache import Plans, refuse_fp8, scale_kind, scale_of
from hal.backends.cuda._device import pdl
from hal.backends.cuda.rope_kv_write import MANY, _Plan, tiled
from hal.kv.view import copy_unit, count_slots, fuse_pages
from hal.ops.spec import FP8

TILES = ((96, 16, 1, 1), (1024, 32, 2, 2), (MANY, 32, 4, 4))
"""As in rope_kv_write, for heads of 64 and a latent part of 512. Untuned: compile-checked."""

_plans: Plans[_Plan] = Plans()


def _plan(
    q_rope: Tensor, k_rope: Tensor, kv_lora: Tensor, cos_sin: Tensor, kv_cache: Tensor, interleaved: bool,
    kv_scale: object, write_k: bool,
) -> _Plan:  # fmt: skip
    page, cache = fuse_pages(kv_cache, row_dims=1)
    strides = (*q_rope.stride()[:2], k_rope.stride(0), 0, kv_lora.stride(0), 0, *cache, *cache)
    unit = copy_unit(strides)
    on, lora, fp8, kind = (
        pdl(q_rope.get_device()),
        kv_lora.shape[-1],
        kv_cache.dtype in FP8,
        scale_kind(kv_scale),
    )
    sizes = tiled(
        q_rope.shape[1], 1, TILES, HEAD_DIM=q_rope.shape[2], V_HEAD_DIM=lora, ROTARY=cos_sin.shape[1], PAGE=page,
        K_AT=lora, INTERLEAVED=bool(interleaved), CACHE=True, WRITE_K=bool(write_k), K_FP8=fp8, V_FP8=fp8, K_KIND=kind,
        V_KIND=kind, UNIT=unit, PDL=on, launch_pdl=on,
    )  # fmt: skip
    return _Plan(tuple(s // unit for s in strides), sizes)


def mla_rope_kv_write(
    q_rope: Tensor, k_rope: Tensor, kv_lora: Tensor, cos_sin_cache: Tensor, positions: Tensor, kv_cache: Tensor,
    slots: Tensor, *, interleaved: bool = False, kv_scale: float | Tensor | None = None, write_k: bool = True,
) -> None:  # fmt: skip
    n, *heads = q_rope.shape
    if not n:
        return
    max_positions, rotary = cos_sin_cache.shape
    key = (
        *heads, kv_cache.shape[1:], rotary, kv_lora.shape[-1], interleaved, write_k, q_rope.stride(), k_rope.stride(),
        kv_lora.stride(), kv_cache.stride(), kv_cache.dtype, kv_scale.__class__, q_rope.get_device(),
    )  # fmt: skip
    known = _plans.get(key)
    plan = known or _plan(q_rope, k_rope, kv_lora, cos_sin_cache, kv_cache, interleaved, kv_scale, write_k)
    scale = scale_of(kv_scale)
    args = (
        q_rope, k_rope, kv_lora, cos_sin_cache, positions, kv_cache, kv_cache, slots, scale, scale, *plan.strides,
        max_positions, count_slots(kv_cache, row_dims=1), n,
    )  # fmt: skip
    if known is None:
        # All at once: a request must not wait for the compiler because more tokens came.
        for _, other, *_ in plan.sizes:
            other.prepare(*args)
        _plans[key] = plan
    for most, run, kv_tokens, kv_parts, q_tokens, q_parts in plan.sizes:  # noqa: B007 - the last one has no limit
        if n <= most:
            break
    run.start(
        ((n + kv_tokens - 1) // kv_tokens * kv_parts + (n + q_tokens - 1) // q_tokens * q_parts, 1, 1), *args
    )


def supports(sig: Any) -> str | None:
    """Everything, but fp8 caches on devices that can't convert to fp8."""
    return refuse_fp8(sig, "kv_cache")
