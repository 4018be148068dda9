"""FlashInfer's wrappers: one of each kind for a device and a stream, held by one call at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import torch

from hal.triton import launch

WORKSPACE = 128 << 20
"""Bytes of scratch a wrapper, as FlashInfer's documentation advises; more where its plan would ask for more."""

REQUESTS = 32768
"""What BatchPrefillWithPagedKVCacheWrapper keeps lengths for."""

_wrappers: dict[tuple[object, ...], tuple[Any, int]] = {}
_locks: dict[tuple[object, ...], Lock] = {}


@cache
def hopper(device: torch.device) -> bool:
    """FlashInfer's kernels of FlashAttention-3 are for compute capability 9.0 alone; the others run anywhere."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _scratch(device: torch.device, group: int, dim: int) -> int:
    """What a plan with split keys may ask for: fp32 results of 128 rows a head of a group, two blocks an SM."""
    if device.type != "cuda":
        return WORKSPACE
    blocks = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return max(WORKSPACE, group * blocks * 128 * (dim + 1) * 4 + 4096)


@contextmanager
def held(kind: str, device: torch.device, group: int, dim: int, **options: Any) -> Iterator[Any]:
    """The wrapper ``flashinfer.<kind>``, made with `options`, while nobody else has it.

    A plan is copied from host memory that belongs to the wrapper, and the next overwrites it: whoever holds the
    wrapper must let its stream come to rest before it plans, as reading lengths on the host does.
    """
    import flashinfer

    stream = launch._stream(device.index) if device.type == "cuda" else 0
    key = (kind, device, stream, *options.values())
    with _locks.setdefault(key, Lock()):
        wrapper, has = _wrappers.get(key, (None, 0))
        needs = _scratch(device, group, dim)
        if has < needs:
            scratch = torch.zeros(needs, dtype=torch.uint8, device=device)
            wrapper = getattr(flashinfer, kind)(scratch, "NHD", **options)
            _wrappers[key] = (wrapper, needs)
        yield wrapper
