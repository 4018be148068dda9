"""What a host can know of a `kv_transfer` before it starts: runs of consecutive slots, and the copies they make.

Slots on the CPU can be looked at, and rows that lie side by side on both sides move in one copy. `pairs` drops
the slots that a transfer skips, `runs` finds what is consecutive, `copies` turns pairs into (address, address,
size) for a batched memcpy, from pool to pool or between a pool and a staging buffer that is laid out like one. Plain
torch on int64 CPU tensors: the device backends share it.

Example:
    >>> import torch
    >>> from hal.kv.pool import KVPool
    >>> src, dst = (KVPool(torch.zeros(8, 2, 4), None, "page_first") for _ in range(2))
    >>> a, b = pairs(src, dst, torch.tensor([1, 2, 3, -1, 6]), torch.tensor([4, 5, 6, 7, 0]))
    >>> runs((a, src), (b, dst)).tolist()
    [[0, 3], [3, 1]]
    >>> copies(src, dst, a, b).sizes.tolist()
    [96, 32]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hal import _host
from hal.kv.pool import KVPool, Plane


@dataclass(frozen=True)
class Copies:
    """Contiguous copies: int64 CPU tensors of one length."""

    src: Tensor
    """Addresses to read."""
    dst: Tensor
    """Addresses to write."""
    sizes: Tensor
    """Bytes."""

    @property
    def bytes(self) -> int:
        return int(self.sizes.sum())


def pairs(
    src: KVPool, dst: KVPool, src_slots: Tensor, dst_slots: Tensor, sort: str | None = None
) -> tuple[Tensor, Tensor]:
    """The pairs that a transfer copies, as int64: those whose slots are both in range.

    Args:
        src_slots: ``[n]`` int32 or int64 on the CPU; dst_slots likewise.
        sort: ``"src"`` or ``"dst"``: order the pairs by that side's slots, which may join runs. Pairs with one
            dst slot keep their order.
    """
    a, b = src_slots.to(torch.int64), dst_slots.to(torch.int64)
    valid = (a >= 0) & (a < src.num_slots) & (b >= 0) & (b < dst.num_slots)
    if not bool(valid.all()):
        a, b = a[valid], b[valid]
    if sort is not None:
        order = (a if sort == "src" else b).argsort(stable=True)
        a, b = a[order], b[order]
    return a, b


def find_runs(joined: Tensor) -> Tensor:
    """Runs of things, ``[runs, 2]`` (first, how many), where ``joined[i]`` says that i and i + 1 are of one run."""
    first = torch.cat([_host.zeros(1, dtype=torch.int64), (~joined).nonzero().view(-1) + 1])
    return torch.stack([first, torch.diff(first, append=_host.tensor([joined.shape[0] + 1]))], dim=1)


def runs(*sides: tuple[Tensor, KVPool]) -> Tensor:
    """Maximal runs of pairs that are consecutive on every given side, as ``[runs, 2]`` (first pair, pairs).

    Consecutive means one token stride apart in memory: a run ends at a page's edge where the pool's pages are
    not one token stride apart themselves.

    Args:
        sides: (valid slots ``[n]`` int64, their pool); one side, or both.
    """
    n = sides[0][0].shape[0]
    if n == 0:
        return _host.empty(0, 2, dtype=torch.int64)
    joined = _host.ones(n - 1, dtype=torch.bool)
    for slots, pool in sides:
        joined &= slots[1:] == slots[:-1] + 1
        if not all(p.page_stride == pool.page_size * p.token_stride for p in pool.planes()):
            joined &= slots[1:] % pool.page_size != 0
    return find_runs(joined)


def copies(
    src: KVPool, dst: KVPool, a: Tensor, b: Tensor, layers: range | None = None, dst_layers: range | None = None
) -> Copies:
    """The fewest contiguous copies, in pair order, that move slots `a` of `src` to slots `b` of `dst`.

    Args:
        a, b: valid slots, as `pairs` returns them.
        layers: which; None for all. dst_layers: as many others, to which they go; None for the same.
    """
    which = range(src.num_layers) if layers is None else layers
    found = runs((a, src), (b, dst))
    first, tokens = found.unbind(1)
    parts = [
        _plane_copies(p, q, src, dst, a[first], b[first], tokens, (which, dst_layers or which))
        for p, q in zip(src.planes(), dst.planes(), strict=True)
    ]
    return Copies(*(torch.cat([p[i] for p in parts]) for i in range(3)))


def _plane_copies(
    p: Plane, q: Plane, src: KVPool, dst: KVPool, a: Tensor, b: Tensor, tokens: Tensor, layers: tuple[range, range]
) -> tuple[Tensor, Tensor, Tensor]:
    """The copies of runs that start at slots `a` and `b`; `tokens` is their length."""
    pieces, size = max(p.chunks, q.chunks), min(p.chunk_bytes, q.chunk_bytes)
    offsets = {
        "piece": [_host.arange(pieces) * (x.chunk_stride if x.chunks > 1 else size) for x in (p, q)],
        "layer": [
            _host.tensor(x.bases[which.start : which.stop], dtype=torch.int64)
            for x, which in zip((p, q), layers, strict=True)
        ],
    }
    # A dim whose neighbours are `size` apart on both sides is part of one longer copy. Pieces and layers
    # are such dims for all runs or for none, in either order; tokens come last, each run having its own number.
    for name in ("piece", "layer", "piece"):
        here, there = offsets[name]
        if here.shape[0] > 1 and bool(((here.diff() == size) & (there.diff() == size)).all()):
            size *= here.shape[0]
            offsets[name] = [here[:1], there[:1]]
    if p.token_stride == q.token_stride == size:
        each, sizes = torch.ones_like(tokens), tokens * size
    else:
        each, sizes = tokens, torch.full_like(tokens, size)
    run = torch.repeat_interleave(_host.arange(tokens.shape[0]), each)
    t = _host.arange(run.shape[0]) - (each.cumsum(0) - each)[run]
    grids = []
    for x, pool, slots, side in ((p, src, a, 0), (q, dst, b, 1)):
        start = slots // pool.page_size * x.page_stride + slots % pool.page_size * x.token_stride
        token = (start[run] + t * x.token_stride).view(-1, 1, 1)
        grids.append(token + offsets["piece"][side].view(-1, 1) + offsets["layer"][side])
    return _join(grids[0].view(-1), grids[1].view(-1), sizes[run].view(-1, 1, 1).expand_as(grids[0]).reshape(-1))


def _join(src: Tensor, dst: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Copies with those joined that continue the one before on both sides, e.g. the layers of a whole page."""
    if sizes.shape[0] == 0:
        return src, dst, sizes
    found = find_runs((src[1:] == src[:-1] + sizes[:-1]) & (dst[1:] == dst[:-1] + sizes[:-1]))
    first, ends = found[:, 0], sizes.cumsum(0)
    return src[first], dst[first], torch.diff((ends - sizes)[first], append=ends[-1:])
