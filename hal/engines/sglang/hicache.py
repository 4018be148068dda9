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

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


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
    device, host = _pools(self, device_pool)
    hal.kv_transfer(host, device, host_indices, device_indices, layers=range(layer_id, layer_id + 1))


def backup_from_device_all_layer(
    self: Any, device_pool: Any, host_indices: Tensor, device_indices: Tensor, io_backend: str
) -> None:
    """Rows of all layers from slots of the device's pool to slots of the host pool `self`."""
    device, host = _pools(self, device_pool)
    hal.kv_transfer(device, host, device_indices, host_indices)


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


def _pools(host: Any, device: Any) -> tuple[KVPool, KVPool]:
    """(the device's, the host's)."""
    found: tuple[KVPool, KVPool] | None = getattr(host, "_hal_pools", None)
    if found is not None:
        return found
    if host.layout not in LAYOUTS:
        raise limits.refusal([f"a host pool of the layout {host.layout}"])
    options: dict[str, Any] = {"layout": host.layout, "page_size": host.page_size}

    def of(name: str) -> Any:
        # The host's own lists of the device's buffers are later than 0.5.17.
        return getattr(host, f"device_{name}s", None) or getattr(device, name)

    if hasattr(host, "k_buffer"):
        found = KVPool(of("k_buffer"), of("v_buffer")), KVPool(host.k_buffer, host.v_buffer, **options)
    else:
        found = KVPool(of("kv_buffer")), KVPool(host.kv_buffer, **options)
    host._hal_pools = found
    return found
