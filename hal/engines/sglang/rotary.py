"""SGLang's rotary embedding on hal, and the write of k and v with it where a model asks for both in one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.rotary_embedding import mrope, rope_variant, yarn  # noqa: F401  (classes that `_below` finds)
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.model_executor.forward_context import get_token_to_kv_pool
from torch import Tensor

import hal
from hal.engines._mrope import axes_of, rows_of_tokens
from hal.engines.sglang import limits, seams

SAME = ("forward", "forward_native")
"""A class that has these from its base rotates as `RotaryEmbedding` does, by a table that may be another."""


def register() -> None:
    """Gives every class that rotates by a table of cosines and sines hal's forward."""
    for cls in (RotaryEmbedding, *_below(RotaryEmbedding)):
        if _plain(cls):
            RotaryEmbedding.register_oot_forward(cls, forward, seams.KEY)


def check_instances(model: torch.nn.Module) -> None:
    """Raises:
    EngineError: a rotary embedding of the model is of a kind that hal's op does not do.
    """
    kinds = {type(m).__name__ for m in model.modules() if hasattr(m, "cos_sin_cache") and not _plain(type(m))}
    if kinds:
        raise limits.refusal([f"{', '.join(sorted(kinds))}, a rotary embedding that hal has not"])


def _below(cls: type) -> Iterator[type]:
    c: type
    for c in cls.__subclasses__():
        yield c
        yield from _below(c)


def _plain(cls: type) -> bool:
    # DeepSeek's says the same of its table in other words.
    if cls is rope_variant.DeepseekScalingRotaryEmbedding:
        return True
    return any(
        issubclass(cls, base) and all(getattr(cls, n) is getattr(base, n) for n in SAME)
        for base in (mrope.MRotaryEmbedding, RotaryEmbedding)
    )


def forward(
    self: Any,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[Tensor, Tensor]:
    """Rotates query and key in place, as SGLang's CUDA form does; `fused_set_kv_buffer_arg`: writes k and v too."""
    if offsets is not None:
        positions = positions + offsets
    table = self.cos_sin_cache
    if table.dtype not in (torch.float32, query.dtype) or table.device != query.device:
        self._match_cos_sin_cache_dtype(query)
        table = self.cos_sin_cache
    n, size = query.shape[0], self.head_size
    q, k = query.view(n, -1, size), key.view(n, -1, size)
    if positions.ndim == 2:
        if self.axis_map is None:  # 0.5.17 keeps GLM's alone
            axes = axes_of(self.mrope_section, self.mrope_interleaved)
            self.axis_map = torch.tensor(axes, dtype=torch.int64, device=query.device)
        table, positions = rows_of_tokens(table, positions, self.axis_map.repeat(2))
    interleaved = not self.is_neox_style
    kinds = q.device, q.dtype, q.shape[1], k.shape[1], size, table.dtype, table.shape[1], interleaved
    fused = fused_set_kv_buffer_arg
    if fused is None:
        bound(*kinds)(q, k, None, table, positions, interleaved=interleaved)
        return query, key
    heads = k.shape[1]
    v = fused.value.view(n, heads, -1)
    k_cache, v_cache = fused.k_buffer.view(-1, heads, size), fused.v_buffer.view(-1, heads, v.shape[2])
    run = bound(*kinds, v.shape[2], k_cache.dtype)
    run(q, k, v, table, positions, k_cache, v_cache, fused.cache_loc, interleaved=interleaved)
    return query, key


@functools.cache
def bound(
    device: torch.device,
    dtype: torch.dtype,
    q_heads: int,
    k_heads: int,
    head_size: int,
    table: torch.dtype,
    rotary_dim: int,
    interleaved: bool,
    v_head_size: int = 0,
    cache: torch.dtype | None = None,
) -> Any:
    """`rope_kv_write` for tensors of a kind; with `cache`, the dtype of one that it writes."""
    slot = torch.zeros(1, dtype=torch.int64, device=device)
    example: dict[str, Any] = {
        "q": torch.zeros(1, q_heads, head_size, dtype=dtype, device=device),
        "k": torch.zeros(1, k_heads, head_size, dtype=dtype, device=device),
        "v": None,
        "cos_sin_cache": torch.zeros(1, rotary_dim, dtype=table, device=device),
        "positions": slot,
        "interleaved": interleaved,
    }
    if cache is not None:
        example["v"] = torch.zeros(1, k_heads, v_head_size, dtype=dtype, device=device)
        example["k_cache"] = torch.zeros(1, k_heads, head_size, dtype=cache, device=device)
        example["v_cache"] = torch.zeros(1, k_heads, v_head_size, dtype=cache, device=device)
        example["slots"] = slot
    return hal.bind(device, like={"rope_kv_write": example}).rope_kv_write


def enable_fused_set_kv_buffer(forward_batch: Any) -> bool:
    """May a model hand k and v to the rotation? Where its pool is hal's, without scales."""
    from hal.engines.sglang.pools import HalMHAPool

    pool = get_token_to_kv_pool()
    return isinstance(pool, HalMHAPool) and pool.fp8 is None
