"""What selection may know of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hal import _memory
from hal._errors import ArgumentError
from hal.kv.pool import KVPool
from hal.ops._arguments import SHORT, Arg, PoolArg, ScaleArg, TensorArg, ValueArg, dims_of, of_indices


@dataclass(frozen=True)
class TensorSig:
    """What selection sees of a tensor. ``shape`` has None for every dim that is not static."""

    dtype: torch.dtype
    device: str
    shape: tuple[int | None, ...]
    stride: str
    """``contiguous``; ``inner`` (last dim contiguous); ``overlapping`` (so too, and several elements may lie in one
    place, as where it is expanded); ``strided``; ``strided overlapping``."""
    aligned: bool
    """The data start on a 16-byte boundary. Of index tensors nobody may ask that: False."""
    index: int | None = None
    example: tuple[int, ...] = field(default=(), compare=False)
    """The sizes of the call that was shown, for error texts alone: `supports` must not read them."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __str__(self) -> str:
        where = self.device if self.index is None else f"{self.device}:{self.index}"
        return f"{SHORT.get(self.dtype, str(self.dtype))}[{','.join(map(str, self.example))}]@{where}"


@dataclass(frozen=True)
class PoolSig:
    """What selection sees of a `KVPool`."""

    layout: str
    device: str
    dtype: torch.dtype
    page_size: int
    row_shape: tuple[int, ...]
    v_row_shape: tuple[int, ...] | None
    num_layers: int
    list_of_layers: bool
    pinned: bool

    def __str__(self) -> str:
        row = "x".join(map(str, self.row_shape))
        return f"KVPool({self.layout},{SHORT.get(self.dtype, str(self.dtype))}[{row}]@{self.device})"


class Signature(Mapping[str, Any]):
    """A call as selection sees it: dtypes, device types, ranks, static dims, stride and alignment
    classes, keyword values. Never a batch size, a number of tokens or of slots.

    ``sig["q"]`` is a `TensorSig`, `PoolSig`, None, or a plain value. A scale is ``"float"`` or a
    `TensorSig` ``[1]``, and a value without listed choices, such as a range of layers, is ``"given"`` (or ``"off"``).
    ``sig.dims`` has the static dims by name. ``sig.device`` is the call's device type.
    """

    __slots__ = ("_args", "device", "dims", "index", "op")

    def __init__(self, op: str, args: Mapping[str, Any], device: str, index: int | None, dims: Mapping[str, int]):
        self.op = op
        self._args = dict(args)
        self.device = device
        self.index = index
        self.dims = dict(dims)

    def __getitem__(self, name: str) -> Any:
        return self._args[name]

    def __iter__(self) -> Any:
        return iter(self._args)

    def __len__(self) -> int:
        return len(self._args)

    def __str__(self) -> str:
        shown = [f"{n}={v}" for n, v in self._args.items() if isinstance(v, TensorSig | PoolSig)]
        return f"{self.op}({', '.join(shown)})"

    __repr__ = __str__


def sign(op: str, arguments: Mapping[str, Arg], static: frozenset[str], values: Mapping[str, Any]) -> Signature:
    """`OpSpec.sign`."""
    dims: dict[str, int] = {}
    sig: dict[str, Any] = {}
    accel: dict[tuple[str, int | None], str] = {}
    for name, arg in arguments.items():
        value = values[name]
        if isinstance(arg, PoolArg) and isinstance(value, KVPool):
            sig[name] = PoolSig(value.layout, value.device.type, *value.key[2:])
            found = value.device
        elif isinstance(value, Tensor):
            sig[name] = _tensor_sig(arg, static, value, dims)
            found = value.device
        else:
            sig[name] = value
            if value is not None and isinstance(arg, ScaleArg):
                sig[name] = "float"
            elif value is not None and isinstance(arg, ValueArg) and not arg.choices:
                # Of what is no number at all, == may say anything.
                asked = arg.off is None or type(value) not in (int, float) or value != arg.off
                sig[name] = "given" if asked else "off"
            continue
        if found.type != "cpu":
            accel.setdefault((found.type, found.index), name)
    if len(accel) > 1:
        (a, first), (b, second) = list(accel.items())[:2]
        raise ArgumentError(op, second, f"a tensor on {place_name(a)}, like {first}", f"one on {place_name(b)}")
    device, index = next(iter(accel), ("cpu", None))
    return Signature(op, sig, device, index, dims)


def _tensor_sig(arg: Arg, static: frozenset[str], t: Tensor, dims: dict[str, int]) -> TensorSig:
    if not isinstance(arg, TensorArg):
        return TensorSig(t.dtype, t.device.type, (1,), "contiguous", True, t.device.index, (1,))
    names = dims_of(arg, t.ndim)
    for d, size in zip(names, t.shape, strict=False):
        if d in static:
            dims.setdefault(d, size)
    shape = tuple(n if i < len(names) and names[i] in static else None for i, n in enumerate(t.shape))
    stride = "contiguous" if t.is_contiguous() else stride_class(t)
    aligned = not of_indices(arg) and not t.data_ptr() & 15
    return TensorSig(t.dtype, t.device.type, shape, stride, aligned, t.device.index, tuple(t.shape))


def stride_class(t: Tensor) -> str:
    """`TensorSig.stride` of a tensor that is not contiguous."""
    shape, strides = t.shape, t.stride()
    inner = shape and (strides[-1] == 1 or shape[-1] == 1)
    if _memory.overlaps(shape, strides):
        return "overlapping" if inner else "strided overlapping"
    return "inner" if inner else "strided"


def place_name(place: tuple[str, int | None]) -> str:
    """``cuda:0``, from a device's type and index."""
    return place[0] if place[1] is None else f"{place[0]}:{place[1]}"


def is_scale(value: Any) -> bool:
    """A float, whatever its value, or an int that is one."""
    return type(value) is float or isinstance(value, float) or _memory.finite(value)


def tensors_of(value: Any) -> tuple[Tensor, ...]:
    """The tensors of one argument."""
    if isinstance(value, KVPool):
        return value.tensors
    return (value,) if isinstance(value, Tensor) else ()
