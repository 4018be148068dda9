"""compute_positions for Ascend: packs ``prefix_i ... seq_i - 1`` of every request into `out`; -1 in what is left.

prefix_lens, seq_lens ``[bs]``; out ``[capacity]``, overwritten whole; indptr ``[bs + 1]`` or None. `out` is split
over the programs as `_spans` says; a piece is made in registers and stored in blocks. An int64 result is stored as
pairs of int32, low word and sign, because int64 vectors degrade to scalar code.
"""

# A kernel's parameters have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton.language as tl
from torch import Tensor

from hal.backends.ascend._spans import extent, shares, write_indptr
from hal.triton import launch

BLOCK = 1024


@launch.jit(do_not_specialize=("prefixes", "lens", "out", "indptr", "bs", "capacity", "share"))
def _positions(
    prefixes, lens, out, indptr, bs, capacity, share, BLOCK: tl.constexpr, WORDS: tl.constexpr, SUMS: tl.constexpr
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    wide = tl.arange(0, BLOCK * WORDS)
    low = tl.program_id(0).to(tl.int64) * share
    high = tl.minimum(low + share, capacity)
    if SUMS > 0:  # noqa: SIM102 - settled when the kernel is compiled, the other when it runs
        if tl.program_id(0) == 0:
            write_indptr(prefixes, lens, indptr, bs, low + capacity, True, SUMS)
    at = low * 0
    for j in range(bs):
        if at < high:
            prefix, seq = extent(prefixes, lens, j, True)
            last = tl.minimum(high, at + (seq - prefix))
            for t in range(tl.maximum(low, at), last, BLOCK):
                count = tl.minimum(last - t, BLOCK).to(tl.int32)
                # Lanes past `count` may wrap; they are not stored.
                position = (prefix + (t - at)).to(tl.int32) + lane
                if WORDS == 2:
                    tl.store(out + t * 2 + wide, tl.interleave(position, position * 0), mask=wide < count * 2)
                else:
                    tl.store(out + t + lane, position, mask=lane < count)
            at += seq - prefix
    for t in range(tl.maximum(low, at), high, BLOCK):
        count = tl.minimum(high - t, BLOCK).to(tl.int32)
        tl.store(out + t * WORDS + wide, tl.full([BLOCK * WORDS], -1, tl.int32), mask=wide < count * WORDS)


def compute_positions(prefix_lens: Tensor, seq_lens: Tensor, out: Tensor, indptr: Tensor | None = None) -> Tensor:
    """The contract is `hal.ops.compute_positions`'s."""
    capacity = out.shape[0]
    if capacity == 0 and indptr is None:
        return out
    programs, share = shares(max(1, capacity), out.device)
    _positions(
        (programs,),
        prefix_lens,
        seq_lens,
        out.view(torch.int32),
        None if indptr is None else indptr.view(torch.int32),
        prefix_lens.shape[0],
        capacity,
        share,
        BLOCK=BLOCK,
        WORDS=out.element_size() // 4,
        SUMS=0 if indptr is None else indptr.element_size() // 4,
    )
    return out
