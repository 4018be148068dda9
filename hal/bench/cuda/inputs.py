"""What the tables' inputs are made of, on `DEVICE`. What is timed reads many sets of them, in turn."""

from __future__ import annotations

import math

import torch
from torch import Tensor

DEVICE = "cuda"
POOL = 1 << 30
"""Bytes of a KV pool: many times a GPU's L2."""
POSITIONS = 32768
"""Rows of a cos_sin_cache."""
TABLE = (4096, 8192)
"""Rows and columns of req_to_token."""
Runs = tuple[tuple[int, int], ...]
"""(requests, keys of each), one run behind the other."""
Keys = int | Runs
"""Of each request."""


def requests(runs: Runs) -> int:
    """How many there are."""
    return sum(many for many, _ in runs)


def lens_of(bs: int, keys: Keys) -> list[int]:
    """The keys of each request."""
    return [keys] * bs if isinstance(keys, int) else [n for many, n in keys for _ in range(many)]


def told(keys: Keys) -> int | str:
    """What a row says of them."""
    return keys if isinstance(keys, int) else ", ".join(f"{many} x {n}" for many, n in keys)


def count_sets(nbytes: int) -> int:
    """So many sets of inputs of that size that they are not read from the L2."""
    return max(3, min(16, (256 << 20) // max(1, nbytes)))


def randn(*shape: int) -> Tensor:
    """bf16, normal."""
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(torch.bfloat16)


def integers(low: int, high: int, n: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """`n` of them in ``[low, high)``."""
    return torch.randint(low, high, (n,), device=DEVICE, dtype=dtype)


def slots(n: int, pool: int) -> Tensor:
    """`n` different ones of a pool's, in random order."""
    return torch.randperm(pool, device=DEVICE, dtype=torch.int64)[:n]


def req_to_token() -> Tensor:
    return torch.randint(0, 1 << 20, TABLE, dtype=torch.int32, device=DEVICE)


def cache(row: tuple[int, ...], dtype: torch.dtype, share: int) -> Tensor:
    """A cache of rows: as many as a `share`-th of the pool holds in bf16."""
    size = 2 * share * math.prod(row)
    return torch.zeros(max(64, POOL // size), *row, dtype=torch.bfloat16, device=DEVICE).to(dtype)


def cos_sin(dim: int) -> Tensor:
    angle = torch.rand(POSITIONS, dim // 2, device=DEVICE, dtype=torch.float32) * 6.3
    return torch.cat([angle.cos(), angle.sin()], dim=-1)
