"""mla_kv_write: the joint row of a token, latent part and rope part, to its cache slot, in one kernel.

It is kv_write's kernel with one head: the rope part is k, the latent part v, both in the one cache.
"""

from typing import Any

from torch import Tensor

from hal.backends.cuda._cache import Plans, refuse_fp8, scale_kind, scale_of
from hal.backends.cuda._device import pdl
from hal.backends.cuda.kv_write import kv_write_kernel
from hal.kv.view import copy_unit, count_slots, fuse_pages
from hal.ops.spec import FP8
from hal.triton import launch

ROWS = 2
"""Of 1 to 32 rows a program and 1 to 8 warps the best from 16 tokens on; kv_write's 8 and 4 took 12 % longer."""

_plans: Plans[tuple[launch.Launch, tuple[int, ...]]] = Plans()


def _plan(
    kv_lora: Tensor, k_rope: Tensor, kv_cache: Tensor, kv_scale: object
) -> tuple[launch.Launch, tuple[int, ...]]:
    page, cache = fuse_pages(kv_cache, row_dims=1)
    strides = (k_rope.stride(0), 0, kv_lora.stride(0), 0, *cache, *cache)
    unit = copy_unit(strides)
    on, lora = pdl(kv_lora.get_device()), kv_lora.shape[-1]
    fp8, kind = kv_cache.dtype in FP8, scale_kind(kv_scale)
    start = kv_write_kernel.bind(
        HEADS=1, DIM=k_rope.shape[-1], V_DIM=lora, PAGE=page, K_AT=lora, UNIT=unit, K_FP8=fp8, V_FP8=fp8, K_KIND=kind,
        V_KIND=kind, ROWS=ROWS, PDL=on, num_warps=2, launch_pdl=on,
    )  # fmt: skip
    return start, tuple(s // unit for s in strides)


def mla_kv_write(
    kv_lora: Tensor,
    k_rope: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    *,
    kv_scale: float | Tensor | None = None,
) -> None:
    n = kv_lora.shape[0]
    if not n:
        return
    key = (
        kv_cache.shape[1:], kv_lora.shape[-1], kv_lora.stride(), k_rope.stride(), kv_cache.stride(), kv_cache.dtype,
        kv_scale.__class__, kv_lora.get_device(),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _plan(kv_lora, k_rope, kv_cache, kv_scale)
    scale = scale_of(kv_scale)
    plan[0].start(
        (-(-n // ROWS), 1, 1), k_rope, kv_lora, kv_cache, kv_cache, slots, scale, scale, *plan[1],
        count_slots(kv_cache, row_dims=1), n,
    )  # fmt: skip


def supports(sig: Any) -> str | None:
    """Everything, but fp8 caches on devices that can't convert to fp8."""
    return refuse_fp8(sig, "kv_cache")
