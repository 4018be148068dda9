"""Copies between device and host: the runtime's, the one part of this backend that is no kernel.

Rows are packed into a staging buffer in the host pool's own layout, so that what lies together on the
host is one copy. The only thing here that needs the runtime is `_copy`: on an NPU torch_npu's batch memcpy,
on the current stream, without waiting, from and to pinned memory; in the lowered lane its stand-in on
the CPU, which is why a report of that lane says ``kernels lowered, copies stand-in``.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hal.backends.ascend._device import slots_on
from hal.kv import plan as kvplan
from hal.kv.pool import KVPool

STAGING_BYTES = 32 << 20
"""Staged at once, for k and v each; longer transfers go in pieces through the allocator's same block."""

BATCH = 512
"""Copies in one call of the runtime's: torch_npu keeps their addresses on the stack (about 72 bytes a copy)."""

LAYER_DIM = {"layer_first": 0, "page_first": 1, "page_first_direct": 1, "page_head": 3}
_PAGED = ("page_first_direct", "page_head")

Move = Callable[[KVPool, KVPool, Tensor, Tensor, range, range], None]


def stage(src: KVPool, dst: KVPool, src_slots: Tensor, dst_slots: Tensor, layers: range, move: Move) -> None:
    """Copy rows between two memories, through `move` on the device and `_copy` between the two.

    The slots are on the CPU. Pairs out of range are dropped. The side that is on the host (`dst`, where
    both are on one device) decides the staging buffer's layout.
    """
    out = host_is_dst(src, dst)
    host, device = (dst, src) if out else (src, dst)
    # By the host's slots: what is consecutive there becomes one run.
    a, b = kvplan.pairs(src, dst, src_slots, dst_slots, "dst" if out else "src")
    theirs, ours = (b, a) if out else (a, b)
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
        here, there = (slots_on(slots, device.device) for slots in (local, ours[chosen]))
        if out:
            move(src, buffer, there, here, layers, inside)
        if out:
            plan = kvplan.copies(buffer, host, local, theirs[chosen], inside, layers)
        else:
            plan = kvplan.copies(host, buffer, theirs[chosen], local, layers, inside)
        pieces = list(
            zip(
                _bytes(dst if out else buffer, plan.dst, plan.sizes),
                _bytes(buffer if out else src, plan.src, plan.sizes),
                strict=True,
            )
        )
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


def _bytes(pool: KVPool, addresses: Tensor, sizes: Tensor) -> Iterator[Tensor]:
    """Those bytes of a pool, as views of its tensors: the runtime takes no addresses."""
    halves = [half for half in (pool.k, pool.v) if half is not None]
    tensors = [t for half in halves for t in (half if isinstance(half, tuple) else (half,))]
    whole = {t.untyped_storage().data_ptr(): t.view(torch.uint8) for t in tensors}
    starts = sorted(whole)
    for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
        start = starts[bisect_right(starts, address) - 1]
        yield whole[start].as_strided((size,), (1,), address - start)


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
