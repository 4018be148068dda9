"""Float casts of Triton's interpreter, made right.

Triton 3.6's interpreter truncates fp32 -> bf16 and lets fp8 overflow to garbage, so that a kernel which
is right on the device looks wrong there, and the other way about. Here every float cast is torch's:
round to nearest even. Casts to fp8 saturate, as the device's ``cvt.rn.satfinite`` does, infinities too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_TORCH = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
"""The float types by Triton's names. Others (fp8e4b15, ...) keep Triton's own conversion."""

_BITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def convert(data: Any, src: torch.dtype, dst: torch.dtype) -> Any:
    """`data`, an array holding the bits of `src` values, as an array of unsigned bits of `dst` values."""
    bits = np.ascontiguousarray(data).view(_BITS[src.itemsize])
    value = torch.from_numpy(bits.copy().reshape(-1)).view(src)
    if dst.itemsize == 1 and src != dst:
        limit = torch.finfo(dst).max
        value = value.to(torch.float64 if src == torch.float64 else torch.float32).clamp(-limit, limit)
    return value.to(dst).view(torch.uint8).numpy().view(_BITS[dst.itemsize]).reshape(bits.shape)


def install() -> None:
    """Patch the interpreter of this process. Twice is once."""
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    if getattr(builder, "_hal_casts", False):
        return
    old_cast, old_fp_to_fp = builder.cast_impl, builder.create_fp_to_fp

    def torch_types(src: Any, dst_type: Any) -> tuple[torch.dtype, torch.dtype] | None:
        s, d = _TORCH.get(str(src.dtype.scalar)), _TORCH.get(str(dst_type.scalar))
        return None if s is None or d is None else (s, d)

    def handle(src: Any, dst_type: Any, types: tuple[torch.dtype, torch.dtype]) -> Any:
        bits = convert(src.data, *types)
        return interpreter.TensorHandle(bits.view(interpreter._get_np_dtype(dst_type)), dst_type.scalar)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        types = torch_types(src, dst_type)
        return old_cast(self, src, dst_type) if types is None else handle(src, dst_type, types)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        types = torch_types(src, dst_type)
        if types is None or rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ:
            return old_fp_to_fp(self, src, dst_type, rounding_mode)
        return handle(src, dst_type, types)

    old_dot = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        # Triton's own multiplies the bits of bf16 numbers.
        a, b = (cast_impl(self, x, interpreter.tl.float32) if x.dtype.scalar.is_bf16() else x for x in (a, b))
        return old_dot(self, a, b, d, *options)

    builder.create_dot = create_dot
    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = create_fp_to_fp
    builder._hal_casts = True
