"""mla_kv_write: the joint row of a token, latent part and rope part, to its cache slot, in one kernel.

It is kv_write's kernel with one head: the rope part is k, the latent part v, both in the one cache.
"""

from typing import Any

from torch import Tensor

from hal.backends.cuda._device import pdl
from hal.backends.cuda.kv_write import _FP8, kv_write_kernel, no_fp8
from hal.backends.cuda.rope_kv_write import _as_float, _kind
from hal.triton import launch

ROWS = 2
"""Of 1 to 32 rows a program and 1 to 8 warps the best from 16 tokens on; kv_write's 8 and 4 took 12 % longer."""

_plans: dict[tuple[object, ...], tuple[launch.Launch, tuple[int, ...]]] = launch.keeps({})


def joint(cache: Tensor) -> tuple[int, tuple[int, int, int]]:
    """Page size and the strides (page, token, head) of a cache of joint rows; 1 and no page stride where pages are
    seamless."""
    st = cache.stride()
    if len(st) == 2:
        return 1, (st[0], 0, 0)
    page = cache.shape[1]
    return (1, (st[1], 0, 0)) if st[0] == page * st[1] else (page, (st[0], st[1], 0))


def _plan(
    kv_lora: Tensor, k_rope: Tensor, kv_cache: Tensor, kv_scale: object
) -> tuple[launch.Launch, tuple[int, ...]]:
    page, cache = joint(kv_cache)
    strides = (k_rope.stride(0), 0, kv_lora.stride(0), 0, *cache, *cache)
    unit = next(u for u in (16, 8, 1) if all(s % u == 0 for s in strides))
    on, lora, fp8, kind = (
        pdl(kv_lora.get_device()),
        kv_lora.shape[-1],
        kv_cache.dtype in _FP8,
        _kind(kv_scale),
    )
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
    num_slots, *inner = kv_cache.shape
    key = (
        *inner, kv_lora.shape[-1], kv_lora.stride(), k_rope.stride(), kv_cache.stride(), kv_cache.dtype,
        kv_scale.__class__, kv_lora.get_device(),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= 4096:
            _plans.clear()
        plan = _plans[key] = _plan(kv_lora, k_rope, kv_cache, kv_scale)
    if len(inner) > 1:
        num_slots *= inner[0]
    scale = _as_float(kv_scale)
    plan[0].start(
        (-(-n // ROWS), 1, 1),
        k_rope,
        kv_lora,
        kv_cache,
        kv_cache,
        slots,
        scale,
        scale,
        *plan[1],
        num_slots,
        n,
    )


def supports(sig: Any) -> str | None:
    """Everything, but fp8 caches on devices that can't convert to fp8."""
    return no_fp8(sig, "kv_cache")
