"""What the kernels must know of an Ascend device, and what they assume where there is none.

The lowered lane has no device; it takes the smallest generation's numbers, so that what fits there fits
everywhere.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hal.kv.view import page_size

VECTOR_CORES = 40
"""Of an Ascend910B3. A launch has at most as many programs; each goes on to the next piece of work."""

TILE_BYTES = 16 * 1024
"""Of one tile in fp32. With it every kernel's buffers, those doubled by the compiler included, stay below 85 %
of the unified buffer at the largest shapes that `supports` lets through; `hal inspect ascend` measures it."""


@functools.lru_cache(maxsize=16)
def vector_cores(device: torch.device) -> int:
    """Programs that run at once on `device`."""
    if device.type != "npu":
        return VECTOR_CORES
    from triton.runtime import driver

    index = device.index if device.index is not None else torch.npu.current_device()
    return int(driver.active.utils.get_device_properties(index)["num_vectorcore"])


def current(device: torch.device) -> AbstractContextManager[Any]:
    """`device` as the current one: streams and batches of copies are that one's, whosever the tensors are."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def is_capturing(device: torch.device) -> bool:
    """Is a graph being captured on `device`'s current stream?"""
    if device.type == "cpu":
        return False
    with current(device):
        return bool(torch.get_device_module(device).is_current_stream_capturing())


def slots_on(slots: Tensor, device: torch.device) -> Tensor:
    """`slots` on `device`, in order with its stream. From pageable memory torch_npu would wait for the stream."""
    if slots.device == device:
        return slots
    return slots.contiguous().pin_memory().to(device, non_blocking=True)


def page_of(cache: Tensor) -> int:
    """Tokens of a page, at least 1: kernels divide by it, a compiler before they have asked whether there is a slot."""
    return max(1, page_size(cache))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def pow2(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()
