"""alloc_extend: the slots of a batch's new tokens, out of the open pages and the list of free ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal.ops._checks import check_range
from hal.ops._spans import LONGEST, check_page_size, extents, spread
from hal.ops.spec import INDEX, OpSpec, TensorArg, ValueArg


def alloc_extend(
    prefix_lens: Tensor, seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int, out: Tensor
) -> Tensor:
    """Gives each token ``prefix_i <= position < seq_i`` of every request a slot, packed into `out`.

    A request first fills its open page from ``last_loc[i] + 1``, then takes new pages from the front of
    `free_pages`, after those of all requests before it, the last one perhaps in part. A request counts only
    where ``0 <= prefix_i <= seq_i < 2^31``. A token's slot is -1 where there is no page left for it (the list
    is never read past its end), where a page's slots are not all in the range of out's dtype, or where
    `last_loc` can't be the slot of the token before (below 0, or another place in its page). What is left of
    `out` becomes -1; tokens past its end get no slot, and their pages count all the same.

    Args:
        prefix_lens: ``[bs]`` int32 or int64, tokens that have a slot. Any value is safe.
        seq_lens: ``[bs]`` int32 or int64, tokens in all. Any value is safe.
        last_loc: ``[bs]`` int32 or int64, the slot of each request's last token (`get_last_loc`). Looked at only
            where a page is open. Any value is safe.
        free_pages: ``[n]`` int32 or int64, page numbers, taken from the front. Not changed.
        page_size: slots in a page, 1 to 2^30; any, not only a power of two.
        out: ``[capacity]`` int32 or int64, overwritten whole.

    Returns:
        ``[1]`` int64, on the device: the pages that the batch needs. More than ``len(free_pages)``: it did not
        fit. An engine that counts on the host has the number from `hal.num_new_pages`, without a sync.

    Raises:
        ArgumentError: a wrong dtype, rank, length, device, stride or page size.

    Example:
        >>> import torch, hal
        >>> out = torch.empty(6, dtype=torch.int64)
        >>> prefix, seq, last = torch.tensor([2, 0]), torch.tensor([5, 3]), torch.tensor([41, -1])
        >>> hal.alloc_extend(prefix, seq, last, torch.tensor([7, 3, 9]), 4, out)
        tensor([2])
        >>> out
        tensor([42, 43, 28, 12, 13, 14])

    Source: the contract of SGLang's ``alloc_extend_kernel``, with every value defined.
    """
    bs, capacity, n = prefix_lens.shape[0], out.shape[0], free_pages.shape[0]
    prefix, seq = extents(prefix_lens, seq_lens)
    opened = (prefix + page_size - 1) // page_size
    pages = (seq + page_size - 1) // page_size - opened
    total = pages.sum().view(1)
    if bs == 0 or capacity == 0:
        out.fill_(-1)
        return total
    i, t, used = spread(seq - prefix, capacity)
    position = prefix[i] + t
    ahead = position // page_size - opened[i]
    last = last_loc.to(torch.int64)[i]
    follows = (last >= 0) & (last % page_size == (prefix[i] - 1) % page_size)
    taken = (pages.cumsum(0) - pages)[i] + ahead
    there = (ahead >= 0) & (taken < n)
    new = torch.where(there, free_pages[torch.where(there, taken, 0)], -1) if n else torch.full_like(taken, -1)
    page = torch.where(ahead < 0, torch.where(follows, last // page_size, -1), new)
    ok = used & (page >= 0) & (page <= largest_page(out.dtype, page_size))
    out.copy_(torch.where(ok, torch.where(ok, page, 0) * page_size + position % page_size, -1))
    return total


def largest_page(dtype: torch.dtype, page_size: int) -> int:
    """The last page whose every slot `dtype` can hold."""
    return (torch.iinfo(dtype).max - page_size + 1) // page_size


def _check_sizes(
    prefix_lens: Tensor, seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int, out: Tensor
) -> None:
    # Not of the call's kind, which is checked once, but of each call.
    check_page_size("alloc_extend", page_size)


def _check_values(a: Mapping[str, Any]) -> None:
    for name, low in (("prefix_lens", 0), ("seq_lens", 0), ("last_loc", -1), ("free_pages", 0)):
        check_range("alloc_extend", name, a[name], low, LONGEST)


SPEC = OpSpec(
    alloc_extend,
    args={
        "prefix_lens": TensorArg("bs", INDEX),
        "seq_lens": TensorArg("bs", INDEX),
        "last_loc": TensorArg("bs", INDEX),
        "free_pages": TensorArg("free", INDEX),
        "page_size": ValueArg(),
        "out": TensorArg("capacity", INDEX, mutated=True),
    },
    returns=TensorArg("1", (torch.int64,)),
    check_sizes=_check_sizes,
    check_values=_check_values,
    proof="hal.ops.proofs.alloc_extend",
)
