"""Copies between device and host: the runtime's, the one part of this backend that is no kernel.

Rows are packed into a staging buffer in the host pool's own layout, so that what lies together on the
host is one copy. The only thing here that needs the runtime is `_copy`: on an NPU torch_npu's batch memcpy,
on the current stream, without waiting, from and to pinned memory; in the lowered lane its stand-in on
the CPU, which is why a report of that lane says ``kernels lowered, copies stand-in``.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hal.kvpool import KVPool

STAGING_BYTES = 32 << 20
"""Staged at once, for k and v each; longer transfers go in pieces through the allocator's same block."""

BATCH = 512
"""Copies in one call of the runtime's: torch_npu keeps their addresses on the stack (about 72 bytes a copy)."""

LAYER_DIM = {"layer_first": 0, "page_first": 1, "page_first_direct": 1, "page_head": 3}
_SLOT_DIM = {"layer_first": 1, "page_first": 0, "page_first_direct": 0, "page_head": 0}
_PAGED = ("page_first_direct", "page_head")

Move = Callable[[KVPool, KVPool, Tensor, Tensor, range, range], None]


def stage(src: KVPool, dst: KVPool, src_slots: Tensor, dst_slots: Tensor, layers: range, move: Move) -> None:
    """Copy rows between two memories, through `move` on the device and `_copy` between the two.

    The slots are on the CPU. Pairs out of range are dropped. The side that is on the host (`dst`, where
    both are on one device) decides the staging buffer's layout.
    """
    out = host_is_dst(src, dst)
    host, device = (dst, src) if out else (src, dst)
    valid = (src_slots >= 0) & (src_slots < src.num_slots) & (dst_slots >= 0) & (dst_slots < dst.num_slots)
    theirs = (dst_slots if out else src_slots)[valid].long()
    ours = (src_slots if out else dst_slots)[valid].long()
    if not theirs.numel():
        return
    unit = host.page_size if host.layout in _PAGED else 1
    units, index = torch.unique(theirs // unit, return_inverse=True)
    row = max(plane.row_bytes for plane in host.planes())
    step = max(1, STAGING_BYTES // max(1, row * len(layers) * unit))
    inside = range(len(layers))
    for first in range(0, units.numel(), step):
        some = units[first : first + step]
        chosen = (index >= first) & (index < first + step)
        local = (index[chosen] - first) * unit + theirs[chosen] % unit
        buffer = _staging(host, some.numel() * unit, len(layers), device.device)
        here = local.to(device.device, non_blocking=True)
        there = ours[chosen].to(device.device, non_blocking=True)
        if out:
            move(src, buffer, there, here, layers, inside)
        pieces = [
            (b, a) if out else (a, b)
            for at, to, count, tokens in _runs(some.tolist(), local, unit)
            for a, b in _pairs(buffer, host, at, to, count, tokens, layers)
        ]
        for i in range(0, len(pieces), BATCH):
            _copy(*map(list, zip(*pieces[i : i + BATCH], strict=True)))
        if not out:
            move(buffer, dst, here, there, inside, layers)


def host_is_dst(src: KVPool, dst: KVPool) -> bool:
    """Which side decides the layout in between; where both are on one device, `dst`."""
    return dst.device.type == "cpu" or src.device.type != "cpu"


def _copy(to: list[Tensor], sources: list[Tensor]) -> None:
    """Contiguous pieces, on the current stream; returns before they are done where the host side is pinned.

    torch_npu makes one ``aclrtMemcpyBatchAsync`` of them, and one ``copy_`` each where chip or CANN has no such call.
    It looks at addresses and sizes alone, so every piece must be contiguous, and all go one way.
    """
    torch._foreach_copy_(to, sources, non_blocking=True)


def _runs(
    units: list[int], local: Tensor, unit: int
) -> Iterator[tuple[int, int, int, tuple[int, int] | None]]:
    """(first staged unit, first host unit, how many, token range or None for whole units).

    Consecutive units that are wholly taken are one run. Of a page that is taken in part only those tokens
    are copied: the others are not this call's to write.
    """
    taken = torch.zeros(len(units) * unit, dtype=torch.bool)
    taken[local] = True
    pages = taken.view(len(units), unit)
    full = pages.all(dim=1).tolist()
    i = 0
    while i < len(units):
        if full[i]:
            j = i + 1
            while j < len(units) and full[j] and units[j] == units[j - 1] + 1:
                j += 1
            yield i, units[i], j - i, None
            i = j
            continue
        tokens = pages[i].nonzero().view(-1).tolist()
        start = 0
        for t in range(1, len(tokens) + 1):
            if t == len(tokens) or tokens[t] != tokens[t - 1] + 1:
                yield i, units[i], 1, (tokens[start], t - start)
                start = t
        i += 1


def _pairs(
    buffer: KVPool, host: KVPool, at: int, to: int, count: int, tokens: tuple[int, int] | None, layers: range
) -> Iterator[tuple[Tensor, Tensor]]:
    """The contiguous pieces (of the buffer, of the host) of one run, in all layers, of k and of v."""
    for name in ("k", "v"):
        staged, real = getattr(buffer, name), getattr(host, name)
        if real is None:
            continue
        if isinstance(real, tuple):
            for i, layer in enumerate(layers):
                yield staged[i].narrow(0, at, count), real[layer].narrow(0, to, count)
            continue
        a = staged.narrow(_SLOT_DIM[host.layout], at, count)
        b = real.narrow(LAYER_DIM[host.layout], layers.start, len(layers)).narrow(
            _SLOT_DIM[host.layout], to, count
        )
        if tokens is not None:
            a, b = a.narrow(2, *tokens), b.narrow(2, *tokens)
        yield from _contiguous(a, b)


def _contiguous(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both as pairs of contiguous pieces: a strided copy between memories would be packed, and waited for."""
    if a.is_contiguous() and b.is_contiguous():
        yield a, b
    else:
        for x, y in zip(a, b, strict=True):
            yield from _contiguous(x, y)


def _staging(host: KVPool, slots: int, layers: int, device: torch.device) -> KVPool:
    def make(row: tuple[int, ...]) -> Tensor:
        pages = slots // host.page_size if host.layout in _PAGED else slots
        shape = {
            "layer_first": (layers, slots, *row),
            "page_first": (slots, layers, *row),
            "page_first_direct": (pages, layers, host.page_size, *row),
            "page_head": (pages, row[0], host.page_size, layers, row[-1]),
        }[host.layout]
        return torch.empty(shape, dtype=host.dtype, device=device)

    v = None if host.v_row_shape is None else make(host.v_row_shape)
    return KVPool(make(host.row_shape), v, layout=host.layout, page_size=host.page_size)
