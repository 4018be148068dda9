"""What the launchers share."""

from __future__ import annotations

import torch
from torch import Tensor

from hal._errors import ArgumentError
from hal.backends.cpu._bits import HALF
from hal.kv.view import strides

FORMAT = {
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: HALF,
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
"""dtype -> the format of a kernel's pointer."""
SAME, E4M3, E5M2 = 0, 1, 2
KIND = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
"""dtype of a cache -> what a kernel converts to; any other dtype is that of the rows, `SAME`."""
Place = tuple[int, int, int, int, int, float]


def need_cpu(op: str, *tensors: Tensor | None) -> None:
    """Raises where a tensor's address is not host memory: a kernel would crash on it."""
    for t in tensors:
        if t is not None and not t.is_cpu:
            raise ArgumentError(op, "backend", "CPU tensors, for backend 'cpu'", f"a tensor on {t.device}")


def number(scale: float | Tensor | None) -> float:
    return 1.0 if scale is None else float(scale)


def place(cache: Tensor, scale: float | Tensor | None, row_dims: int = 2) -> Place:
    """A cache as a kernel takes it: address, kind, page, token and head strides, scale."""
    page, token, head = strides(cache, row_dims)
    return (cache.data_ptr(), KIND.get(cache.dtype, SAME), page, token, head, number(scale))
