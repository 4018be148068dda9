# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""alloc_extend: open pages are filled, then pages taken from the front of `free_pages`, in one launch.

The requests are shared out as `_spans` says, with two running sums: tokens, and new pages. A page is compared with
the list's length before it is read.
"""

import triton.language as tl
from torch import Tensor, empty, int64
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal import launch
from hal.backends.cuda._device import pdl
from hal.backends.cuda._spans import BLOCK, GROUP, TILE, WARPS, extents, grid, owners, slot_of


@launch.jit(
    do_not_specialize=(
        "prefixes",
        "lens",
        "last",
        "free",
        "out",
        "result",
        "bs",
        "n",
        "size",
        "each",
        "parts",
    )
)
def alloc_extend_kernel(
    prefixes, lens, last, free, out, result, bs: tl.int64, n: tl.int64, size: tl.int64, each: tl.int32, parts: tl.int32,
    PAGE: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = (tl.program_id(0) // parts).to(tl.int64) * each * GROUP
    part = (tl.program_id(0) % parts).to(tl.int64)
    total = tl.zeros([], tl.int64)
    pages = tl.zeros([], tl.int64)
    for at in range(0, first, TILE):
        prefix, seq = extents(prefixes, lens, at + tl.arange(0, TILE), tl.minimum(bs, first), True)
        total += tl.sum(seq - prefix, 0)
        pages += tl.sum((seq + PAGE - 1) // PAGE - (prefix + PAGE - 1) // PAGE, 0)
    for group in range(first, tl.minimum(bs, first + each * GROUP), GROUP):
        prefix, seq = extents(prefixes, lens, group + tl.arange(0, GROUP), bs, True)
        opened = (prefix + PAGE - 1) // PAGE
        taken = (seq + PAGE - 1) // PAGE - opened
        ending = tl.cumsum(seq - prefix, 0)
        # The page of position p is free[base + p // PAGE]; a sum over the group, since registers have no index.
        base = tl.cumsum(taken, 0) - taken - opened
        stop = tl.minimum(tl.sum(seq - prefix, 0), size - total)
        for low in range(part * BLOCK, stop, parts * BLOCK):
            behind, t = owners(ending, low, BLOCK)
            o = low + tl.arange(0, BLOCK)
            mine = o < stop
            own = tl.arange(0, GROUP)[:, None] == behind[None, :]
            ahead = tl.sum(tl.where(own, base[:, None], 0), 0)
            start = tl.load(prefixes + group + behind, mine, other=0).to(tl.int64)
            position = start + t
            is_open = position // PAGE < (start + PAGE - 1) // PAGE
            loc = tl.load(last + group + behind, mine & is_open, other=-1).to(tl.int64)
            follows = (loc >= 0) & (loc % PAGE == (start + PAGE - 1) % PAGE)
            index = pages + ahead + position // PAGE
            there = mine & (index >= 0) & (index < n) & (is_open == 0)
            new = tl.load(free + tl.where(there, index, 0), there, other=-1).to(tl.int64)
            page = tl.where(is_open, tl.where(follows, loc // PAGE, -1), new)
            slot = slot_of(page, position % PAGE, PAGE, WIDE)
            tl.store(out + total + o, slot.to(out.dtype.element_ty), mine)
        total += tl.sum(seq - prefix, 0)
        pages += tl.sum(taken, 0)
    if first + each * GROUP >= bs:
        if part == 0:
            tl.store(result, pages)
        for low in range(total + part * BLOCK, size, parts * BLOCK):
            o = low + tl.arange(0, BLOCK)
            tl.store(out + o, tl.full([BLOCK], -1, out.dtype.element_ty), o < size)


class _Launches(dict[tuple[int, int, bool], launch.Launch]):
    def __missing__(self, key: tuple[int, int, bool]) -> launch.Launch:
        device, page, wide = key
        on = pdl(device)
        self[key] = alloc_extend_kernel.bind(
            PAGE=page, WIDE=wide, PDL=on, BLOCK=BLOCK, GROUP=GROUP, TILE=TILE, num_warps=WARPS, launch_pdl=on
        )
        return self[key]


_launches: _Launches = launch.keeps(_Launches())


def alloc_extend(
    prefix_lens: Tensor, seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int, out: Tensor
) -> Tensor:
    bs, size = prefix_lens.numel(), out.numel()
    device = out.get_device()
    total = empty(1, dtype=int64, device=out.device)
    programs, each, parts = grid(bs, size, device)
    _launches[device, page_size, out.dtype is int64].start(
        programs,
        prefix_lens,
        seq_lens,
        last_loc,
        free_pages,
        out,
        total,
        bs,
        free_pages.numel(),
        size,
        each,
        parts,
    )
    return total


def supports(sig: object) -> None:
    """Every call of the contract."""
