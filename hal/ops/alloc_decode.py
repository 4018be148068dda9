"""alloc_decode: a slot for the one new token of each request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal.ops._checks import check_range
from hal.ops._spans import LONGEST, check_page_size
from hal.ops.alloc_extend import largest_page
from hal.ops.spec import INDEX, OpSpec, TensorArg, ValueArg


def alloc_decode(seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int, out: Tensor) -> Tensor:
    """``out[i]`` becomes the slot of request i's newest token, the one at position ``seq_lens[i] - 1``.

    It is ``last_loc[i] + 1``, or, where the token opens a page, the first slot of the next of `free_pages`
    after those of all requests before it. It is -1 where ``seq_lens[i]`` is not in [1, 2^31) (such a request
    takes no page), where no page is left (the list is never read past its end), where a page's slots are not
    all in the range of out's dtype, or where `last_loc` can't be the slot of the token before.

    Args:
        seq_lens: ``[bs]`` int32 or int64, tokens with the new one. Any value is safe.
        last_loc: ``[bs]`` int32 or int64, the slot of the token before. Looked at only where its page is open.
            Any value is safe.
        free_pages: ``[n]`` int32 or int64, page numbers, taken from the front. Not changed.
        page_size: slots in a page, 1 to 2^30; any, not only a power of two.
        out: ``[bs]`` int32 or int64, overwritten.

    Returns:
        ``[1]`` int64, on the device: the pages that the batch needs, as `alloc_extend`.

    Raises:
        ArgumentError: a wrong dtype, rank, length, device, stride or page size.

    Example:
        >>> import torch, hal
        >>> out = torch.empty(2, dtype=torch.int64)
        >>> hal.alloc_decode(torch.tensor([6, 9]), torch.tensor([40, 7]), torch.tensor([3, 5]), 4, out)
        tensor([1])
        >>> out
        tensor([41, 12])

    Source: the contract of SGLang's ``alloc_decode_kernel``, with every value defined.
    """
    seq, last, n = seq_lens.to(torch.int64), last_loc.to(torch.int64), free_pages.shape[0]
    counts = (seq >= 1) & (seq <= LONGEST)
    position = torch.where(counts, seq, 1) - 1
    opens = counts & (position % page_size == 0)
    taken = opens.cumsum(0) - 1
    there = opens & (taken < n)
    new = torch.where(there, free_pages[torch.where(there, taken, 0)], -1) if n else torch.full_like(seq, -1)
    follows = (last >= 0) & (last % page_size == (position - 1) % page_size)
    page = torch.where(opens, new, torch.where(follows, last // page_size, -1))
    ok = counts & (page >= 0) & (page <= largest_page(out.dtype, page_size))
    out.copy_(torch.where(ok, torch.where(ok, page, 0) * page_size + position % page_size, -1))
    return opens.sum().view(1)


def _check_sizes(seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int, out: Tensor) -> None:
    # Not of the call's kind, which is checked once, but of each call.
    check_page_size("alloc_decode", page_size)


def _check_values(a: Mapping[str, Any]) -> None:
    for name, low in (("seq_lens", 0), ("last_loc", -1), ("free_pages", 0)):
        check_range("alloc_decode", name, a[name], low, LONGEST)


SPEC = OpSpec(
    alloc_decode,
    args={
        "seq_lens": TensorArg("bs", INDEX),
        "last_loc": TensorArg("bs", INDEX),
        "free_pages": TensorArg("free", INDEX),
        "page_size": ValueArg(),
        "out": TensorArg("bs", INDEX, mutated=True),
    },
    returns=TensorArg("1", (torch.int64,)),
    check_sizes=_check_sizes,
    check_values=_check_values,
    proof="hal.ops.proofs.alloc_decode",
)
