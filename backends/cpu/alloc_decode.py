"""alloc_decode on the CPU: the slot after the last one, or the first of the next free page, in one pass.

`seq_lens`, `last_loc`, `out` [bs], `free_pages` [n], int32 or int64. A page is compared with the list's length
before it is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.cpu._bits import store
from hal.backends.cpu._call import need_cpu
from hal.backends.cpu._index import LONGEST, get, index, put, slot_of
from hal.backends.cpu._jit import Kernel


def _kernel(bs, lens, lens_64, last, last_64, free, free_64, n, page_size, out, out_64, total):  # type: ignore[no-untyped-def]
    needed = 0
    for i in range(bs):
        seq = get(lens, lens_64, i)
        slot = -1
        if 1 <= seq <= LONGEST:
            at = (seq - 1) % page_size
            page = -1
            if at == 0:
                if needed < n:
                    page = get(free, free_64, needed)
                needed += 1
            else:
                loc = get(last, last_64, i)
                if loc >= 0 and loc % page_size == at - 1:
                    page = loc // page_size
            slot = slot_of(page, at, page_size, out_64)
        put(out, out_64, i, slot)
    store(total, 0, needed)


kernel = Kernel(_kernel, "int u8 bool u8 bool u8 bool int int u8 bool i64")


def alloc_decode(seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int, out: Tensor) -> Tensor:
    need_cpu("alloc_decode", seq_lens, last_loc, free_pages, out)
    total = torch.empty(1, dtype=torch.int64, device="cpu")
    kernel()(
        seq_lens.shape[0],
        *index(seq_lens),
        *index(last_loc),
        *index(free_pages),
        free_pages.shape[0],
        page_size,
        *index(out),
        total.data_ptr(),
    )
    return total
