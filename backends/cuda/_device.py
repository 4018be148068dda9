# mypy: disable-error-code="untyped-decorator"
"""What the launchers of this backend ask about a device, once each."""

from __future__ import annotations

from functools import cache

import torch
import triton

from hal.triton import launch


@triton.constexpr_function
def next_power_of_2(n: int) -> int:
    """The least power of 2 that is at least `n`. Triton's own is no function for kernels any more once SGLang is
    imported, which puts a plain one in its place."""
    return 1 << max(0, n - 1).bit_length()


@cache
def pdl(device: int) -> bool:
    """Whether kernels there are launched programmatically (Hopper and later), so that their start overlaps
    the end of the kernel before. Such a kernel waits (`gdc_wait`) before its first read."""
    return device >= 0 and launch.lane() == "device" and torch.cuda.get_device_capability(device) >= (9, 0)


target = 90
"""The compute capability that launches are recorded for (`hal inspect`)."""


def arch(device: int) -> int:
    """Compute capability, 10 times the major version; without a device `target`."""
    return target if device < 0 else _arch(device)


@cache
def _arch(device: int) -> int:
    return 10 * torch.cuda.get_device_capability(device)[0]


@cache
def multiprocessors(device: int) -> int:
    """Streaming multiprocessors of a device; 1 for the interpreter's."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else 1
