"""The notation of the error texts, read back: ``q=bf16[64,32,128]@cuda:0``, and a call of a few such arguments."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hal._env import did_you_mean
from hal._errors import ArgumentError
from hal.ops.spec import SHORT, OpSpec, PoolArg, PoolSig, ScaleArg, Signature, TensorArg, TensorSig, ValueArg

_TENSOR = re.compile(r"(\w+)\[([\d,\s]*)\]@([a-z]+)(?::(\d+))?")
_POOL = re.compile(r"KVPool\((\w+),(\w+)\[([\dx]+)\]@([a-z]+)(?::\d+)?\)")
_LONG = {name: dtype for dtype, name in SHORT.items()} | {str(d).removeprefix("torch."): d for d in SHORT}
NOTATION = "NAME=DTYPE[SIZES]@DEVICE such as q=bf16[64,32,128]@cpu, or NAME=VALUE such as interleaved=True"


def parse_argument(op: str, text: str) -> tuple[str, Any]:
    """One argument as (name, `TensorSig`, `PoolSig` or plain value).

    Raises:
        ArgumentError: it can't be read.
    """
    name, equals, value = (p.strip() for p in text.partition("="))
    if not equals or not name.isidentifier():
        raise ArgumentError(op, text, NOTATION, repr(text))
    tensor, pool = _TENSOR.fullmatch(value), _POOL.fullmatch(value)
    if tensor:
        sizes = tuple(int(n) for n in tensor[2].split(",") if n.strip())
        dtype = _dtype(op, name, tensor[1])
        return name, TensorSig(
            dtype, tensor[3], sizes, "contiguous", True, int(tensor[4]) if tensor[4] else None, sizes
        )
    if pool:
        row = tuple(int(n) for n in pool[3].split("x"))
        dtype = _dtype(op, name, pool[2])
        return name, PoolSig(
            pool[1], pool[4], dtype, 1, row, None if math.prod(row) == row[-1] else row, 1, False, pool[4] == "cpu"
        )
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        if re.fullmatch(r"\w+", value):
            return name, value
        raise ArgumentError(op, name, NOTATION, repr(value)) from None


def _dtype(op: str, name: str, text: str) -> torch.dtype:
    if text not in _LONG:
        raise ArgumentError(op, name, f"a dtype: {', '.join(SHORT.values())}", repr(text) + did_you_mean(text, _LONG))
    return _LONG[text]


def example_signature(spec: OpSpec, given: Mapping[str, Any]) -> Signature:
    """A `Signature` from a few arguments in the notation of the error texts.

    The rest is as in the op's plainest example, in the sizes, dtype and device of those that are given.

    Args:
        given: name -> `TensorSig`, `PoolSig`, or a plain value.

    Raises:
        ArgumentError: an argument that the op has not, or that its contract rules out.
    """
    sig = spec.sign(spec.make())
    known = dict(sig)
    dims = dict(sig.dims)
    set_by: dict[str, str] = {}
    device, index = "cpu", None
    for name, value in given.items():
        if name not in spec.args:
            near = did_you_mean(name, spec.args)
            raise ArgumentError(spec.name, name, f"one of {', '.join(spec.args)}", f"no such argument{near}")
        known[name] = _parse_value(spec, name, value)
        if isinstance(value, TensorSig):
            for d, size in _sizes(spec, name, value).items():
                if dims.get(d) != size and d in set_by:
                    raise ArgumentError(spec.name, name, f"{d} = {dims[d]}, as in {set_by[d]}", str(value))
                dims[d] = size
                set_by[d] = name
        if isinstance(value, TensorSig | PoolSig) and value.device != "cpu":
            device, index = value.device, getattr(value, "index", None)
    dtype = next((v.dtype for v in given.values() if isinstance(v, TensorSig)), None)
    for name, value in known.items():
        if name not in given and isinstance(value, TensorSig):
            known[name] = _like(spec, name, value, dims, dtype, device, index)
    return Signature(spec.name, known, device, index, {d: n for d, n in dims.items() if d in spec.static})


def _parse_value(spec: OpSpec, name: str, value: Any) -> Any:
    """One argument as selection sees it."""
    arg = spec.args[name]
    if isinstance(arg, TensorArg):
        if value is None and arg.optional:
            return None
        if not isinstance(value, TensorSig):
            raise ArgumentError(spec.name, name, f"a tensor such as bf16[{arg.dims.split('|')[0]}]", repr(value))
        dtypes = arg.dtypes if not isinstance(arg.dtypes, str) else spec.args[arg.dtypes].dtypes  # type: ignore[union-attr]
        if value.dtype not in dtypes:
            expected = " or ".join(SHORT[d] for d in dtypes if isinstance(d, torch.dtype))
            raise ArgumentError(spec.name, name, f"dtype {expected}", str(value))
        shape = tuple(
            n if d in spec.static else None for d, n in zip(_sizes(spec, name, value), value.example, strict=True)
        )
        return replace(value, shape=shape)
    if isinstance(arg, PoolArg) != isinstance(value, PoolSig) or isinstance(value, TensorSig):
        expected = "KVPool(LAYOUT,DTYPE[HxD]@DEVICE)" if isinstance(arg, PoolArg) else "a plain value"
        raise ArgumentError(spec.name, name, expected, str(value))
    if isinstance(arg, ScaleArg):
        return None if value is None else "float"
    if isinstance(arg, ValueArg) and arg.choices and value not in arg.choices:
        raise ArgumentError(spec.name, name, "one of " + ", ".join(map(repr, arg.choices)), repr(value))
    if isinstance(arg, ValueArg) and not arg.choices and value is not None:
        return "off" if arg.off is not None and value == arg.off else "given"
    return value


def _sizes(spec: OpSpec, name: str, value: TensorSig) -> dict[str, int]:
    arg = spec.args[name]
    assert isinstance(arg, TensorArg)
    names = spec.dims_of(arg, value.ndim)
    if not names:
        raise ArgumentError(spec.name, name, " or ".join(f"[{a.strip()}]" for a in arg.dims.split("|")), str(value))
    return dict(zip(names, value.example, strict=True))


def _like(
    spec: OpSpec,
    name: str,
    value: TensorSig,
    dims: Mapping[str, int],
    dtype: torch.dtype | None,
    device: str,
    index: int | None,
) -> TensorSig:
    """An argument of the plain example, in the sizes, dtype and device of those that were given."""
    names = spec.dims_of(spec.args[name], value.ndim)
    example = tuple(dims.get(d, n) for d, n in zip(names, value.example, strict=True))
    shape = tuple(n if d in spec.static else None for d, n in zip(names, example, strict=True))
    follow = dtype is not None and dtype.is_floating_point and value.dtype == torch.bfloat16
    like = dtype if follow and dtype is not None else value.dtype
    return replace(value, dtype=like, device=device, shape=shape, index=index, example=example)
