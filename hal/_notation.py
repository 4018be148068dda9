"""The notation of the error texts, read back: ``q=bf16[64,32,128]@cuda:0``."""

from __future__ import annotations

import ast
import math
import re
from typing import Any

import torch

from hal._env import did_you_mean
from hal._errors import ArgumentError
from hal.ops._spec import SHORT, PoolSig, TensorSig

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
            pool[1],
            pool[4],
            dtype,
            1,
            row,
            None if math.prod(row) == row[-1] else row,
            1,
            False,
            pool[4] == "cpu",
        )
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        if re.fullmatch(r"\w+", value):
            return name, value
        raise ArgumentError(op, name, NOTATION, repr(value)) from None


def _dtype(op: str, name: str, text: str) -> torch.dtype:
    if text not in _LONG:
        raise ArgumentError(
            op, name, f"a dtype: {', '.join(SHORT.values())}", repr(text) + did_you_mean(text, _LONG)
        )
    return _LONG[text]
