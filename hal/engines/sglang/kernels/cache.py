"""`store_cache`, `set_mla_kv_buffer`, and `apply_rope_with_cos_sin_cache_inplace` in both of its signatures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hal
from hal.engines.sglang.kernels._common import Unsupported, refuse


@dataclass
class FusedSetKVBufferArg:
    """What a rotation writes besides: v ``[n, heads * v_dim]``, the two caches ``[slots, heads * dim]``, the slots."""

    value: Tensor
    k_buffer: Tensor
    v_buffer: Tensor
    cache_loc: Tensor
    k_scale: float | Tensor | None = None
    v_scale: float | Tensor | None = None


def store_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    indices: Tensor,
    *,
    row_bytes: int = 0,
    v_row_bytes: int = 0,
    num_split: int = 0,
    size_limit: int = 0,
    reserved_skip_index: int = 0,
) -> None:
    """Writes k ``[n, row]`` and v ``[n, v_row]`` to the slots `indices` of caches ``[slots, row]``, ``[slots, v_row]``.

    A slot that is out of range or `reserved_skip_index` (0 or -1, which is none) is skipped.

    Example:
        >>> import torch
        >>> k_cache = torch.zeros(8, 4)
        >>> store_cache(torch.ones(2, 4), torch.ones(2, 4), k_cache, k_cache.clone(), torch.tensor([5, 0]))
        >>> k_cache.any(dim=1).nonzero().flatten()
        tensor([5])
    """
    first, slots = _skip("store_cache", indices, reserved_skip_index)
    end = size_limit or k_cache.shape[0]
    k_rows, v_rows = (t.reshape(t.shape[0], 1, -1) for t in (k, v))
    k_slots, v_slots = (t.view(t.shape[0], 1, -1)[first:end] for t in (k_cache, v_cache))
    hal.kv_write(k_rows, v_rows, k_slots, v_slots, slots)


def set_mla_kv_buffer(
    kv_buffer: Tensor,
    loc: Tensor,
    cache_k_nope: Tensor,
    cache_k_rope: Tensor,
    num_warps: int = 0,
    *,
    reserved_skip_index: int = 0,
) -> None:
    """Writes rows ``nope ‖ rope`` to the slots `loc` of ``[slots, row]`` or ``[slots, 1, row]``; skips as above."""
    if cache_k_rope is None or not cache_k_rope.shape[-1]:
        raise Unsupported("hal: set_mla_kv_buffer: rows without a rope part")
    first, slots = _skip("set_mla_kv_buffer", loc, reserved_skip_index)
    rows = kv_buffer.view(kv_buffer.shape[0], -1)[first:]
    nope, rope = (t.reshape(t.shape[0], t[:1].numel() or t.shape[-1]) for t in (cache_k_nope, cache_k_rope))
    if rows.dtype == torch.uint8:
        # Rows of another layout, as bytes: nothing is computed, and hal's rows are of two.
        rows, nope, rope = (t.view(torch.float16) for t in (rows, nope, rope))
    hal.mla_kv_write(nope, rope, rows, slots)


def set_mla_kv_buffer_triton(
    kv_buffer: Tensor, loc: Tensor, cache_k_nope: Tensor, cache_k_rope: Tensor, *, reserved_skip_index: int = 0
) -> None:
    """The same by its other name."""
    set_mla_kv_buffer(kv_buffer, loc, cache_k_nope, cache_k_rope, reserved_skip_index=reserved_skip_index)


def _skip(function: str, slots: Tensor, skipped: int) -> tuple[int, Tensor]:
    """(the first row of the cache, the slots counted from it): slot 0 becomes -1, which is skipped."""
    if skipped < 0:
        return 0, slots
    if skipped:
        raise Unsupported(f"hal: {function}: reserved_skip_index {skipped}: hal skips 0 or none")
    return 1, slots - 1


def apply_rope_with_cos_sin_cache_inplace(*args: Any, **kwargs: Any) -> None:
    """Rotates query and key in place, and writes k and v where it is told to.

    By either signature of SGLang's, told apart by what comes first:
    ``(positions, query, key, head_size, cos_sin_cache, is_neox=True, fused_set_kv_buffer_arg=None, enable_pdl=None)``,
    query and key ``[n, heads * head_size]`` or ``[n, heads, head_size]``; and
    ``(q, k, cos_sin_cache, positions, *, is_neox, rope_dim=0, fused_args=None)``, ``[n, heads, head_size]``.

    Example:
        >>> import torch
        >>> q, k, table = torch.ones(2, 4, 8), torch.ones(2, 2, 8), torch.cat([torch.ones(3, 4), torch.zeros(3, 4)], 1)
        >>> apply_rope_with_cos_sin_cache_inplace(q, k, table, torch.tensor([0, 2]), is_neox=True)
        >>> bool((q == 1).all())
        True
    """
    newer = "q" in kwargs or (bool(args) and args[0].is_floating_point())
    (_apply_jit if newer else _apply_aot)(*args, **kwargs)


def apply_rope_inplace(
    q: Tensor, k: Tensor, cos_sin_cache: Tensor, positions: Tensor, *, is_neox: bool, rope_dim: int = 0
) -> None:
    """Rotates q and k ``[n, heads, head_dim]`` in place: their first `rope_dim` elements, which are the table's."""
    _apply_jit(q, k, cos_sin_cache, positions, is_neox=is_neox, rope_dim=rope_dim)


