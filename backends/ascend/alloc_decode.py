"""alloc_decode for Ascend: ``out[i]`` is the slot after last_loc[i], or the first one of the next free page.

seq_lens, last_loc, out ``[bs]``; free_pages ``[n]``, never read past its end. A program has a piece of the batch;
it counts the pages that the requests before it open, as scalars, so that no program waits for another. The slots of
a block are collected in registers, as words of int32, and stored at once; the last program returns the total.
"""

# A kernel's parameters have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton.language as tl
from torch import Tensor

from hal.backends.ascend._spans import LONGEST, largest_page, open_page, shares
from hal.triton import launch

BLOCK = 64


@launch.jit(do_not_specialize=("lens", "lasts", "free", "out", "result", "bs", "n", "page_size", "share"))
def _alloc_decode(lens, lasts, free, out, result, bs, n, page_size, share, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    lane = tl.arange(0, BLOCK * WORDS)
    # Small integers compare exactly in fp32, and only fp32 vectors compare in one instruction.
    lane_f = lane.to(tl.float32)
    low = tl.program_id(0) * share
    high = tl.minimum(low + share, bs)
    taken = tl.program_id(0).to(tl.int64) * 0
    page_size = taken + page_size
    most = largest_page(page_size, WORDS)
    for j in range(low):
        seq = tl.load(lens + j).to(tl.int64)
        if (seq >= 1) & (seq <= LONGEST) & ((seq - 1) % page_size == 0):
            taken += 1
    for first in range(low, high, BLOCK):
        count = tl.minimum(high - first, BLOCK)
        slots = tl.full([BLOCK * WORDS], -1, tl.int32)
        for i in range(count):
            seq = tl.load(lens + first + i).to(tl.int64)
            if (seq >= 1) & (seq <= LONGEST):
                page = taken * 0 - 1
                inside = (seq - 1) % page_size
                if inside == 0:
                    if taken < n:
                        page = tl.load(free + taken).to(tl.int64)
                    taken += 1
                else:
                    page = open_page(tl.load(lasts + first + i).to(tl.int64), seq - 1, page_size)
                if (page >= 0) & (page <= most):
                    slot = page * page_size + inside
                    at = (i * WORDS).to(tl.float32)
                    slots = tl.where(lane_f == at, slot.to(tl.int32), slots)
                    if WORDS == 2:
                        slots = tl.where(lane_f == at + 1.0, (slot >> 32).to(tl.int32), slots)
        tl.store(out + tl.cast(first, tl.int64) * WORDS + lane, slots, mask=lane < count * WORDS)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(result, taken)


def alloc_decode(seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int, out: Tensor) -> Tensor:
    """The contract is `hal.ops.alloc_decode`'s."""
    bs = seq_lens.shape[0]
    result = torch.empty(1, dtype=torch.int64, device=out.device)
    programs, share = shares(max(1, bs), out.device, least=32)
    _alloc_decode(
        (programs,),
        seq_lens,
        last_loc,
        free_pages,
        out.view(torch.int32),
        result,
        bs,
        free_pages.shape[0],
        page_size,
        share,
        BLOCK=BLOCK,
        WORDS=out.element_size() // 4,
    )
    return result
