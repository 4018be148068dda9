"""What the ragged ops share: which request an output belongs to, and which lengths count at all."""

from __future__ import annotations

import torch
from torch import Tensor

from hal._errors import ArgumentError

LONGEST = 2**31 - 1
"""A request is no longer than this; so no sum of lengths can wrap in 64 bits."""

MAX_PAGE = 2**30


def extents(prefix_lens: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Both in int64; (0, 0) where not ``0 <= prefix <= seq <= LONGEST``."""
    prefix, seq = prefix_lens.to(torch.int64), seq_lens.to(torch.int64)
    ok = (prefix >= 0) & (prefix <= seq) & (seq <= LONGEST)
    return torch.where(ok, prefix, 0), torch.where(ok, seq, 0)


def extent(prefix: int, seq: int) -> tuple[int, int]:
    """`extents` of one request."""
    return (prefix, seq) if 0 <= prefix <= seq <= LONGEST else (0, 0)


def spread(length: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each output in [0, capacity): its request, its place in the request, and whether it has one."""
    stop = length.cumsum(0)
    o = torch.arange(capacity, device=length.device, dtype=torch.int64)
    i = torch.searchsorted(stop, o, right=True)
    used = i < length.shape[0]
    i = torch.where(used, i, 0)
    return i, o - (stop - length)[i], used


def columns(row: Tensor | None, start: int, stop: int) -> list[int]:
    """For the oracles: ``row[start:stop]``, -1 for what is outside of it; no row: all of it."""
    low, high = max(start, 0), stop if row is None else min(stop, row.shape[0])
    if row is None or low >= high:
        return [-1] * max(stop - start, 0)
    found: list[int] = row[low:high].tolist()
    return [-1] * (low - start) + found + [-1] * (stop - high)


def clamped_lengths(start: Tensor, end: Tensor, most: int) -> Tensor:
    """``max(end - start, 0)`` of int64, at most `most`, 0 or more: nothing in it wraps, and neither can its sum."""
    # start + most stops at the largest int64, beyond which no end lies.
    reach = start.clamp(max=torch.iinfo(torch.int64).max - most) + most
    return torch.maximum(torch.minimum(end, reach), start) - start


def check_page_size(op: str, page: object) -> None:
    """Raises unless `page` is an int in [1, MAX_PAGE]."""
    if isinstance(page, bool) or not isinstance(page, int) or not 1 <= page <= MAX_PAGE:
        raise ArgumentError(op, "page_size", f"an int in [1, {MAX_PAGE}]", repr(page))
