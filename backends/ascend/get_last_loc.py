"""get_last_loc for Ascend: ``out[i] = req_to_token[req_pool_indices[i], prefix_lens[i] - 1]``, -1 where there is none.

req_to_token ``[max_requests, max_context_len]`` int32, req_pool_indices and prefix_lens ``[bs]``.
A gather from unrelated rows has no contiguous form on this machine: each element is a scalar load, under
a scalar condition (a masked-off vector lane would be read all the same). The results are collected in a
register tile and stored a block at a time. An int64 result is stored as pairs of int32, low word and sign,
because int64 vectors degrade to scalar code.
"""

# A kernel's parameters have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton.language as tl
from torch import Tensor

from hal.backends.ascend._device import cdiv, pow2, vector_cores
from hal.triton import launch


@launch.jit(do_not_specialize=("table", "requests", "lens", "out", "n", "stride", "height", "width"))
def _get_last_loc(table, requests, lens, out, n, stride, height, width, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    lane = tl.arange(0, BLOCK * WORDS)
    # Small integers compare exactly in fp32, and only fp32 vectors compare in one instruction.
    lane_f = lane.to(tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        first = block * BLOCK
        count = tl.minimum(n - first, BLOCK)
        found = tl.full([BLOCK * WORDS], -1, tl.int32)
        for i in range(count):
            request = tl.load(requests + first + i).to(tl.int64)
            length = tl.load(lens + first + i).to(tl.int64)
            if (request >= 0) & (request < height) & (length > 0) & (length <= width):
                slot = tl.load(table + request * stride + (length - 1))
                at = (i * WORDS).to(tl.float32)
                found = tl.where(lane_f == at, slot, found)
                if WORDS == 2:
                    found = tl.where(lane_f == at + 1.0, slot >> 31, found)
        tl.store(out + first.to(tl.int64) * WORDS + lane, found, mask=lane < count * WORDS)


def get_last_loc(req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor) -> Tensor:
    """The contract is `hal.ops.get_last_loc`'s."""
    out = torch.empty_like(prefix_lens)
    n = prefix_lens.shape[0]
    if n == 0:
        return out
    cores = vector_cores(prefix_lens.device)
    block = min(64, max(8, pow2(cdiv(n, cores))))
    height, width = req_to_token.shape
    _get_last_loc(
        (min(cores, cdiv(n, block)),),
        req_to_token,
        req_pool_indices,
        prefix_lens,
        out.view(torch.int32),
        n,
        req_to_token.stride(0),
        height if width else 0,
        width,
        BLOCK=block,
        WORDS=out.element_size() // 4,
    )
    return out
