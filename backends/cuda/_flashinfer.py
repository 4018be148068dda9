"""What the adapters of FlashInfer share: what they refuse, its wrappers (one of each kind for a device and a stream,
held by one call at a time), and a cache as pages of one slot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from hal.triton import launch

WORKSPACE = 128 << 20
"""Bytes of scratch a wrapper, as FlashInfer's documentation advises; more where its plan would ask for more."""

REQUESTS = 32768
"""What BatchPrefillWithPagedKVCacheWrapper keeps lengths for."""

HALVES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)

_wrappers: dict[tuple[object, ...], tuple[Any, int]] = {}
_locks: dict[tuple[object, ...], Lock] = {}


@cache
def hopper(device: torch.device) -> bool:
    """FlashInfer's kernels of FlashAttention-3 are for compute capability 9.0 alone; the others run anywhere."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _scratch(device: torch.device, group: int, dim: int) -> int:
    """What a plan with split keys may ask for: fp32 results of 128 rows a head of a group, two blocks an SM."""
    if device.type != "cuda":
        return WORKSPACE
    blocks = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return max(WORKSPACE, group * blocks * 128 * (dim + 1) * 4 + 4096)


@contextmanager
def hold(kind: str, device: torch.device, group: int, dim: int, **options: Any) -> Iterator[Any]:
    """The wrapper ``flashinfer.<kind>``, made with `options`, while nobody else has it.

    A plan is copied from host memory that belongs to the wrapper, and the next overwrites it: whoever holds the
    wrapper must let its stream come to rest before it plans, as reading lengths on the host does.
    """
    import flashinfer

    stream = launch._stream(device.index) if device.type == "cuda" else 0
    key = (kind, device, stream, *options.values())
    with _locks.setdefault(key, Lock()):
        wrapper, has = _wrappers.get(key, (None, 0))
        needs = _scratch(device, group, dim)
        if has < needs:
            scratch = torch.zeros(needs, dtype=torch.uint8, device=device)
            wrapper = getattr(flashinfer, kind)(scratch, "NHD", **options)
            _wrappers[key] = (wrapper, needs)
        yield wrapper


def unsupported(sig: Any) -> str | None:
    """FlashInfer's limits, and those of these adapters: they hand tensors on as they are, so strides that it
    only copes with by a copy are refused."""
    q, dims = sig["q"], sig.dims
    if q.dtype not in HALVES:
        return "adapter: FlashInfer takes fp16 and bf16"
    if sig["k_cache"].dtype != q.dtype:
        return "adapter: fp8 caches are not handed on"
    if sig["logit_cap"] != "off":
        return "adapter: FlashInfer caps logits by tanh.approx, which is within 2^-11"
    if dims["head_dim"] not in HEAD_DIMS or dims["v_head_dim"] != dims["head_dim"]:
        shown = ", ".join(map(str, HEAD_DIMS))
        return f"adapter: FlashInfer has heads of {shown} elements, k's and v's alike"
    for name in ("q", "k_cache", "v_cache", "out"):
        given = sig[name]
        if given is not None and given.stride != "contiguous":
            return f"adapter: {name} must be contiguous"
        if given is not None and not given.aligned:
            return f"adapter: {name} must start on a 16-byte boundary"
    return None


def as_pages(cache: Tensor) -> Tensor:
    """``[slots, 1, kv_heads, head_dim]``: every slot a page, whatever pages the cache has."""
    return cache.view(-1, 1, *cache.shape[-2:])


def clear_empty(out: Tensor, lse: Tensor | None, keys: Tensor) -> None:
    """Zeros, and a log-sum-exp of -inf, for queries without a key: what FlashInfer leaves there is not documented."""
    none = keys == 0
    out.masked_fill_(none.view(-1, 1, 1), 0.0)
    if lse is not None:
        lse.masked_fill_(none.view(-1, 1), -torch.inf)


def copy_owned(owned: Tensor | None, out: Tensor, lse: Tensor | None, found: Tensor, sums: Tensor | None) -> None:
    """The results into `out` and `lse`, but for rows that are not `owned`, which stay as they were."""
    for to, new in ((out, found), (lse, sums)):
        if to is not None and new is not None and to is not new:
            to.copy_(new if owned is None else torch.where(owned.view(-1, *[1] * (to.ndim - 1)), new, to))
