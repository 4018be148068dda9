"""build_kv_indices_from_blocks: the slots of all that each request attends to, packed, from a block table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal._errors import ArgumentError
from hal.ops._checks import check_range
from hal.ops._spans import LONGEST, check_page_size, extents, spread
from hal.ops.alloc_extend import largest_page
from hal.ops.build_kv_indices import check_indptr, write_sums
from hal.ops.spec import INDEX, OpSpec, TensorArg, ValueArg


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
    """Packs the slots of each request's tokens ``start_i .. start_i + kv_lens[i]``, which its row of a block table
    places, into `out`, and says in `kv_indptr` where each begins: `build_kv_indices` for engines with block tables.

    Token p of request i lies in slot ``block_table[i, p // page_size] * page_size + p % page_size``. Of a request the
    last ``n_i = min(kv_lens[i], keep_last)`` of these tokens are listed (all of them where `keep_last` is -1), and
    ``kv_indptr[i] = sum(n_j for j < i)``. A token outside the table is -1, and so is one of a block that is below 0,
    or too large for all its slots to fit out's dtype; its position counts. What is left of `out` stays as it was, so a
    buffer made for the largest batch costs a small one nothing; nothing is written past it. A length that is not in
    [0, 2^31) is 0. Pages of 1 list the blocks themselves.

    Args:
        block_table: ``[bs, max_blocks]`` int32 or int64, the blocks (pages) of each request in the order of its
            tokens; may be a row-strided view. Any value is safe.
        kv_lens: ``[bs]`` int32 or int64, tokens of each request. Any value is safe.
        page_size: slots in a block, 1 to 2^30; any, not only a power of two. vLLM's ``block_size``.
        kv_indptr: ``[bs + 1]`` int32 or int64, overwritten; entries are at most capacity.
        out: ``[capacity]`` int32 or int64.
        kv_start: ``[bs]`` int32 or int64, the first token of each request; None is 0. Any value is safe.
        keep_last: how many tokens of each request are listed at most, its last ones; -1: all. A sliding window needs
            no more than those it sees: ``sliding_window + 1`` of `decode_attention`'s, ``sliding_window`` and the most
            new tokens of a request of `extend_attention`'s. So long a list costs time by the window, not by the length.

    Returns:
        `out` itself.

    Raises:
        ArgumentError: a wrong dtype, rank, length, device, stride, page size or `keep_last`.

    Example:
        >>> import torch, hal
        >>> blocks = torch.tensor([[7, 2], [5, 0]], dtype=torch.int32)
        >>> indptr, out = torch.empty(3, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
        >>> hal.build_kv_indices_from_blocks(blocks, torch.tensor([6, 3]), 4, indptr, out)
        tensor([28, 29, 30, 31,  8,  9, 20, 21, 22], dtype=torch.int32)
        >>> hal.build_kv_indices_from_blocks(blocks, torch.tensor([6, 3]), 4, indptr, out, keep_last=2)[:4], indptr
        (tensor([ 8,  9, 21, 22], dtype=torch.int32), tensor([0, 2, 4], dtype=torch.int32))

    Source: vLLM's block tables (Kwon et al., arXiv:2309.06180) as the lists that FlashInfer's wrappers take, which
    their users make on the host or by several operators of torch.
    """
    capacity = out.shape[0]
    _, whole = extents(torch.zeros_like(kv_lens), kv_lens)
    length = whole if keep_last < 0 else whole.clamp(max=min(keep_last, LONGEST))
    write_sums(length, kv_indptr, capacity)
    if kv_lens.shape[0] == 0 or capacity == 0:
        return out
    i, t, used = spread(length, capacity)
    end = block_table.shape[1] * page_size
    if end == 0:
        return out.copy_(torch.where(used, -1, out))
    t = t + (whole - length)[i]
    first = torch.zeros_like(t) if kv_start is None else kv_start.to(torch.int64)[i]
    # Compared before it is added, so that the sum can't wrap.
    valid = used & (first >= -t) & (first < end - t)
    position = torch.where(valid, first, 0) + torch.where(valid, t, 0)
    block = block_table[i, position // page_size].to(torch.int64)
    valid = valid & (block >= 0) & (block <= largest_page(out.dtype, page_size))
    slot = torch.where(valid, block, 0) * page_size + position % page_size
    return out.copy_(torch.where(used, torch.where(valid, slot, -1), out))


def _check_sizes(
    block_table: Tensor, kv_lens: Tensor, page_size: int, kv_indptr: Tensor, out: Tensor, kv_start: Any, keep_last: Any
) -> None:
    # Not of the call's kind, which is checked once, but of each call.
    check_page_size("build_kv_indices_from_blocks", page_size)
    if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < -1:
        expected = "an int, -1 (all) or more"
        raise ArgumentError("build_kv_indices_from_blocks", "keep_last", expected, repr(keep_last))
    check_indptr("build_kv_indices_from_blocks", kv_lens, kv_indptr)


def _check_values(a: Mapping[str, Any]) -> None:
    op, width = "build_kv_indices_from_blocks", a["block_table"].shape[1] * a["page_size"]
    check_range(op, "kv_lens", a["kv_lens"], 0, min(width, LONGEST))
    if a["kv_start"] is not None:
        check_range(op, "kv_start", a["kv_start"], 0, width)


SPEC = OpSpec(
    build_kv_indices_from_blocks,
    args={
        "block_table": TensorArg("bs max_blocks", INDEX, stride="inner"),
        "kv_lens": TensorArg("bs", INDEX),
        "page_size": ValueArg(),
        "kv_indptr": TensorArg("bs_and_1", INDEX, mutated=True),
        "out": TensorArg("capacity", INDEX, mutated=True),
        "kv_start": TensorArg("bs", INDEX, optional=True),
        "keep_last": ValueArg(off=-1),
    },
    returns="out",
    check_sizes=_check_sizes,
    check_values=_check_values,
    proof="hal.ops.proofs.build_kv_indices_from_blocks",
)
