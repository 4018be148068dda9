"""What the launchers of this backend ask about a device, once each."""

from __future__ import annotations

from functools import cache

import torch

from hal import launch


@cache
def pdl(device: int) -> bool:
    """Whether kernels there are launched programmatically (Hopper and later), so that their start overlaps
    the end of the kernel before. Such a kernel waits (`gdc_wait`) before its first read."""
    return device >= 0 and launch.lane() == "device" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def multiprocessors(device: int) -> int:
    """Streaming multiprocessors of a device; 1 for the interpreter's."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else 1
