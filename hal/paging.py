"""`num_new_pages`: on the host, what `alloc_extend` and `alloc_decode` will take, before they are called; `listed`, for
adapters of attention that takes no listing but a well-formed one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hal._errors import ArgumentError
from hal.ops._attention import bounds
from hal.ops._spans import check_page_size, extent
from hal.ops._torch import in_range


def num_new_pages(
    prefix_lens: Tensor | Sequence[int], seq_lens: Tensor | Sequence[int], page_size: int
) -> int:
    """The pages that requests with `prefix_lens` tokens need to grow to `seq_lens`, as `alloc_extend` counts them.

    For `alloc_decode` the prefix is ``seq_lens - 1``. Nothing is asked of a device, so there is nothing to wait for.

    Args:
        prefix_lens: ``[bs]`` ints: a sequence, or a CPU tensor.
        seq_lens: likewise, as many.
        page_size: slots in a page, 1 to 2^30.

    Raises:
        ArgumentError: a tensor on a device, lengths that disagree, a wrong page size.

    Example:
        >>> import hal
        >>> hal.num_new_pages([2, 0, 4], [5, 3, 4], page_size=4)
        2
    """
    check_page_size("num_new_pages", page_size)
    lists = []
    for name, lens in (("prefix_lens", prefix_lens), ("seq_lens", seq_lens)):
        if isinstance(lens, Tensor):
            if not lens.is_cpu or lens.ndim != 1 or lens.is_floating_point():
                raise ArgumentError(
                    "num_new_pages",
                    name,
                    "[bs] ints on the CPU",
                    f"{lens.dtype}{list(lens.shape)}@{lens.device}",
                )
            lens = lens.tolist()
        lists.append(lens)
    if len(lists[0]) != len(lists[1]):
        raise ArgumentError(
            "num_new_pages", "seq_lens", f"{len(lists[0])} lengths, like prefix_lens", str(len(lists[1]))
        )
    spans = (extent(p, s) for p, s in zip(*lists, strict=True))
    return sum(-(-s // page_size) - -(-p // page_size) for p, s in spans)


@dataclass(frozen=True)
class Listing:
    """A batch's keys without what is no key: requests one after the other, each slot in range.

    Attributes:
        slots: ``[sum(lengths)]`` int32, on the device.
        begin: ``[bs]`` int64, on the device: where each request's begin.
        keys: ``[bs]`` int64, on the device: `lengths`.
        lengths: of each request, on the host.
    """

    slots: Tensor
    begin: Tensor
    keys: Tensor
    lengths: list[int]

    def rows(self, width: int) -> tuple[Tensor, Tensor]:
        """``[bs, width]``: each request's slots from the left, 0 behind them; and which of them are its own."""
        at = torch.arange(width, device=self.slots.device)
        own = at < self.keys.view(-1, 1)
        return torch.where(own, self.slots[torch.where(own, self.begin.view(-1, 1) + at, 0)], 0), own


def listed(kv_indptr: Tensor, kv_indices: Tensor, num_slots: int, sliding_window: int = -1) -> Listing:
    """The keys that `decode_attention` sees, for libraries that must be given lengths on the host and no slot but
    one that is there.

    Costs a few small kernels and one synchronisation, for the lengths.

    Args:
        kv_indptr, kv_indices, sliding_window: as in `hal.decode_attention`; any values.
        num_slots: slots of the cache, below 2^31.
    """
    start, end = bounds(kv_indptr, kv_indices.shape[0])
    if sliding_window >= 0:
        # The position counts whether or not a key is there, so this comes before the others are dropped.
        start = torch.maximum(start, end - 1 - sliding_window)
    valid = in_range(kv_indices, num_slots)
    before = torch.nn.functional.pad(valid.cumsum(0), (1, 0))
    keys = before[end] - before[start]
    begin = keys.cumsum(0) - keys
    nnz = kv_indices.shape[0]
    # All that is no key lands behind the others: dropping it by a mask would synchronise.
    packed = kv_indices.new_zeros(nnz + 1)
    packed.scatter_(0, torch.where(valid, before[:-1], nnz), kv_indices)
    lengths: list[int] = keys.tolist()
    i = torch.repeat_interleave(keys, output_size=sum(lengths))
    rank = torch.arange(i.shape[0], device=i.device) - begin[i]
    return Listing(packed[before[start][i] + rank].to(torch.int32), begin, keys, lengths)
