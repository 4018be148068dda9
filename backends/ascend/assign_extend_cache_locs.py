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

from hal.backends.ascend._spans import clamped, copy_columns, shares
from hal.triton import launch

BLOCK = 1024

INTS = ("bs", "capacity", "share", "stride", "height", "width")


@launch.jit(do_not_specialize=("table", "requests", "starts", "ends", "out", *INTS))
def _assign(
    table, requests, starts, ends, out, bs, capacity, share, stride, height, width,
    BLOCK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
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
                # Far outside the row is outside all the same, and adding to it can't wrap.
                start = tl.minimum(tl.maximum(start, -(1 << 62)), width)
                row = table + tl.where(known, request, 0) * stride
                copy_columns(row, out, first, last, start - at, known, width, BLOCK, WORDS)
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
    programs, share = shares(capacity, out.device)
    _assign(
        (programs,),
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
