"""torch's factories for host tensors: on the CPU and of a dtype of their own, whatever torch's defaults are.

Engines build models under ``torch.set_default_device`` and default dtypes of bf16; an allocation that names neither
follows them. What a kernel allocates names both itself; inputs, truths and plans on the host are made here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


def empty(*size: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    return torch.empty(*size, dtype=dtype, device=CPU, **options)


def zeros(*size: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    return torch.zeros(*size, dtype=dtype, device=CPU, **options)


def ones(*size: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*size, dtype=dtype, device=CPU)


def empty_strided(size: Any, stride: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=CPU)


def full(size: Any, value: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.full(size, value, dtype=dtype or _dtype(value), device=CPU)


def tensor(values: Any, dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(values, dtype=dtype or _dtype(values), device=CPU)


def arange(*ends: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.arange(*ends, dtype=dtype, device=CPU)


def rand(*size: Any, dtype: torch.dtype = torch.float32, generator: torch.Generator | None = None) -> Tensor:
    return torch.rand(*size, dtype=dtype, device=CPU, generator=generator)


def randn(*size: Any, dtype: torch.dtype = torch.float32, generator: torch.Generator | None = None) -> Tensor:
    return torch.randn(*size, dtype=dtype, device=CPU, generator=generator)


def randint(
    low: int, high: int, size: Any, dtype: torch.dtype = torch.int64, generator: torch.Generator | None = None
) -> Tensor:
    return torch.randint(low, high, size, dtype=dtype, device=CPU, generator=generator)


def randperm(n: int, dtype: torch.dtype = torch.int64, generator: torch.Generator | None = None) -> Tensor:
    return torch.randperm(n, dtype=dtype, device=CPU, generator=generator)


def _dtype(values: Any) -> torch.dtype:
    """bool, int64 or float32, by the numbers in (lists of) `values`: float32 where one of them is a float."""
    if isinstance(values, list | tuple):
        found = {_dtype(v) for v in values}
        order = (torch.float32, torch.int64, torch.bool)
        return next((d for d in order if d in found), torch.float32)
    return {bool: torch.bool, int: torch.int64}.get(type(values), torch.float32)
