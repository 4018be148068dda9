"""mla_kv_write: the joint row of a token, latent part and rope part, to its cache slot, in one kernel.

It is kv_write's kernel with one head: the rope part is k, the latent part v, both in the one cache.
"""

from typing import Any

from torch import Tensor

from hal.backends.cuda._cache import refuse_fp8, scale_kind
from hal.backends.cuda._device import pdl
from hal.backends.cuda.kv_write import kv_write_kernel
from hal.kv.view import copy_unit, fuse_pages, page_size
from hal.ops.spec import FP8
from hal.triton.plans import Plan, Step, length, plans

TILES = ((512, 1, 2), (1 << 62, 4, 4))
"""Up to so many tokens: rows of a program, and warps. Of 1 to 16 rows and 1 to 8 warps the best there."""


@plans
def _plans(kv_lora: Tensor, k_rope: Tensor, kv_cache: Tensor, slots: Tensor, kv_scale: object) -> Plan:
    page, cache = fuse_pages(kv_cache, row_dims=1)
    strides = (k_rope.stride(0), 0, kv_lora.stride(0), 0, *cache, *cache)
    unit = copy_unit(strides)
    on, lora = pdl(kv_lora.get_device()), kv_lora.shape[-1]
    fp8, kind = kv_cache.dtype in FP8, scale_kind(kv_scale)
    args = (
        "k_rope",
        "kv_lora",
        "kv_cache",
        "kv_cache",
        "slots",
        "kv_scale",
        "kv_scale",
        *(s // unit for s in strides),
        length("kv_cache", by=page_size(kv_cache, row_dims=1)),
        length("kv_lora"),
    )
    steps, fewest = [], 0
    for most, rows, warps in TILES:
        run = kv_write_kernel.bind(
            HEADS=1, DIM=k_rope.shape[-1], V_DIM=lora, PAGE=page, K_AT=lora, UNIT=unit, K_FP8=fp8, V_FP8=fp8,
            K_KIND=kind, V_KIND=kind, ROWS=rows, PDL=on, num_warps=warps, launch_pdl=on,
        )  # fmt: skip
        steps.append(Step(run, length("kv_lora", per=rows), args, (("kv_lora", fewest, most),)))
        fewest = most
    return Plan(tuple(steps))


@_plans.launcher
def mla_kv_write(
    kv_lora: Tensor, k_rope: Tensor, kv_cache: Tensor, slots: Tensor, *, kv_scale: float | Tensor | None = None
) -> None:
    _plans.start(kv_lora, k_rope, kv_cache, slots, kv_scale)


def supports(sig: Any) -> str | None:
    """Everything, but fp8 caches on devices that can't convert to fp8."""
    return refuse_fp8(sig, "kv_cache")
