# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""What the two attention kernels share: rows of a paged cache as tiles, and one step of the running softmax.

Logits are kept in units of log 2, so that the exponential is the hardware's own exp2.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor, float8_e4m3fn

from hal.backends.cuda._device import next_power_of_2
from hal.triton import launch
from hal.triton.plans import RESULT, Result, Size, length

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
BRIEF = 1 << 27
"""Bytes of keys and values that a device takes less time for, some 40 us, than the host for all else of a layer."""


@triton.jit
def factor(scale, KIND: tl.constexpr):
    """A scale as an fp32 number; 1 for None."""
    if KIND == 1:
        return scale
    if KIND == 2:
        return tl.load(scale)
    return 1.0


@triton.jit
def within(x, size):
    """x clamped to [0, size], as int32; `size` is below 2^31. What has 32 bits is compared in 32."""
    if x.dtype.primitive_bitwidth == 32:
        return tl.minimum(tl.maximum(x, 0), size.to(tl.int32))
    else:
        return tl.minimum(tl.maximum(x, 0), size).to(tl.int32)


@triton.jit
def entry(indptr, i, size):
    """indptr[i] clamped to [0, size], as int32."""
    return within(tl.load(indptr + i), size)


@triton.jit
def lengths(indptr, i, mask, size):
    """How long each request is, int32; 0 where not `mask`."""
    a = within(tl.load(indptr + i, mask, other=0), size)
    b = within(tl.load(indptr + i + 1, mask, other=0), size)
    return tl.maximum(b - a, 0)


@triton.jit
def place(slot, page_stride, token_stride, PAGE: tl.constexpr):
    """Where the rows of int64 slots begin, in elements."""
    if PAGE == 1:
        return slot * page_stride
    return (slot // PAGE) * page_stride + (slot % PAGE) * token_stride


@triton.jit
def tile(base, row, ok, START: tl.constexpr, SIZE: tl.constexpr, LIMIT: tl.constexpr):
    """``[rows, SIZE]`` from element START of each row on; zeros where not `ok`, and from LIMIT on."""
    d = START + tl.arange(0, SIZE)[None, :]
    mask = ok[:, None]
    if START + SIZE > LIMIT:
        mask = mask & (d < LIMIT)
    return tl.load(base + row[:, None] + d, mask, other=0.0)


@triton.jit
def tanh(x):
    """Right to a few units in the last place *of the result*, near 0 too: there e^2x - 1 would cancel."""
    y = x * x
    small = x * (1.0 + y * (-0.33333333 + y * (0.13333333 + y * (-0.053968254 + y * 0.021869488))))
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    large = (1.0 - e) / (1.0 + e)
    return tl.where(y < 0.04, small, tl.where(x < 0, -large, large))


@triton.jit
def logits(q0, q1, k0, k1, factor, cap, CAP: tl.constexpr, REST: tl.constexpr):
    """q k^T times `factor`, capped, in units of log 2."""
    s = tl.dot(q0, tl.trans(k0), input_precision="ieee")
    if REST:
        s = tl.dot(q1, tl.trans(k1), s, input_precision="ieee")
    if CAP:
        return cap * LOG2E * tanh(s * (factor / cap))
    return s * (factor * LOG2E)


@triton.jit
def step(acc, top, total, s, v, SHIFT: tl.constexpr = 0):
    """The running softmax over one more tile of keys. A row that has seen nothing keeps top = -inf. Weights, their
    `total` and `acc` are 2^SHIFT of what they are elsewhere."""
    new = tl.maximum(top, tl.max(s, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - (base - SHIFT)[:, None])
    keep = tl.exp2(top - base)
    total = total * keep + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return acc, new, total


@triton.jit
def magnitude(x):
    """Absolute values as fp32, 0 for what is not finite."""
    x = tl.abs(x.to(tl.float32))
    return tl.where(x < float("inf"), x, 0.0)


@triton.jit
def exponent(most):
    """e in [1, 253] of the power of two 2^(e - 127) by which `most`, an fp32 magnitude, is about 2^15: fp16's range."""
    return tl.minimum(tl.maximum(268 - (most.to(tl.int32, bitcast=True) >> 23), 1), 253)


@triton.jit
def power(e):
    """2^(e - 127)."""
    return (e << 23).to(tl.float32, bitcast=True)


@triton.jit
def without(factor, e):
    """`factor` over 2^(e - 127); finite where it was, times log 2 e too, so that 0 times it is 0."""
    x = factor * power(254 - e)
    return tl.where(tl.abs(factor) < float("inf"), tl.minimum(tl.maximum(x, -(2.0**127)), 2.0**127), x)


@triton.jit
def positive(factor):
    """A factor of logits as one above 0, by which the greatest product is the greatest logit; 0 as good as."""
    return tl.maximum(factor, 1e-30)


@triton.jit
def settled(x):
    """`x`, waited for. On Hopper a product left running over a loop's end makes ptxas run all products one by one."""
    return tl.inline_asm_elementwise("", "=f,0", [x], dtype=tl.float32, is_pure=True, pack=1)


# --- the host's side --------------------------------------------------------------------------------


def parts(dim: int) -> tuple[int, int]:
    """A head's elements as a power of two and the rest, padded to one; each at least 16, or 0 for no rest."""
    first = max(16, 1 << (dim.bit_length() - 1))
    rest = dim - first
    return first, 0 if rest <= 0 else max(16, next_power_of_2(rest))


def result(q: Tensor, v_cache: Tensor, out: Tensor | None) -> tuple[str | Result, str, tuple[int, int]]:
    """What the ops return, what it is called as a kernel's argument, and its strides: `out`, or a new tensor."""
    if out is not None:
        return "out", "out", (out.stride(0), out.stride(1))
    return Result("q", v_cache.shape[-1]), RESULT, (q.shape[1] * v_cache.shape[-1], v_cache.shape[-1])


def aligned(*tensors: Tensor | None) -> bool:
    """Whether all begin on a multiple of 16 bytes; a new tensor does."""
    return not any(t.data_ptr() & 15 for t in tensors if t is not None)


def shared(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether v is the first elements of k (MLA), and a power of two, so that one tile serves as both."""
    return (
        k_cache.data_ptr() == v_cache.data_ptr()
        and k_cache.stride() == v_cache.stride()
        and parts(k_cache.shape[-1])[0] == v_cache.shape[-1]
    )


def brief(k_cache: Tensor, v_cache: Tensor) -> Size:
    """Above 0 where a call reads no more than `BRIEF`: its launches are begun at once, which the host waits for."""
    halves = (k_cache,) if shared(k_cache, v_cache) else (k_cache, v_cache)
    row = sum(half.shape[-2] * half.shape[-1] * half.itemsize for half in halves)
    return length("kv_indices").times(row).at_least(1).within(BRIEF)


def unsupported(sig: Any) -> str | None:
    """Limits that both ops have."""
    e4m3 = sig["k_cache"].dtype == float8_e4m3fn
    if e4m3 and sig.device == "cuda" and launch.lane() == "device":
        import torch

        if torch.cuda.get_device_capability(sig.index) < (8, 9):
            return "fp8: e4m3 needs compute capability 8.9"
    heads = max(sig.dims["head_dim"], sig.dims["v_head_dim"])
    return None if heads <= 576 else f"head_dim: {heads} is more than 576"
