"""Writes into paged caches ``[pages, page_size, heads, dim]``, by the names of torch_npu and sgl-kernel-npu."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hal
from hal._errors import ArgumentError
from hal.engines.sglang.kernels._common import Unsupported, refuse


def _npu_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    """Writes key and value ``[n, heads, dim]`` to their slots; -1 and what is out of range is skipped."""
    hal.kv_write(key, value, key_cache, value_cache, slot_indices)


def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "Norm",
) -> None:
    """The same, where the cache mode is ``Norm``: hal's rows are contiguous, those of ``PA_NZ`` lie in tiles."""
    name = "npu_scatter_pa_kv_cache"
    refuse(name, compress_lens=compress_lens, compress_seq_offsets=compress_seq_offsets, seq_lens=seq_lens)
    if cache_mode != "Norm":
        raise Unsupported(f"hal: {name}: cache_mode {cache_mode!r}: hal's rows are those of 'Norm'")
    hal.kv_write(key, value, key_cache, value_cache, slot_mapping)


def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Writes rows ``updates[i]`` to ``input[indices[i, 0]]``, in place, and returns `input`; skips as above.

    input ``[slots, ...]`` contiguous, of a dtype that hal's caches have; updates ``[n, ...]``.
    """
    name = "npu_scatter_nd_update_"
    if indices.ndim != 2 or indices.shape[1] != 1:
        raise Unsupported(f"hal: {name}: indices {tuple(indices.shape)}: hal takes a slot a row, [n, 1]")
    if updates.shape != (indices.shape[0], *input.shape[1:]):
        want = f"{(indices.shape[0], *input.shape[1:])}"
        raise ArgumentError(name, "updates", want, str(tuple(updates.shape)))
    rows, new = input.flatten(1), updates.flatten(1)
    half = rows.shape[1] // 2
    if not half:
        raise Unsupported(f"hal: {name}: rows of one element")
    # The op joins two parts: here the halves of a row.
    hal.mla_kv_write(new[:, :half], new[:, half:], rows, indices[:, 0].contiguous())
    return input


def store_kv_cache_prefix_valid_npu_triton(
    dst_k: Tensor, dst_v: Tensor, src_k: Tensor, src_v: Tensor, loc_2d: Tensor, commit_lens: Any
) -> None:
    """Writes src ``[bs * width, heads, dim]`` to slots ``loc_2d[b, :commit_lens[b]]`` of ``[slots, heads, dim]``."""
    if loc_2d.ndim != 2 or commit_lens.shape != loc_2d.shape[:1]:
        raise ArgumentError(
            "store_kv_cache_prefix_valid_npu_triton",
            "commit_lens",
            "[bs] of loc_2d [bs, width]",
            f"{tuple(commit_lens.shape)} of {tuple(loc_2d.shape)}",
        )
    column = torch.arange(loc_2d.shape[1], dtype=commit_lens.dtype, device=loc_2d.device)
    slots = torch.where(column < commit_lens[:, None], loc_2d, -1)
    hal.kv_write(src_k, src_v, dst_k, dst_v, slots.flatten())
