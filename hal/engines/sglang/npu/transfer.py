"""`transfer_kv_dim_exchange`: whole pages between a device pool ``[L, P, ...]`` and a host pool ``[P, L, ...]``."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor

import hal
from hal._errors import ArgumentError
from hal.engines.sglang.kernels._common import Unsupported

NAME = "transfer_kv_dim_exchange"


class TransferDirection(Enum):
    H2D = 1
    D2H = 2


class TransferFlag(Enum):
    FAST2D = 2


def transfer_kv_dim_exchange(
    device_indices: Tensor,
    host_indices: Tensor,
    device_k: Tensor,
    host_k: Tensor,
    device_v: Tensor,
    host_v: Tensor,
    device_index_k: Tensor | None = None,
    host_index_k: Tensor | None = None,
    page_size: int = 128,
    direction: Any = TransferDirection.H2D,
    flags: Any = TransferFlag.FAST2D,
    *,
    device_index_k_scale: Tensor | None = None,
    host_index_k_scale: Tensor | None = None,
) -> None:
    """Copies pages of all layers between device and host, on `kv_transfer`; k, v and a sparse index's keys.

    Args:
        device_indices: ``[n * page_size]`` slots: whole pages, each page's own, in order. Read on the host.
        host_indices: likewise, as many.
        device_k: ``[L, pages, page_size, heads, dim]``.
        host_k: ``[pages, L, page_size, heads, dim]``, where a copy is to run beside the device, pinned.
        device_v: like device_k but for dim; without elements: none.
        host_v: like host_k, with device_v's dim; without elements: none.
        device_index_k: another such pair of pools, or None.
        host_index_k: likewise.
        page_size: slots in a page.
        direction: 1 or `TransferDirection.H2D`, 2 or `D2H`; sgl-kernel-npu's own enum too.
        flags: 2, `TransferFlag.FAST2D`.
        device_index_k_scale: another such pair, or None.
        host_index_k_scale: likewise.

    Raises:
        ArgumentError: a page out of range, or shapes that don't go together. Nothing is copied.
        Unsupported: slots that are not whole pages, other flags or directions. Nothing is copied.

    Example:
        >>> import torch
        >>> device, host = torch.ones(3, 2, 4, 1, 8), torch.zeros(5, 3, 4, 1, 8)
        >>> transfer_kv_dim_exchange(torch.arange(4, 8), torch.arange(12, 16), device, host, torch.empty(0),
        ...                          torch.empty(0), page_size=4, direction=TransferDirection.D2H)
        >>> host.sum(dim=(1, 2, 3, 4)).tolist()
        [0.0, 0.0, 0.0, 96.0, 0.0]
    """
    way, flag = (getattr(x, "value", x) for x in (direction, flags))
    if way not in (1, 2):
        raise Unsupported(f"hal: {NAME}: direction {way}: expected 1 (host to device) or 2 (device to host)")
    if not flag & TransferFlag.FAST2D.value:
        raise Unsupported(f"hal: {NAME}: flags {flag}: expected {TransferFlag.FAST2D.value}")
    pairs: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = [(device_k, host_k, device_v, host_v)]
    for device, host in ((device_index_k, host_index_k), (device_index_k_scale, host_index_k_scale)):
        if (device is None) != (host is None):
            raise Unsupported(f"hal: {NAME}: an index's pool on one side alone")
        if device is not None and host is not None:
            pairs.append((device, host, None, None))
    # All pools before the first copy, so that what is refused writes nothing.
    pools = [_pools(*pair, page_size=page_size) for pair in pairs]
    slots = [
        _pages(name, indices, page_size, min(p[side].num_slots for p in pools))
        for side, (name, indices) in enumerate((("device_indices", device_indices), ("host_indices", host_indices)))
    ]
    if slots[0].shape != slots[1].shape:
        raise ArgumentError(NAME, "host_indices", f"{len(slots[0])} slots, as device_indices", str(len(slots[1])))
    for device_pool, host_pool in pools:
        if way == 1:
            hal.kv_transfer(host_pool, device_pool, slots[1], slots[0])
        else:
            hal.kv_transfer(device_pool, host_pool, slots[0], slots[1])


def op(
    device_k: Tensor,
    host_k: Tensor,
    device_v: Tensor,
    host_v: Tensor,
    device_indices: Tensor,
    host_indices: Tensor,
    page_size: int,
    direct: int,
    flags: int,
) -> None:
    """The operator's order of the same arguments."""
    transfer_kv_dim_exchange(
        device_indices,
        host_indices,
        device_k,
        host_k,
        device_v,
        host_v,
        page_size=page_size,
        direction=direct,
        flags=flags,
    )


def _pools(
    device_k: Tensor, host_k: Tensor, device_v: Tensor | None, host_v: Tensor | None, page_size: int
) -> tuple[hal.KVPool, hal.KVPool]:
    v = [t if t is not None and t.numel() else None for t in (device_v, host_v)]
    if (v[0] is None) != (v[1] is None):
        raise Unsupported(f"hal: {NAME}: v on one side alone")
    for name, t in (("device_k", device_k), ("host_k", host_k), ("device_v", v[0]), ("host_v", v[1])):
        if t is not None and (t.ndim != 5 or t.shape[2] != page_size):
            want = "[L, pages" if name.startswith("device") else "[pages, L"
            raise ArgumentError(NAME, name, f"{want}, {page_size}, heads, dim]", str(tuple(t.shape)))
    if device_k.shape[0] != host_k.shape[1] or device_k.shape[3:] != host_k.shape[3:]:
        raise ArgumentError(
            NAME, "host_k", f"device_k's layers and rows, {tuple(device_k.shape)}", str(tuple(host_k.shape))
        )
    device = hal.KVPool(
        device_k.flatten(1, 2), None if v[0] is None else v[0].flatten(1, 2), layout="layer_first", page_size=page_size
    )
    return device, hal.KVPool(host_k, v[1], layout="page_first_direct", page_size=page_size)


def _pages(name: str, indices: Tensor, page_size: int, end: int) -> Tensor:
    """The slots on the CPU, as int64: whole pages below `end`."""
    slots = indices.to(device="cpu", dtype=torch.int64)
    if slots.ndim != 1 or slots.numel() % page_size:
        raise ArgumentError(NAME, name, f"[n * {page_size}]", str(tuple(slots.shape)))
    pages = slots.view(-1, page_size)
    first = pages[:, :1]
    if ((first < 0) | (first > end - page_size)).any():
        worst = int(first.min() if (first < 0).any() else first.max())
        raise ArgumentError(NAME, name, f"slots 0 to {end - 1}", f"a page from slot {worst} on")
    whole = first + torch.arange(page_size, dtype=torch.int64, device="cpu")
    if (first % page_size).any() or not torch.equal(pages, whole):
        raise Unsupported(
            f"hal: {NAME}: {name}: not whole pages of {page_size}, each page's slots in order — "
            "hal.kv_transfer takes any slots"
        )
    return slots
