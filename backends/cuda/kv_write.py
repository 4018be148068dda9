# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""kv_write: k and v to their cache slots, in one kernel.

A program has ROWS rows of a head each, of k and of v. A slot is compared in int64 before an address is made of it.
"""

from typing import Any

import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda._cache import refuse_fp8, scale_kind
from hal.backends.cuda._device import next_power_of_2, pdl
from hal.backends.cuda.rope_kv_write import _store
from hal.kv.view import copy_unit, fuse_pages_of_both, page_size
from hal.ops.spec import FP8
from hal.triton import launch
from hal.triton.plans import Plan, Step, length, plans

ROWS = 8


@launch.jit(
    do_not_specialize="""
    slots k_scale v_scale k_token k_head v_token v_head kc_page kc_token kc_head vc_page vc_token
    vc_head num_slots n
    """.split()
)
def kv_write_kernel(
    k, v, k_cache, v_cache, slots, k_scale, v_scale,
    k_token: tl.int64, k_head: tl.int64, v_token: tl.int64, v_head: tl.int64,
    kc_page: tl.int64, kc_token: tl.int64, kc_head: tl.int64,
    vc_page: tl.int64, vc_token: tl.int64, vc_head: tl.int64, num_slots: tl.int64, n: tl.int64,
    HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, PAGE: tl.constexpr,
    UNIT: tl.constexpr, K_FP8: tl.constexpr, V_FP8: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # A product with a constant is how Triton learns that rows are aligned.
    k_token, k_head, v_token, v_head = k_token * UNIT, k_head * UNIT, v_token * UNIT, v_head * UNIT
    kc_page, kc_token, kc_head = kc_page * UNIT, kc_token * UNIT, kc_head * UNIT
    vc_page, vc_token, vc_head = vc_page * UNIT, vc_token * UNIT, vc_head * UNIT
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    token, head = row // HEADS, row % HEADS
    slot = tl.load(slots + token, token < n, other=-1).to(tl.int64)
    # Rows are read whether or not they are written: they need not wait for the slot.
    i = tl.arange(0, next_power_of_2(DIM))[None, :]
    x = tl.load(k + token * k_token + head * k_head + i, (token < n) & (i < DIM), other=0.0)
    j = tl.arange(0, next_power_of_2(V_DIM))[None, :]
    y = tl.load(v + token * v_token + head * v_head + j, (token < n) & (j < V_DIM), other=0.0)
    written = (slot >= 0) & (slot < num_slots)
    slot = tl.where(written, slot, 0)
    to_k = k_cache + slot // PAGE * kc_page + slot % PAGE * kc_token + head * kc_head + i
    to_v = v_cache + slot // PAGE * vc_page + slot % PAGE * vc_token + head * vc_head + j
    _store(to_k, x, written & (i < DIM), k_scale, K_KIND, K_FP8)
    _store(to_v, y, written & (j < V_DIM), v_scale, V_KIND, V_FP8)


@plans
def _plans(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k_scale: object, v_scale: object
) -> Plan:
    page, kc, vc = fuse_pages_of_both(k_cache, v_cache)
    strides = (*k.stride()[:2], *v.stride()[:2], *kc, *vc)
    unit = copy_unit(strides)
    on, heads = pdl(k.get_device()), k.shape[1]
    run = kv_write_kernel.bind(
        HEADS=heads,
        DIM=k.shape[2],
        V_DIM=v.shape[2],
        PAGE=page,
        UNIT=unit,
        K_FP8=k_cache.dtype in FP8,
        V_FP8=v_cache.dtype in FP8,
        K_KIND=scale_kind(k_scale),
        V_KIND=scale_kind(v_scale),
        ROWS=ROWS,
        PDL=on,
        num_warps=4,
        launch_pdl=on,
    )
    args = (
        "k",
        "v",
        "k_cache",
        "v_cache",
        "slots",
        "k_scale",
        "v_scale",
        *(s // unit for s in strides),
        length("k_cache", by=page_size(k_cache)),
        length("k"),
    )
    return Plan((Step(run, length("k", by=heads, per=ROWS), args),))


@_plans.launcher
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
    _plans.start(k, v, k_cache, v_cache, slots, k_scale, v_scale)


def supports(sig: Any) -> str | None:
    """Everything, but fp8 caches on devices that can't convert to fp8."""
    return refuse_fp8(sig, "k_cache", "v_cache")
