"""The rules on a call's arguments that follow from their declaration, and what the ops' own checks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hal import _memory
from hal._errors import ArgumentError
from hal.kv.pool import KVPool
from hal.ops._arguments import FP8, ROWS, SHORT, Arg, PoolArg, ScaleArg, TensorArg, ValueArg, describe, dims_of
from hal.ops._signature import Signature, is_scale, place_name, stride_class, tensors_of

if TYPE_CHECKING:
    from hal.ops.spec import OpSpec, Signature


def check_call(spec: OpSpec, values: Mapping[str, Any]) -> Signature:
    """`OpSpec.check_call`."""
    dims: dict[str, tuple[int, str]] = {}
    if torch._C._is_tracing():
        raise ArgumentError(
            spec.name,
            next(iter(spec.args)),
            "a call outside of torch.jit.trace, which records nothing of what an op does (hal.torch_ops has ops "
            "for torch.compile and torch.export)",
            "a call that is being traced",
        )
    for name, arg in spec.args.items():
        for t in tensors_of(values[name]):
            _check_memory(spec.name, name, t)
        _check_one(spec.name, name, arg, values, dims)
    sig = spec.sign(values)
    if not any(isinstance(a, PoolArg) for a in spec.args.values()):
        for name, arg in spec.args.items():
            v = values[name]
            if isinstance(v, Tensor) and isinstance(arg, TensorArg | ScaleArg) and v.device.type != sig.device:
                raise ArgumentError(
                    spec.name,
                    name,
                    f"a tensor on {place_name((sig.device, sig.index))}, the call's device",
                    f"one on {v.device}",
                )
    for d in ROWS:
        size, name = dims.get(d, (1, ""))
        if not size:
            raise ArgumentError(spec.name, name, f"rows of at least one element ({d})", describe(values[name]))
    if spec.check is not None:
        spec.check(values, {d: size for d, (size, _) in dims.items()})
    if spec.check_sizes is not None:
        spec.check_sizes(*values.values())
    return sig


def _check_memory(op: str, name: str, t: Tensor) -> None:
    why = _memory.flaw(t)
    if why is not None:
        raise ArgumentError(op, name, "a dense tensor whose values are in memory", why)
    check_untracked(op, name, t)


def check_untracked(op: str, name: str, t: Tensor) -> None:
    """`OpSpec.check_untracked`."""
    why = _memory.tracked(t)
    if why is not None:
        raise ArgumentError(
            op,
            name,
            "no gradient to track, since ops have no backward (torch.no_grad(), "
            "torch.inference_mode(), or detach() it)",
            why,
        )


def _check_one(op: str, name: str, arg: Arg, values: Mapping[str, Any], dims: dict[str, tuple[int, str]]) -> None:
    value = values[name]

    def bad(expected: str, got: str) -> ArgumentError:
        return ArgumentError(op, name, expected, got)

    if isinstance(arg, PoolArg):
        if not isinstance(value, KVPool):
            raise bad("a hal.KVPool", type_name(value))
    elif isinstance(arg, ScaleArg):
        if isinstance(value, Tensor):
            if value.dtype != torch.float32 or value.numel() != 1:
                raise bad("a float or a one-element float32 tensor", describe(value))
        elif value is not None and not is_scale(value):
            raise bad("a float, a one-element float32 tensor, or None", type_name(value))
    elif isinstance(arg, ValueArg):
        if arg.choices and not any(value is c or (type(value) is type(c) and value == c) for c in arg.choices):
            raise bad("one of " + ", ".join(map(repr, arg.choices)), repr(value))
    elif value is None:
        if not arg.optional:
            raise bad("a tensor", "None")
    elif not isinstance(value, Tensor):
        raise bad("a tensor", type_name(value))
    else:
        _check_tensor(op, name, arg, value, values, dims)


def _check_tensor(
    op: str, name: str, arg: TensorArg, t: Tensor, values: Mapping[str, Any], dims: dict[str, tuple[int, str]]
) -> None:
    def bad(expected: str, got: str) -> ArgumentError:
        return ArgumentError(op, name, expected, got)

    if isinstance(arg.dtypes, str):
        like = values[arg.dtypes]
        if isinstance(like, Tensor) and t.dtype != like.dtype:
            raise bad(f"{SHORT.get(like.dtype, like.dtype)}, the dtype of {arg.dtypes}", describe(t))
    elif t.dtype not in arg.dtypes:
        raise bad("dtype " + " or ".join(SHORT[d] for d in arg.dtypes), describe(t))
    names = dims_of(arg, t.ndim)
    if not names:
        want = " or ".join("[" + ", ".join(a) + "]" for a in arg.alternatives)
        raise bad(want, describe(t))
    for i, (d, size) in enumerate(zip(names, t.shape, strict=True)):
        known = dims.setdefault(d, (size, name))
        if known[0] != size:
            raise bad(f"[{', '.join(names)}] with {d} = {known[0]}, as in {known[1]}", f"{describe(t)} (dim {i})")
    if arg.stride == "contiguous" and not t.is_contiguous():
        raise bad("a contiguous tensor (hal never copies one for you)", describe(t))
    if arg.stride == "inner" and not t.is_contiguous() and "strided" in stride_class(t):
        raise bad("a contiguous last dim", describe(t))
    if arg.mutated and not t.is_contiguous() and "overlapping" in stride_class(t):
        raise bad("no two elements in one place, since the op writes here", describe(t))


def type_name(value: Any) -> str:
    """A value in an error text."""
    return "None" if value is None else f"{type(value).__name__} {_memory.show(value):.60}"


def check_range(op: str, name: str, index: Tensor, low: int, high: int) -> None:
    """Raises where a value of `index` is outside [low, high]. Syncs."""
    bad = ((index < low) | (index > high)).nonzero()
    if bad.numel():
        i = int(bad[0, 0])
        raise ArgumentError(op, name, f"values in [{low}, {high}]", f"{int(index[i])} at index {i}")


def check_cache(op: str, a: Mapping[str, Any], cache: str, like: str, scale: str, may_be_zero: bool = False) -> None:
    """The rules on a cache and its scale, by the arguments' names: fp8, or the dtype of `like` and no scale."""
    source, found, by = a[like], a[cache], a[scale]
    if found is not None and found.dtype not in (source.dtype, *FP8):
        expected = f"{SHORT[source.dtype]} ({like}'s dtype) or an fp8 dtype"
        raise ArgumentError(op, cache, expected, describe(found))
    if by is not None and (found is None or found.dtype not in FP8):
        raise ArgumentError(op, scale, f"None, since {cache} is not fp8", str(by))
    if isinstance(by, int | float) and not by and not may_be_zero:
        raise ArgumentError(op, scale, "a scale that is not 0", str(by))
