# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""alloc_decode: the slot after the last one, or the first of the next free page, in one launch.

A program has a run of requests and counts the pages opened by all before it, in whole tiles; programs are bounded in
number, so that is linear. A page is compared with the list's length before it is read.
"""

import triton
import triton.language as tl
from torch import Tensor, int64
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda._device import multiprocessors, pdl
from hal.backends.cuda._spans import slot_of
from hal.triton import launch
from hal.triton.plans import RESULT, Plan, Result, Step, length, plans

BLOCK = 128
TILE = 1024


@triton.jit
def _opens(lens, j, bs, PAGE: tl.constexpr):
    """(the position of the new token or -1, whether it opens a page) of requests j."""
    seq = tl.load(lens + j, j < bs, other=0).to(tl.int64)
    position = tl.where((seq >= 1) & (seq <= 2147483647), seq - 1, -1)
    return position, (position >= 0) & (position % PAGE == 0)


@launch.jit(do_not_specialize=("lens", "last", "free", "out", "result", "bs", "n", "each"))
def alloc_decode_kernel(
    lens, last, free, out, result, bs: tl.int64, n: tl.int64, each: tl.int32,
    PAGE: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.program_id(0).to(tl.int64) * each * BLOCK
    pages = tl.zeros([], tl.int64)
    for at in range(0, first, TILE):
        _, opens = _opens(lens, at + tl.arange(0, TILE), tl.minimum(bs, first), PAGE)
        pages += tl.sum(opens.to(tl.int32), 0)
    for at in range(first, tl.minimum(bs, first + each * BLOCK), BLOCK):
        j = at + tl.arange(0, BLOCK)
        position, opens = _opens(lens, j, bs, PAGE)
        index = pages + tl.cumsum(opens.to(tl.int32), 0) - 1
        there = opens & (index < n)
        new = tl.load(free + tl.where(there, index, 0), there, other=-1).to(tl.int64)
        goes_on = (position >= 0) & (opens == 0)
        loc = tl.load(last + j, goes_on & (j < bs), other=-1).to(tl.int64)
        follows = (loc >= 0) & (loc % PAGE == (position + PAGE - 1) % PAGE)
        page = tl.where(opens, new, tl.where(follows, loc // PAGE, -1))
        slot = slot_of(page, tl.maximum(position, 0) % PAGE, PAGE, WIDE)
        tl.store(out + j, slot.to(out.dtype.element_ty), j < bs)
        pages += tl.sum(opens.to(tl.int32), 0)
    if first + each * BLOCK >= bs:
        tl.store(result, pages)


@plans
def _plans(seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int, out: Tensor) -> Plan:
    device = out.get_device()
    on = pdl(device)
    run = alloc_decode_kernel.bind(
        PAGE=page_size, WIDE=out.dtype is int64, PDL=on, BLOCK=BLOCK, TILE=TILE, num_warps=4, launch_pdl=on
    )
    blocks = length("seq_lens", per=BLOCK).at_least(1)
    each = blocks.per(2 * multiprocessors(device))
    args = ("seq_lens", "last_loc", "free_pages", "out", RESULT, length("seq_lens"), length("free_pages"), each)
    return Plan((Step(run, blocks.per(each), args),), returns=Result("seq_lens", 1, int64))


@_plans.launcher
def alloc_decode(seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int, out: Tensor) -> Tensor:
    return _plans.start(seq_lens, last_loc, free_pages, page_size, out)  # type: ignore[no-any-return]
