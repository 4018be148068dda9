"""SGLang's host pools (HiCache) on `kv_transfer`: all of a request's layers to the host, a layer at a time back.

SGLang's own buffers on both sides, seen as two `KVPool`s, made once a host pool. Its ``io_backend`` chooses nothing:
both of them are `kv_transfer`, which knows where the slots are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hal
from hal import KVPool
from hal.engines.sglang import limits

LAYOUTS = {"layer_first": 0, "page_first": 1, "page_first_direct": 1, "page_head": 3}
"""Of a host pool's, and which dim is the layer's."""


def load_to_device_per_layer(
    self: Any,
    device_pool: Any,
    host_indices: Tensor,
    device_indices: Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """Rows of one layer from slots of the host pool `self` to slots of the device's."""
    device, host = _pools(self, device_pool)[1][layer_id]
    _transfer(self, host, device, *_together(host_indices, device_indices), "load")


def backup_from_device_all_layer(
    self: Any, device_pool: Any, host_indices: Tensor, device_indices: Tensor, io_backend: str
) -> None:
    """Rows of all layers from slots of the device's pool to slots of the host pool `self`."""
    device, host = _pools(self, device_pool)[0]
    host_slots, slots = _together(host_indices, device_indices)
    _transfer(self, device, host, slots, host_slots, "backup")


def allocate(
    dims: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: Any,
    registration_granularity_bytes: int | None = None,
) -> Tensor:
    """A host pool's memory beside a CPU's own, which needs no pinning."""
    made: Tensor = allocator.allocate(dims, dtype=dtype, device=device)
    return made


def _transfer(owner: Any, src: KVPool, dst: KVPool, src_slots: Tensor, dst_slots: Tensor, way: str) -> None:
    """`kv_transfer`, chosen and checked by the first call of its kind on a host pool: a load is a call a layer."""
    if src_slots.shape != dst_slots.shape:
        raise hal.ArgumentError("kv_transfer", "dst_slots", f"{list(src_slots.shape)}", f"{list(dst_slots.shape)}")
    kind = (way, *((s.device, s.dtype, s.dim(), s.stride()) for s in (src_slots, dst_slots)))
    chosen = owner.__dict__.setdefault("_hal_transfers", {})
    if kind not in chosen:
        device = dst.device if src.device.type == "cpu" else src.device
        example = {"src": src, "dst": dst, "src_slots": src_slots, "dst_slots": dst_slots}
        chosen[kind] = hal.bind(device, like={"kv_transfer": example}).kv_transfer
    chosen[kind](src, dst, src_slots, dst_slots)


def _together(host_indices: Tensor, device_indices: Tensor) -> tuple[Tensor, Tensor]:
    # Of a backup SGLang leaves the host's slots on the CPU where its own kernel stages whole pages.
    if host_indices.device != device_indices.device:
        host_indices = host_indices.to(device_indices.device, non_blocking=True)
    return host_indices, device_indices


Pools = tuple[KVPool, KVPool]
"""The device's, and the host's."""


def _pools(host: Any, device: Any) -> tuple[Pools, list[Pools]]:
    """Of all layers, and of each: a call looks whether its pools' tensors have moved, which of 61 takes longer than all
    else that the host does for it."""
    found: tuple[Pools, list[Pools]] | None = getattr(host, "_hal_pools", None)
    if found is not None:
        return found
    if host.layout not in LAYOUTS:
        raise limits.refusal([f"a host pool of the layout {host.layout}"])

    def of(name: str) -> Any:
        # The host's own lists of the device's buffers are later than 0.5.17.
        return getattr(host, f"device_{name}s", None) or getattr(device, name)

    k, *v = ("k_buffer", "v_buffer") if hasattr(host, "k_buffer") else ("kv_buffer",)
    count, dim = len(of(k)), LAYOUTS[host.layout]

    def pools(first: int, number: int) -> Pools:
        near: list[Any] = [of(name)[first : first + number] for name in (k, *v)]
        far: dict[str, Any] = {name[0]: getattr(host, name).narrow(dim, first, number) for name in v}
        far |= {"k": getattr(host, k).narrow(dim, first, number)}
        return KVPool(*near), KVPool(**far, layout=host.layout, page_size=host.page_size)

    found = pools(0, count), [pools(i, 1) for i in range(count)]
    host._hal_pools = found
    return found
