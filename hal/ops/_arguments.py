"""How an op declares its arguments, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INDEX = (torch.int32, torch.int64)

ROWS = ("head_dim", "v_head_dim", "rope_dim", "lora_dim")
"""Dims that are a row's elements: no kernel knows rows of none."""

SHORT: dict[torch.dtype, str] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "bool",
}
"""The names of dtypes in error texts and on the command line."""


@dataclass(frozen=True)
class TensorArg:
    """A tensor argument.

    Args:
        dims: dim names, e.g. ``"n q_heads head_dim"``; several alternatives are separated by ``|``.
            A name is one size across all arguments.
        dtypes: those allowed; or the name of another argument whose dtype this one must have.
        stride: ``contiguous``; ``inner`` (last dim contiguous, the rest free); ``any``.
        optional: None is allowed.
        mutated: the op writes to it.
    """

    dims: str
    dtypes: tuple[torch.dtype, ...] | str
    stride: str = "contiguous"
    optional: bool = False
    mutated: bool = False

    @cached_property
    def alternatives(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(a.split()) for a in self.dims.split("|"))


@dataclass(frozen=True)
class PoolArg:
    """A `KVPool` argument."""

    mutated: bool = False


@dataclass(frozen=True)
class ScaleArg:
    """A float, or a one-element float32 tensor on the call's device, or None."""


@dataclass(frozen=True)
class ValueArg:
    """A plain value. `choices` lists those allowed; without, the op's own check looks at it, and all that selection
    may know of it is whether it is None, or `off`, a value that asks for nothing."""

    choices: tuple[Any, ...] = ()
    off: int | float | None = None


Arg = TensorArg | PoolArg | ScaleArg | ValueArg


def of_indices(arg: TensorArg) -> bool:
    """Whether it is a tensor of indices alone."""
    return not isinstance(arg.dtypes, str) and set(arg.dtypes) <= set(INDEX)


def dims_of(arg: Arg, ndim: int) -> tuple[str, ...]:
    """The names of its dims where it has so many; none: that is no rank of its own."""
    if not isinstance(arg, TensorArg):
        return ()
    return next((a for a in arg.alternatives if len(a) == ndim), ())


def describe(t: Tensor) -> str:
    """``bf16[64,32,128]@cpu``, with the strides where they are not the plain ones."""
    text = f"{SHORT.get(t.dtype, str(t.dtype))}[{','.join(map(str, t.shape))}]@{t.device}"
    return text if t.is_contiguous() else f"{text} strides {tuple(t.stride())}"
