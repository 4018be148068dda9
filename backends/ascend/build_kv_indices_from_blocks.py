"""build_kv_indices_from_blocks for Ascend: packs the slots of ``[start_i, start_i + len_i)`` and writes kv_indptr.

block_table ``[bs, max_blocks]``; kv_lens, kv_start ``[bs]``; kv_indptr ``[bs + 1]``; out ``[capacity]``, what is left
of it stays. As in build_kv_indices, each program first sums the lengths, so that what is listed is what the programs
share evenly. A block of slots is put together in registers, a page (read as one scalar) at a time, and stored at once.
"""

# A kernel's parameters have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton.language as tl
from torch import Tensor

from hal.backends.ascend._device import cdiv, pow2, vector_cores
from hal.backends.ascend._spans import extent, largest_page, put_run, store, write_indptr
from hal.triton import launch

INTS = ("bs", "capacity", "stride", "columns", "page_size", "keep")


@launch.jit(do_not_specialize=("table", "lens", "indptr", "out", "starts", *INTS))
def _kv_indices_from_blocks(
    table, lens, indptr, out, starts, bs, capacity, stride, columns, page_size, keep,
    BLOCK: tl.constexpr, WORDS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    # Small integers compare exactly in fp32, and only fp32 vectors compare in one instruction.
    lane_f = lane.to(tl.float32)
    me = tl.program_id(0).to(tl.int64)
    keep = me * 0 + keep
    if me == 0:
        write_indptr(lens, lens, indptr, bs, me + capacity, False, SUMS, keep)
    listed = me * 0
    for j in range(bs):
        _, length = extent(lens, lens, j, False)
        listed = tl.minimum(listed + tl.minimum(length, keep), capacity)
    # Whole blocks, so that a program's pieces are as long as they can be.
    share = tl.cdiv(tl.cdiv(listed, tl.num_programs(0)), BLOCK) * BLOCK
    low = me * share
    high = tl.minimum(low + share, listed)
    page_size = me * 0 + page_size
    most = largest_page(page_size, WORDS)
    end = page_size * columns
    at = me * 0
    for j in range(bs):
        if at < high:
            _, length = extent(lens, lens, j, False)
            kept = tl.minimum(length, keep)
            last = tl.minimum(high, at + kept)
            start = tl.load(starts + j).to(tl.int64) if starts is not None else at * 0
            # Far outside the table is outside all the same, and adding to it can't wrap.
            shift = tl.minimum(tl.maximum(start, -(1 << 32)), end) + (length - kept) - at
            for t in range(tl.maximum(low, at), last, BLOCK):
                count = tl.minimum(last - t, BLOCK)
                slots = tl.full([BLOCK], -1, tl.int32)
                above = tl.full([BLOCK], -1, tl.int32)
                # Lanes [done, beyond) lie in the table; what is far before it is pulled to its edge.
                begin = tl.minimum(tl.maximum(t + shift, -BLOCK), end)
                done = tl.maximum(-begin, 0)
                beyond = tl.minimum(end - begin, count)
                ahead = tl.maximum(begin + beyond - 1, 0) // page_size - tl.maximum(begin, 0) // page_size
                # A run for each page, and one more for where the low word may wrap inside one.
                for _ in range(ahead + WORDS):
                    if done < beyond:
                        position = begin + done
                        inside = position % page_size
                        run = tl.minimum(beyond - done, page_size - inside)
                        page = tl.load(table + tl.cast(j, tl.int64) * stride + position // page_size).to(tl.int64)
                        slots, above, run = put_run(
                            slots, above, lane, lane_f, done, run, page, inside, page_size, most, WORDS
                        )
                        done += run
                store(out, t, slots, above, count.to(tl.int32), BLOCK, WORDS)
            at += kept


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
    """The contract is `hal.ops.build_kv_indices_from_blocks`'s."""
    capacity, columns = out.shape[0], block_table.shape[1]
    # A run costs an operation on the whole block: short blocks for short pages.
    block = min(1024, max(64, pow2(page_size)))
    _kv_indices_from_blocks(
        (max(1, min(vector_cores(out.device), cdiv(capacity, block))),),
        block_table,
        kv_lens,
        kv_indptr.view(torch.int32),
        out.view(torch.int32),
        kv_start,
        kv_lens.shape[0],
        capacity,
        block_table.stride(0),
        columns,
        page_size,
        2**31 - 1 if keep_last < 0 else min(keep_last, 2**31 - 1),
        BLOCK=block,
        WORDS=out.element_size() // 4,
        SUMS=kv_indptr.element_size() // 4,
    )
    return out
