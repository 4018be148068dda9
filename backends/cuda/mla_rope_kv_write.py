"""mla_rope_kv_write: rotate q's and k's rope parts in place, write the joint row to the cache, in one kernel.

It is rope_kv_write's kernel with one head of k: the rope part is k, the latent part v, both in the one cache.
"""

from typing import Any

from torch import Tensor

from hal.backends.cuda._cache import refuse_fp8, scale_kind
from hal.backends.cuda._device import pdl
from hal.backends.cuda.rope_kv_write import MANY, tiled
from hal.kv.view import copy_unit, fuse_pages, page_size
from hal.ops.spec import FP8
from hal.triton.plans import Plan, length, plans

TILES = ((96, 16, 1, 1), (1024, 32, 2, 2), (MANY, 32, 4, 4))
"""As in rope_kv_write, for heads of 64 and a latent part of 512. Untuned: compile-checked."""


@plans
def _plans(
    q_rope: Tensor,
    k_rope: Tensor,
    kv_lora: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    interleaved: bool,
    kv_scale: object,
    write_k: bool,
) -> Plan:
    page, cache = fuse_pages(kv_cache, row_dims=1)
    strides = (*q_rope.stride()[:2], k_rope.stride(0), 0, kv_lora.stride(0), 0, *cache, *cache)
    unit = copy_unit(strides)
    on, lora, fp8, kind = (pdl(q_rope.get_device()), kv_lora.shape[-1], kv_cache.dtype in FP8, scale_kind(kv_scale))
    args = (
        "q_rope",
        "k_rope",
        "kv_lora",
        "cos_sin_cache",
        "positions",
        "kv_cache",
        "kv_cache",
        "slots",
        "kv_scale",
        "kv_scale",
        *(s // unit for s in strides),
        length("cos_sin_cache"),
        length("kv_cache", by=page_size(kv_cache, row_dims=1)),
        length("q_rope"),
    )
    return tiled(
        "q_rope",
        args,
        q_rope.shape[1],
        1,
        TILES,
        HEAD_DIM=q_rope.shape[2],
        V_HEAD_DIM=lora,
        ROTARY=cos_sin_cache.shape[1],
        PAGE=page,
        K_AT=lora,
        INTERLEAVED=bool(interleaved),
        CACHE=True,
        WRITE_K=bool(write_k),
        K_FP8=fp8,
        V_FP8=fp8,
        K_KIND=kind,
        V_KIND=kind,
        UNIT=unit,
        PDL=on,
        launch_pdl=on,
    )


@_plans.launcher
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
    _plans.start(q_rope, k_rope, kv_lora, cos_sin_cache, positions, kv_cache, slots, interleaved, kv_scale, write_k)


def supports(sig: Any) -> str | None:
    """Everything, but fp8 caches on devices that can't convert to fp8."""
    return refuse_fp8(sig, "kv_cache")
