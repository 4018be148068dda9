# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated"
# A kernel is typed by its arguments at run time.
"""mla_kv_write: the joint row of a token, latent part and rope part, to its cache slot, in one kernel.

A program has ROWS tokens. What needs no memory is computed while the kernel before still runs.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda._cache import refuse_fp8, scale_kind
from hal.backends.cuda._device import next_power_of_2, pdl
from hal.backends.cuda.rope_kv_write import _store
from hal.kv.view import copy_unit, fuse_pages, page_size
from hal.ops.spec import FP8
from hal.triton import launch
from hal.triton.plans import Plan, Step, length, plans

TILES = ((256, 2, 4), (512, 2, 2), (1 << 62, 4, 8))
"""Up to so many tokens: rows of a program, and warps. Of 1 to 16 rows and 1 to 8 warps the best there."""

NEVER = tl.constexpr("""{ .reg .pred p; .reg .b64 x; or.b64 x, $1, $2; or.b64 x, x, $3; setp.eq.s64 p, x, -1;
@p exit; mov.u32 $0, 0; }""")
"""Ends the program where three addresses have every bit set between them, as none have, which lie below 2^57."""


@triton.jit
def _known(a, b, c):
    """Has three addresses computed before what follows: ptxas would else put that behind a wait."""
    tl.inline_asm_elementwise(
        NEVER, "=r,l,l,l", [a.to(tl.int64), b.to(tl.int64), c.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _within(there, i, SIZE: tl.constexpr):
    if next_power_of_2(SIZE) == SIZE:
        return there
    else:
        return there & (i < SIZE)


@launch.jit(do_not_specialize="slots kv_scale lora_token rope_token cache_page cache_token num_slots n".split())
def mla_kv_write_kernel(
    kv_lora, k_rope, kv_cache, slots, kv_scale,
    lora_token: tl.int64, rope_token: tl.int64, cache_page: tl.int64, cache_token: tl.int64,
    num_slots: tl.int64, n: tl.int64,
    LORA: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr, FP8: tl.constexpr,
    KIND: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    i = tl.arange(0, next_power_of_2(ROPE))[None, :]
    j = tl.arange(0, next_power_of_2(LORA))[None, :]
    # A product with a constant is how Triton learns that rows are aligned.
    a = k_rope + row * (rope_token * UNIT)
    b = kv_lora + row * (lora_token * UNIT)
    s = slots + row
    if PDL:
        _known(a, b, s)
        gdc_wait()
    slot = tl.load(s, row < n, other=-1).to(tl.int64)
    # Rows are read whether or not they are written: they need not wait for the slot.
    x = tl.load(a + i, _within(row < n, i, ROPE), other=0.0)
    y = tl.load(b + j, _within(row < n, j, LORA), other=0.0)
    written = (slot >= 0) & (slot < num_slots)
    slot = tl.where(written, slot, 0)
    to = kv_cache + slot // PAGE * (cache_page * UNIT) + slot % PAGE * (cache_token * UNIT)
    _store(to + LORA + i, x, _within(written, i, ROPE), kv_scale, KIND, FP8)
    _store(to + j, y, _within(written, j, LORA), kv_scale, KIND, FP8)


@plans
def _plans(kv_lora: Tensor, k_rope: Tensor, kv_cache: Tensor, slots: Tensor, kv_scale: object) -> Plan:
    page, cache = fuse_pages(kv_cache, row_dims=1)
    strides = (kv_lora.stride(0), k_rope.stride(0), *cache[:2])
    unit = copy_unit(strides)
    on = pdl(kv_lora.get_device())
    args = (
        "kv_lora",
        "k_rope",
        "kv_cache",
        "slots",
        "kv_scale",
        *(s // unit for s in strides),
        length("kv_cache", by=page_size(kv_cache, row_dims=1)),
        length("kv_lora"),
    )
    steps, fewest = [], 0
    for most, rows, warps in TILES:
        run = mla_kv_write_kernel.bind(
            LORA=kv_lora.shape[-1],
            ROPE=k_rope.shape[-1],
            PAGE=page,
            UNIT=unit,
            FP8=kv_cache.dtype in FP8,
            KIND=scale_kind(kv_scale),
            ROWS=rows,
            PDL=on,
            num_warps=warps,
            launch_pdl=on,
        )
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
