"""write_req_to_token for Ascend: unpacks `src` into ``req_to_token[r_i, start_i:end_i]`` of every request.

req_to_token ``[max_requests, max_context_len]`` int32; req_pool_indices, start_offsets, end_offsets ``[bs]``; src
``[capacity]``. The programs share *src* evenly and walk over the lengths, as `assign_extend_cache_locs` does. A
slot that is skipped must leave its element alone, and a mask with holes would write the whole block back: a block
with such slots goes out in runs between them, each a contiguous copy; one without, whole.
"""

# A kernel's parameters have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton.language as tl
from torch import Tensor

from hal.backends.ascend._spans import clamped, shares
from hal.lowered import shared_writes
from hal.triton import launch

BLOCK = 1024

INTS = ("bs", "capacity", "share", "stride", "height", "width")


@launch.jit(do_not_specialize=("table", "requests", "starts", "ends", "src", *INTS))
@shared_writes("table")
def _write(
    table, requests, starts, ends, src, bs, capacity, share, stride, height, width,
    BLOCK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    wide = tl.arange(0, BLOCK * WORDS)
    low = tl.program_id(0).to(tl.int64) * share
    high = tl.minimum(low + share, capacity)
    at = low * 0
    for j in range(bs):
        if at < high:
            start, length = clamped(starts, ends, j, capacity - at)
            request = tl.load(requests + j).to(tl.int64)
            known = (request >= 0) & (request < height)
            # Columns [0, width) alone: what is before them, and the rest of it past them.
            skip = tl.where(start < 0, tl.minimum(-tl.maximum(start, -capacity), length), 0)
            keep = tl.minimum(length, tl.maximum(width - tl.minimum(start, width), 0))
            first = tl.maximum(low, at + skip)
            last = tl.where(known, tl.minimum(high, at + keep), first)
            row = table + tl.where(known, request, 0) * stride
            for t in range(first, last, BLOCK):
                count = tl.minimum(last - t, BLOCK).to(tl.int32)
                to = row + (start + (t - at))
                if WORDS == 2:
                    both = tl.load(src + t * 2 + wide, mask=wide < count * 2, other=0)
                    slot, above = tl.split(tl.reshape(both, (BLOCK, 2)))
                    bad = (tl.min(slot, 0) < 0) | (tl.min(above, 0) < 0) | (tl.max(above, 0) > 0)
                else:
                    slot = tl.load(src + t + lane, mask=lane < count, other=0)
                    bad = tl.min(slot, 0) < 0
                if bad:
                    run = count * 0
                    for i in range(count + 1):
                        stop = i == count
                        if i < count:
                            value = tl.load(src + (t + i) * WORDS)
                            stop = value < 0
                            if WORDS == 2:
                                stop = stop | (tl.load(src + (t + i) * 2 + 1) != 0)
                        if stop:
                            if run < i:
                                tl.store(to + lane, slot, mask=(lane >= run) & (lane < i))
                            run = i + 1
                else:
                    tl.store(to + lane, slot, mask=lane < count)
            at += length


def write_req_to_token(
    req_to_token: Tensor, req_pool_indices: Tensor, start_offsets: Tensor, end_offsets: Tensor, src: Tensor
) -> None:
    """The contract is `hal.ops.write_req_to_token`'s."""
    capacity = src.shape[0]
    height, width = req_to_token.shape
    if 0 in (capacity, height, width):
        return
    programs, share = shares(capacity, src.device)
    _write(
        (programs,),
        req_to_token,
        req_pool_indices,
        start_offsets,
        end_offsets,
        src.view(torch.int32),
        start_offsets.shape[0],
        capacity,
        share,
        req_to_token.stride(0),
        height,
        width,
        BLOCK=BLOCK,
        WORDS=src.element_size() // 4,
    )