def apply_rope_inplace_with_kvcache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    out_loc: Tensor,
    *,
    is_neox: bool,
    rope_dim: int = 0,
) -> None:
    """The same, and k and v are written to the slots `out_loc` of caches ``[slots, heads * head_dim]``."""
    fused = FusedSetKVBufferArg(v, k_cache, v_cache, out_loc)
    _apply_jit(q, k, cos_sin_cache, positions, is_neox=is_neox, rope_dim=rope_dim, fused_args=fused)


def _apply_aot(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool = True,
    fused_set_kv_buffer_arg: FusedSetKVBufferArg | None = None,
    enable_pdl: bool | None = None,
) -> None:
    n = query.shape[0]
    q, k = query.view(n, -1, head_size), key.view(n, -1, head_size)
    _rope(q, k, cos_sin_cache, positions, is_neox, fused_set_kv_buffer_arg)


def _apply_jit(
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    is_neox: bool,
    rope_dim: int = 0,
    fused_args: FusedSetKVBufferArg | None = None,
) -> None:
    if rope_dim not in (0, cos_sin_cache.shape[1]):
        refuse("apply_rope_with_cos_sin_cache_inplace", rope_dim=rope_dim)
    _rope(q, k, cos_sin_cache, positions, is_neox, fused_args)


def _rope(q: Tensor, k: Tensor, table: Tensor, positions: Tensor, is_neox: bool, fused: Any) -> None:
    if fused is None:
        hal.rope_kv_write(q, k, None, table, positions, interleaved=not is_neox)
        return
    n, heads = k.shape[:2]
    v = fused.value.view(n, heads, -1)
    k_cache, v_cache = fused.k_buffer.view(-1, heads, k.shape[2]), fused.v_buffer.view(-1, heads, v.shape[2])
    scales: dict[str, Any] = {}
    if k_cache.dtype != k.dtype:
        scales = {name: getattr(fused, name, None) for name in ("k_scale", "v_scale")}
    else:
        refuse("apply_rope_with_cos_sin_cache_inplace", k_scale=getattr(fused, "k_scale", None))
        refuse("apply_rope_with_cos_sin_cache_inplace", v_scale=getattr(fused, "v_scale", None))
    hal.rope_kv_write(q, k, v, table, positions, k_cache, v_cache, fused.cache_loc, interleaved=not is_neox, **scales)
