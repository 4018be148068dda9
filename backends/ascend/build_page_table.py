"""build_page_table for Ascend: ``out[i, p] = req_to_token[r_i, p * page_size] // page_size``, -1 where there is none.

req_to_token ``[max_requests, max_context_len]`` int32; req_pool_indices, kv_lens ``[bs]``; out ``[bs, max_pages]``,
overwritten whole. A program takes every P-th block of a row of `out`. The first slots of pages lie a page apart and
have no contiguous form: each is a scalar read and a scalar division, collected in registers and stored a block at
a time. Pages of one token are a contiguous copy.
"""

# A kernel's parameters have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton.language as tl
from torch import Tensor

from hal.backends.ascend._device import cdiv, pow2, vector_cores
from hal.triton import launch

INTS = ("bs", "pages", "stride", "height", "width", "page_size", "out_stride")


@launch.jit(do_not_specialize=("table", "requests", "lens", "out", *INTS))
def _page_table(
    table, requests, lens, out, bs, pages, stride, height, width, page_size, out_stride,
    BLOCK: tl.constexpr, WORDS: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    wide = tl.arange(0, BLOCK * WORDS)
    # Small integers compare exactly in fp32, and only fp32 vectors compare in one instruction.
    wide_f = wide.to(tl.float32)
    blocks = tl.cdiv(pages, BLOCK)
    for block in range(tl.program_id(0), bs * blocks, tl.num_programs(0)):
        i = block // blocks
        first = block % blocks * BLOCK
        count = tl.minimum(pages - first, BLOCK)
        request = tl.load(requests + i).to(tl.int64)
        length = tl.minimum(tl.maximum(tl.load(lens + i).to(tl.int64), 0), width)
        length = tl.where((request >= 0) & (request < height), length, 0)
        row = table + tl.where(length > 0, request, 0) * stride
        to = out + tl.cast(i, tl.int64) * out_stride + tl.cast(first, tl.int64) * WORDS
        # The columns of this block's pages that the request has tokens in.
        used = tl.minimum(tl.cdiv(length - tl.cast(first, tl.int64) * page_size, page_size), count).to(tl.int32)
        if SINGLE:
            slot = tl.full([BLOCK], -1, tl.int32)
            if used > 0:
                slot = tl.maximum(tl.load(row + first + lane, mask=lane < used, other=-1), -1)
            if WORDS == 2:
                tl.store(to + wide, tl.interleave(slot, slot >> 31), mask=wide < count * 2)
            else:
                tl.store(to + lane, slot, mask=lane < count)
        else:
            page = tl.full([BLOCK * WORDS], -1, tl.int32)
            for p in range(used):
                slot = tl.load(row + tl.cast(first + p, tl.int64) * page_size)
                if slot >= 0:
                    at = (p * WORDS).to(tl.float32)
                    page = tl.where(wide_f == at, slot // page_size, page)
                    if WORDS == 2:
                        page = tl.where(wide_f == at + 1.0, 0, page)
            tl.store(to + wide, page, mask=wide < count * WORDS)


def build_page_table(
    req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, page_size: int, out: Tensor
) -> Tensor:
    """The contract is `hal.ops.build_page_table`'s."""
    bs, pages = out.shape
    if bs == 0 or pages == 0:
        return out
    height, width = req_to_token.shape
    single = page_size == 1
    block = min(1024 if single else 64, max(8, pow2(pages)))
    words = out.element_size() // 4
    table = (req_to_token.stride(0), height if width else 0, width)
    static = {"BLOCK": block, "WORDS": words, "SINGLE": single}
    _page_table(
        (min(vector_cores(out.device), bs * cdiv(pages, block)),),
        *(req_to_token, req_pool_indices, kv_lens, out.view(torch.int32)),
        *(bs, pages, *table, page_size, out.stride(0) * words),
        **static,
    )
    return out
