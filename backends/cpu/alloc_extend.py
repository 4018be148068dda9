"""alloc_extend on the CPU: open pages are filled, then pages taken from the front of `free_pages`, in one pass.

`prefix_lens`, `seq_lens`, `last_loc` [bs], `free_pages` [n], `out` [capacity], int32 or int64. Invariants: lengths
below 2^31 alone count, so no sum can wrap; a page is compared with the list's length before it is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.cpu._bits import store
from hal.backends.cpu._call import need_cpu
from hal.backends.cpu._index import LONGEST, get, index, length, put, slot_of
from hal.backends.cpu._jit import Kernel


def _kernel(  # type: ignore[no-untyped-def]
    bs, prefixes, prefixes_64, lens, lens_64, last, last_64, free, free_64, n, page_size, out, out_64, capacity, total
):
    at = 0
    needed = 0
    for i in range(bs):
        prefix = get(prefixes, prefixes_64, i)
        seq = get(lens, lens_64, i)
        if prefix < 0 or seq < prefix or seq > LONGEST:
            continue
        opened = (prefix + page_size - 1) // page_size
        pages = (seq + page_size - 1) // page_size - opened
        stop = prefix + length(prefix, seq, capacity - at)
        at -= prefix  # so that `at + position` is the token's place in `out`
        position = prefix
        border = min(stop, opened * page_size)
        if position < border:
            loc = get(last, last_64, i)
            page = loc // page_size if loc >= 0 and loc % page_size == (prefix - 1) % page_size else -1
            base = slot_of(page, position % page_size, page_size, out_64)
            for k in range(border - position):
                put(out, out_64, at + position + k, base + k if base >= 0 else -1)
            position = border
        taken = needed
        while position < stop:
            page = get(free, free_64, taken) if taken < n else -1
            base = slot_of(page, 0, page_size, out_64)
            border = min(stop, position + page_size)
            for k in range(border - position):
                put(out, out_64, at + position + k, base + k if base >= 0 else -1)
            position = border
            taken += 1
        at += max(stop, prefix)
        needed += pages
    for o in range(at, capacity):
        put(out, out_64, o, -1)
    store(total, 0, needed)


kernel = Kernel(_kernel, "int u8 bool u8 bool u8 bool u8 bool int int u8 bool int i64")


def alloc_extend(
    prefix_lens: Tensor, seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int, out: Tensor
) -> Tensor:
    need_cpu("alloc_extend", prefix_lens, seq_lens, last_loc, free_pages, out)
    total = torch.empty(1, dtype=torch.int64, device="cpu")
    kernel()(
        prefix_lens.shape[0],
        *index(prefix_lens),
        *index(seq_lens),
        *index(last_loc),
        *index(free_pages),
        free_pages.shape[0],
        page_size,
        *index(out),
        out.shape[0],
        total.data_ptr(),
    )
    return total
