"""`num_new_pages`: on the host, what `alloc_extend` and `alloc_decode` will take, before they are called; `list_keys`
and `runs`, for adapters of attention that takes no listing but a well-formed one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hal import _host
from hal._errors import ArgumentError
from hal.ops._attention import bounds
from hal.ops._spans import check_page_size, extent
from hal.ops._torch import in_range


def num_new_pages(prefix_lens: Tensor | Sequence[int], seq_lens: Tensor | Sequence[int], page_size: int) -> int:
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
                    "num_new_pages", name, "[bs] ints on the CPU", f"{lens.dtype}{list(lens.shape)}@{lens.device}"
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
        at = torch.arange(width, device=self.slots.device, dtype=torch.int64)
        own = at < self.keys.view(-1, 1)
        return torch.where(own, self.slots[torch.where(own, self.begin.view(-1, 1) + at, 0)], 0), own


def list_keys(kv_indptr: Tensor, kv_indices: Tensor, num_slots: int, sliding_window: int = -1) -> Listing:
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
        # No wider than the list, or the difference might wrap.
        start = torch.maximum(start, end - 1 - min(sliding_window, kv_indices.shape[0]))
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
    rank = torch.arange(i.shape[0], device=i.device, dtype=torch.int64) - begin[i]
    return Listing(packed[before[start][i] + rank].to(torch.int32), begin, keys, lengths)


@dataclass(frozen=True)
class Runs:
    """A batch's queries as runs of rows of q, and the keys of each: what `extend_attention` means, for libraries that
    align the last query of a run with its last key. A run without keys has rows that see nothing, or are nobody's.

    Attributes:
        rows: on the host: where each run begins, and where the last ends; all rows of q are in one.
        keys: the runs' keys, as `Listing` has requests'.
        window: how many keys before its own a query sees, of those of its run; -1: all. That is no more than
            `sliding_window` unless each row is a run of its own, whose keys are those that are within it.
        seen: ``[n]`` int64, on the device: how many keys each row sees.
        owned: ``[n]`` bool, on the device: the rows of some request; None: all are.
    """

    rows: list[int]
    keys: Listing
    window: int
    seen: Tensor
    owned: Tensor | None


def runs(
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    n: int,
    num_slots: int,
    causal: bool = True,
    sliding_window: int = -1,
) -> Runs:
    """What each query of `extend_attention` sees, as runs of queries of which each sees one key more than the last.

    A request is a run, but where its listing has entries that are no key: its queries' counts of keys then do not
    ascend by one, and it is cut; or where it has fewer keys than queries. Costs a few small kernels and one
    synchronisation, or three where there are such entries.

    Args:
        qo_indptr, kv_indptr, kv_indices, causal, sliding_window: as in `hal.extend_attention`; any values.
        n: rows of q. num_slots: slots of the cache, below 2^31.
    """
    device, nnz, bs = kv_indices.device, kv_indices.shape[0], qo_indptr.shape[0] - 1
    valid = in_range(kv_indices, num_slots)
    host = torch.cat([qo_indptr.to(torch.int64), kv_indptr.to(torch.int64), valid.sum().view(1)]).cpu()
    qo, kv, whole = host[: bs + 1].clamp(0, n), host[bs + 1 : -1], int(host[-1]) == nnz
    start, end = bounds(kv, nnz)
    ascending = bool((qo.diff() >= 0).all())
    t = _host.arange(n)
    if sliding_window >= nnz:
        sliding_window = -1
    if not bs:
        owned, owner = _host.zeros(n, dtype=torch.bool), t
        start = end = stop = _host.zeros(n, dtype=torch.int64)
    else:
        if ascending:
            owned = (t >= qo[0]) & (t < qo[-1])
            owner = (torch.searchsorted(qo, t, right=True) - 1).clamp(0, bs - 1)
        else:
            mine = (t.view(-1, 1) >= qo[:-1]) & (t.view(-1, 1) < qo[1:])
            owned, owner = mine.any(dim=1), mine.to(torch.int8).argmax(dim=1)
        stop = qo[1:]
    first, last = start[owner], end[owner]
    after = last - (stop[owner] - t) + 1
    # One by one is always right; a run has one window for all its rows, counted in keys and from its end.
    single = sliding_window >= 0 and not (whole and (causal or ascending))
    if sliding_window >= 0:
        first = torch.maximum(first, after - 1 - sliding_window)
    if causal:
        last = after
    last = torch.where(owned, torch.maximum(first, last), 0)
    first = torch.where(owned, first, 0)
    slots = kv_indices
    if not whole:
        before = torch.nn.functional.pad(valid.cpu().cumsum(0), (1, 0))
        first, last, slots = before[first], before[last], kv_indices[valid]
    seen = last - first
    on = (owner.diff() == 0) & (seen[1:] > 0) & (seen[:-1] > 0) & (last.diff() == int(causal))
    if sliding_window < 0:
        on &= first.diff() == 0
    on = on & (not single) | (seen[1:] == 0) & (seen[:-1] == 0)
    rows = torch.cat([t[:1], 1 + torch.nonzero(~on).flatten(), _host.tensor([n] if n else [0])])
    low, high = first[rows[:-1]], last[rows[1:] - 1]
    lengths = torch.where(seen[rows[:-1]] > 0, high - low, 0)
    total = int(lengths.sum())
    begin = lengths.cumsum(0) - lengths
    shift, begin, keys, seen = (x.to(device) for x in (low - begin, begin, lengths, seen))
    at = torch.repeat_interleave(shift, keys, output_size=total) + torch.arange(total, device=device, dtype=torch.int64)
    listing = Listing(slots[at].to(torch.int32), begin, keys, lengths.tolist())
    some = None if bool(owned.all()) else owned.to(device)
    return Runs(rows.tolist(), listing, -1 if single else sliding_window, seen, some)
