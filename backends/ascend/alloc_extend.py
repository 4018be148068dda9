"""alloc_extend for Ascend: open pages are filled, then pages taken from the front of `free_pages`.

prefix_lens, seq_lens, last_loc ``[bs]``; free_pages ``[n]``, never read past its end; out ``[capacity]``, overwritten
whole. `out` is split over the programs as `_spans` says, with two running sums: tokens, and new pages. A block of
slots is put together in registers, a run of consecutive slots at a time (a page's, read as one scalar), and stored
at once, so that small pages are not a copy each. The first program returns the total.
"""

# A kernel's parameters have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton.language as tl
from torch import Tensor

from hal.backends.ascend._device import pow2
from hal.backends.ascend._spans import extent, largest_page, open_page, put_run, shares, store
from hal.triton import launch

INTS = ("bs", "n", "page_size", "capacity", "share")


@launch.jit(do_not_specialize=("prefixes", "lens", "lasts", "free", "out", "result", *INTS))
def _alloc_extend(
    prefixes, lens, lasts, free, out, result, bs, n, page_size, capacity, share,
    BLOCK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    wide = tl.arange(0, BLOCK * WORDS)
    # Small integers compare exactly in fp32, and only fp32 vectors compare in one instruction.
    lane_f = lane.to(tl.float32)
    low = tl.program_id(0).to(tl.int64) * share
    high = tl.minimum(low + share, capacity)
    page_size = low * 0 + page_size
    most = largest_page(page_size, WORDS)
    at = low * 0
    taken = low * 0
    for j in range(bs):
        # The first program counts to the end, for the total.
        if (at < high) | (low == 0):
            prefix, seq = extent(prefixes, lens, j, True)
            opened = tl.cdiv(prefix, page_size)
            last = tl.minimum(high, at + (seq - prefix))
            for t in range(tl.maximum(low, at), last, BLOCK):
                count = tl.minimum(last - t, BLOCK)
                slots = tl.full([BLOCK], -1, tl.int32)
                above = tl.full([BLOCK], -1, tl.int32)
                done = count * 0
                begin = prefix + (t - at)
                # A run for each page, and one more for where the low word may wrap inside one.
                for _ in range((begin + count - 1) // page_size - begin // page_size + WORDS):
                    if done < count:
                        position = begin + done
                        inside = position % page_size
                        ahead = position // page_size - opened
                        run = tl.minimum(count - done, page_size - inside)
                        page = at * 0 - 1
                        if ahead < 0:
                            page = open_page(tl.load(lasts + j).to(tl.int64), prefix, page_size)
                        else:
                            if taken + ahead < n:
                                page = tl.load(free + (taken + ahead)).to(tl.int64)
                        slots, above, run = put_run(
                            slots, above, lane, lane_f, done, run, page, inside, page_size, most, WORDS
                        )
                        done += run
                store(out, t, slots, above, count.to(tl.int32), BLOCK, WORDS)
            at += seq - prefix
            taken += tl.cdiv(seq, page_size) - opened
    for t in range(tl.maximum(low, at), high, BLOCK):
        count = tl.minimum(high - t, BLOCK).to(tl.int32)
        tl.store(out + t * WORDS + wide, tl.full([BLOCK * WORDS], -1, tl.int32), mask=wide < count * WORDS)
    if low == 0:
        tl.store(result, taken)


def alloc_extend(
    prefix_lens: Tensor, seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int, out: Tensor
) -> Tensor:
    """The contract is `hal.ops.alloc_extend`'s."""
    capacity = out.shape[0]
    result = torch.empty(1, dtype=torch.int64, device=out.device)
    programs, share = shares(max(1, capacity), out.device)
    _alloc_extend(
        (programs,),
        prefix_lens,
        seq_lens,
        last_loc,
        free_pages,
        out.view(torch.int32),
        result,
        prefix_lens.shape[0],
        free_pages.shape[0],
        page_size,
        capacity,
        share,
        # A run costs an operation on the whole block: short blocks for short pages.
        BLOCK=min(1024, max(64, pow2(page_size))),
        WORDS=out.element_size() // 4,
    )
    return result
