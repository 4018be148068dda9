"""build_kv_indices_from_blocks on the CPU: the slots of ``[start_i, start_i + len_i)`` of a block table in `out`.

`block_table` [bs, max_blocks], rows any stride apart; everything int32 or int64. Invariants: lengths below 2^31 alone
count, so no sum can wrap; a start is compared with the table before it is added to. A run of slots is a block's.
"""

from __future__ import annotations

from torch import Tensor

from hal.backends.cpu._call import need_cpu
from hal.backends.cpu._index import LONGEST, get, index, put, slot_of
from hal.backends.cpu._jit import Kernel


def _kernel(  # type: ignore[no-untyped-def]
    bs, table, table_64, columns, stride, lens, lens_64, page_size, indptr, indptr_64, out, out_64, capacity,
    with_starts, starts, starts_64, keep,
):  # fmt: skip
    at = 0
    end = columns * page_size
    for i in range(bs):
        put(indptr, indptr_64, i, at)
        length = get(lens, lens_64, i)
        if length <= 0 or length > LONGEST:
            continue
        count = min(length, keep)
        start = get(starts, starts_64, i) if with_starts else 0
        # A start further away than a length can reach is outside the table, as is one that is moved there.
        start = max(-LONGEST - 1, min(start, end)) + (length - count)
        count = min(count, capacity - at)
        first = max(0, min(-start, count))
        last = max(first, min(count, end - start))
        for t in range(first):
            put(out, out_64, at + t, -1)
        t = first
        while t < last:
            page = (start + t) // page_size
            inside = start + t - page * page_size
            run = min(page_size - inside, last - t)
            slot = slot_of(get(table, table_64, i * stride + page), inside, page_size, out_64)
            step = 1 if slot >= 0 else 0
            for k in range(run):
                put(out, out_64, at + t + k, slot + k * step)
            t += run
        for t in range(last, count):
            put(out, out_64, at + t, -1)
        at += count
    put(indptr, indptr_64, bs, at)


kernel = Kernel(_kernel, "int u8 bool int int u8 bool int u8 bool u8 bool int bool u8 bool int")


def build_kv_indices_from_blocks(
    block_table: Tensor,
    kv_lens: Tensor,
    page_size: int,
    kv_indptr: Tensor,
    out: Tensor,
    kv_start: Tensor | None = None,
    *,
    keep_last: int = -1,
) -> Tensor:
    need_cpu("build_kv_indices_from_blocks", block_table, kv_lens, kv_indptr, out, kv_start)
    kernel()(
        kv_lens.shape[0],
        *index(block_table),
        block_table.shape[1],
        block_table.stride(0),
        *index(kv_lens),
        page_size,
        *index(kv_indptr),
        *index(out),
        out.shape[0],
        kv_start is not None,
        *index(kv_start),
        LONGEST if keep_last < 0 else min(keep_last, LONGEST),
    )
    return out
