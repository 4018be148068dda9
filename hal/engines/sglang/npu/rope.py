"""Rotations, and the fusions that split a projection's output, normalise and rotate. All return new tensors.

A cosine and sine a token is a table of its own: row i is token i's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hal
from hal._errors import ArgumentError
from hal.engines.sglang.kernels._common import Unsupported, refuse
from hal.registry import current


def fused_rope_qk_mqa(
    query: Tensor, key: Tensor, cos_sin: Tensor, rotary_dim: int, is_neox_style: bool
) -> tuple[Tensor, Tensor]:
    """query and key ``[n, heads, dim]``, the first `rotary_dim` of each head rotated by ``cos_sin[n, rotary_dim]``.

    In fp32 and rounded once, where sgl-kernel-npu's rounds every product.

    Example:
        >>> import torch
        >>> q, k = fused_rope_qk_mqa(torch.ones(1, 2, 4), torch.ones(1, 1, 4), torch.tensor([[0.0, 1.0]]), 2, True)
        >>> q[0, 0].tolist()
        [-1.0, 1.0, 1.0, 1.0]
    """
    if cos_sin.shape != (query.shape[0], rotary_dim):
        want = f"{(query.shape[0], rotary_dim)}, a row a token"
        raise ArgumentError("fused_rope_qk_mqa", "cos_sin", want, str(tuple(cos_sin.shape)))
    q, k = (t.clone(memory_format=torch.contiguous_format) for t in (query, key))
    hal.rope_kv_write(q, k, None, cos_sin, _rows(cos_sin), interleaved=not is_neox_style)
    return q, k


def split_qkv_rmsnorm_rope(
    input: Tensor,
    sin: Tensor,
    cos: Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of ``input[n, q_hidden_size + 2 * kv_hidden_size]``: q and k normalised by head (with `eps`), rotated.

    sin and cos ``[n, ..., rope_dim]``, a row a token, their second half the first again, as SGLang makes them: hal
    has one angle a pair. That is looked at on a CPU, and with ``HAL_CHECKS=full`` on a device, where it waits.
    """
    name = "split_qkv_rmsnorm_rope"
    table = _table(name, sin, cos, input.shape[0], is_neox_style)
    q, k, v = _split(name, input, (q_hidden_size, kv_hidden_size, kv_hidden_size))
    return _norm_rope(
        name, q, k, v, head_dim, table, _rows(table), not is_neox_style, eps, q_weight, k_weight, q_bias, k_bias
    )


def split_qkv_rmsnorm_rope_pos_cache_half_npu(
    input_tensor: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    rope_dim: int | None = None,
    cast_norm_to_bf16: bool = True,
    wide_grid_min_tokens: int = 1024,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by positions ``[n]`` in ``cos_sin_cache[max_positions, rope_dim]``.

    A position out of range leaves its token as it was, where sgl-kernel-npu's takes the nearest row. Rounded once,
    whatever `cast_norm_to_bf16` says.
    """
    name = "split_qkv_rmsnorm_rope_pos_cache_half_npu"
    if cos_sin_cache.shape[1] != (head_dim if rope_dim is None else rope_dim):
        raise ArgumentError(name, "rope_dim", f"the table's width {cos_sin_cache.shape[1]}", str(rope_dim))
    q, k, v = _split(name, input_tensor, (q_hidden_size, kv_hidden_size, kv_hidden_size))
    return _norm_rope(name, q, k, v, head_dim, cos_sin_cache, positions, False, eps, q_weight, k_weight, q_bias, k_bias)


def split_qkvgate_gemma_rmsnorm_rope(
    input: Tensor,
    sin: Tensor,
    cos: Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    rope_dim: int,
    eps: float,
    q_weight: Tensor,
    k_weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gates, where a gate follows each head of q in `input`; weights count from -1 (Gemma's)."""
    name = "split_qkvgate_gemma_rmsnorm_rope"
    table = _table(name, sin, cos, input.shape[0], True)
    if table.shape[1] != rope_dim:
        raise ArgumentError(name, "rope_dim", f"the angles' width {table.shape[1]}", str(rope_dim))
    both, k, v = _split(name, input, (2 * q_hidden_size, kv_hidden_size, kv_hidden_size))
    q, gate = both.view(both.shape[0], q_hidden_size // head_dim, 2, head_dim).unbind(2)
    q_weight, k_weight = (w.float() + 1 for w in (q_weight, k_weight))
    q, k, v = _norm_rope(
        name, q.flatten(1), k, v, head_dim, table, _rows(table), False, eps, q_weight, k_weight, None, None
    )
    return q, k, v, gate.flatten(1)


def _norm_rope(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_dim: int,
    table: Tensor,
    positions: Tensor,
    interleaved: bool,
    eps: float | None,
    q_weight: Any,
    k_weight: Any,
    q_bias: Any,
    k_bias: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, changed in place, and v, all ``[n, hidden]``."""
    q_heads, k_heads = (t.view(t.shape[0], t.shape[1] // head_dim, head_dim) for t in (q, k))
    if eps is None:
        hal.rope_kv_write(q_heads, k_heads, None, table, positions, interleaved=interleaved)
    else:
        refuse(name, q_bias=q_bias, k_bias=k_bias)
        q_weight, k_weight = (w[:head_dim].contiguous() for w in (q_weight, k_weight))
        hal.qk_norm_rope_kv_write(
            q_heads, k_heads, None, q_weight, k_weight, table, positions, eps=eps, interleaved=interleaved
        )
    return q, k, v


def _split(name: str, qkv: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """The parts of each row, copied."""
    if qkv.ndim != 2 or qkv.shape[1] != sum(sizes):
        raise ArgumentError(name, "input", f"[n, {' + '.join(map(str, sizes))}]", str(tuple(qkv.shape)))
    return [t.clone(memory_format=torch.contiguous_format) for t in qkv.split_with_sizes(sizes, dim=1)]


def _table(name: str, sin: Tensor, cos: Tensor, n: int, halves: bool) -> Tensor:
    """``[n, rope_dim]`` of each token's cosines and sines, cos then sin, one a pair."""
    if sin.shape != cos.shape or sin.numel() != n * sin.shape[-1] or sin.shape[-1] % 2:
        raise ArgumentError(name, "sin", f"[{n}, ..., rope_dim], as cos", f"{tuple(sin.shape)}, {tuple(cos.shape)}")
    full = [t.reshape(n, t.shape[-1]) for t in (cos, sin)]
    half = full[0].shape[1] // 2
    looked_at = sin.device.type == "cpu" or current().checks == 2
    if halves and looked_at and not all(torch.equal(t[:, :half], t[:, half:]) for t in full):
        raise Unsupported(f"hal: {name}: sin and cos whose halves differ: hal has one angle a pair")
    return torch.cat([t[:, :half] for t in full], dim=1)


def _rows(table: Tensor) -> Tensor:
    return torch.arange(table.shape[0], dtype=torch.int32, device=table.device)
