"""build_kv_indices for Ascend: packs ``req_to_token[r_i, start_i : start_i + kv_lens[i]]`` and writes kv_indptr.

req_to_token ``[max_requests, max_context_len]`` int32; req_pool_indices, kv_lens, kv_start ``[bs]``; kv_indptr
``[bs + 1]``; out ``[capacity]``, what is left of it stays. Each program first sums the lengths, so that what is
listed, and not a buffer made for a larger batch, is what the programs share evenly; then it walks over them again
and copies contiguous pieces of rows. Sums that are GIVEN are read instead.
"""

# A kernel's parameters have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from hal.backends.ascend._device import cdiv, vector_cores
from hal.backends.ascend._spans import copy_columns, extent, write_indptr
from hal.triton import launch

BLOCK = 1024

LOW = tl.constexpr(-(2**31))
"""No list that begins further below reaches 0."""


@triton.jit
def _end(indptr, j, capacity):
    """``indptr[j]``, pulled to where nothing that is added to it can wrap."""
    return tl.minimum(tl.maximum(tl.load(indptr + j).to(tl.int64), LOW), capacity)


INTS = ("bs", "capacity", "stride", "height", "width")


@launch.jit(do_not_specialize=("table", "requests", "lens", "indptr", "out", "starts", *INTS))
def _kv_indices(
    table, requests, lens, indptr, out, starts, bs, capacity, stride, height, width,
    BLOCK: tl.constexpr, WORDS: tl.constexpr, SUMS: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    me = tl.program_id(0).to(tl.int64)
    listed = me * 0
    if GIVEN:
        for j in range(1, bs + 1):
            listed = tl.maximum(listed, _end(indptr, j, capacity))
    else:
        if me == 0:
            write_indptr(lens, lens, indptr, bs, me + capacity, False, SUMS)
        for j in range(bs):
            _, length = extent(lens, lens, j, False)
            listed = tl.minimum(listed + length, capacity)
    # Whole blocks, so that a program's pieces are as long as they can be.
    share = tl.cdiv(tl.cdiv(listed, tl.num_programs(0)), BLOCK) * BLOCK
    low = me * share
    high = tl.minimum(low + share, listed)
    at = low * 0
    for j in range(bs):
        if GIVEN:
            at = _end(indptr, j, capacity)
        if at < high:
            _, length = extent(lens, lens, j, False)
            first = tl.maximum(low, at)
            last = tl.minimum(high, at + length)
            if GIVEN:
                last = tl.minimum(last, _end(indptr, j + 1, capacity))
            if first < last:
                request = tl.load(requests + j).to(tl.int64)
                start = tl.load(starts + j).to(tl.int64) if starts is not None else at * 0
                # Far outside the row is outside all the same, and adding to it can't wrap.
                start = tl.minimum(tl.maximum(start, -(1 << 62)), width)
                known = (request >= 0) & (request < height)
                row = table + tl.where(known, request, 0) * stride
                copy_columns(row, out, first, last, start - at, known, width, BLOCK, WORDS)
            if not GIVEN:
                at += length


def build_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: Tensor,
    kv_indptr: Tensor | None,
    out: Tensor,
    kv_start: Tensor | None = None,
    *,
    given_indptr: Tensor | None = None,
) -> Tensor:
    """The contract is `hal.ops.build_kv_indices`'s."""
    capacity = out.shape[0]
    height, width = req_to_token.shape
    given = given_indptr is not None
    indptr = given_indptr if kv_indptr is None else kv_indptr.view(torch.int32)
    _kv_indices(
        (max(1, min(vector_cores(out.device), cdiv(capacity, BLOCK))),),
        req_to_token,
        req_pool_indices,
        kv_lens,
        indptr,
        out.view(torch.int32),
        kv_start,
        kv_lens.shape[0],
        capacity,
        req_to_token.stride(0),
        height if width else 0,
        width,
        BLOCK=BLOCK,
        WORDS=out.element_size() // 4,
        SUMS=1 if kv_indptr is None else kv_indptr.element_size() // 4,
        GIVEN=given,
    )
    return out
