"""assign_extend_cache_locs for Ascend: packs ``req_to_token[r_i, start_i:end_i]`` one after the other into `out`.

req_to_token ``[max_requests, max_context_len]`` int32; req_pool_indices, start_offsets, end_offsets ``[bs]``;
out ``[capacity]``, overwritten whole. The programs share *out* evenly, not the requests: the longest row
is split like any other. Each walks over the lengths to find the requests that overlap its piece, then
copies contiguous pieces of rows. Sums of lengths are clamped to the room that is left, so none wraps.
"""

# A kernel's parameters have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton.language as tl
from torch import Tensor

from hal.backends.ascend._device import cdiv, vector_cores
from hal.backends.ascend._spans import clamped
from hal.triton import launch

BLOCK = 1024


INTS = ("bs", "capacity", "share", "stride", "height", "width")


@launch.jit(do_not_specialize=("table", "requests", "starts", "ends", "out", *INTS))
def _assign(
    table, requests, starts, ends, out, bs, capacity, share, stride, height, width,
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
            first = tl.maximum(low, at)
            last = tl.minimum(high, at + length)
            if first < last:
                request = tl.load(requests + j).to(tl.int64)
                known = (request >= 0) & (request < height)
                row = tl.where(known, request, 0) * stride
                for t in range(first, last, BLOCK):
                    count = tl.minimum(last - t, BLOCK).to(tl.int32)
                    column = start + (t - at)
                    # Lanes [inside, beyond) lie in the row; a start far outside it is pulled to its edge.
                    column = tl.minimum(tl.maximum(column, -BLOCK), width)
                    inside = tl.maximum(-column, 0).to(tl.int32)
                    beyond = tl.minimum(width - column, count).to(tl.int32)
                    beyond = tl.where(known, beyond, 0)
                    slot = tl.full([BLOCK], -1, tl.int32)
                    if inside < beyond:
                        slot = tl.load(table + row + column + lane, mask=(lane >= inside) & (lane < beyond), other=-1)
                    if WORDS == 2:
                        tl.store(out + t * 2 + wide, tl.interleave(slot, slot >> 31), mask=wide < count * 2)
                    else:
                        tl.store(out + t + lane, slot, mask=lane < count)
            at += length
    for t in range(tl.maximum(low, at), high, BLOCK):
        count = tl.minimum(high - t, BLOCK).to(tl.int32)
        tl.store(out + t * WORDS + wide, tl.full([BLOCK * WORDS], -1, tl.int32), mask=wide < count * WORDS)


def assign_extend_cache_locs(
    req_to_token: Tensor, req_pool_indices: Tensor, start_offsets: Tensor, end_offsets: Tensor, out: Tensor
) -> Tensor:
    """The contract is `hal.ops.assign_extend_cache_locs`'s."""
    capacity = out.shape[0]
    if capacity == 0:
        return out
    height, width = req_to_token.shape
    cores = vector_cores(out.device)
    share = cdiv(capacity, min(cores, cdiv(capacity, 256)))
    _assign(
        (cdiv(capacity, share),),
        req_to_token,
        req_pool_indices,
        start_offsets,
        end_offsets,
        out.view(torch.int32),
        start_offsets.shape[0],
        capacity,
        share,
        req_to_token.stride(0),
        height if width else 0,
        width,
        BLOCK=BLOCK,
        WORDS=out.element_size() // 4,
    )
    return out
