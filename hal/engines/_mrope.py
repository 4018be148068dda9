"""M-RoPE by ops that rotate by one position a token: a step's tokens get a table of their own, a row each.

All layers of a step have the same positions, so a graph that is compiled makes the table once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def axes_of(section: Sequence[int], interleaved: bool) -> list[int]:
    """Which axis's position (time, height, width) turns each pair of a head.

    Args:
        section: pairs of each axis.
        interleaved: axes take turns as long as height and width have pairs left, time has the rest (Qwen3-VL); else one
            axis after the other (Qwen2-VL).

    Returns:
        ``sum(section)`` axes.

    Example:
        >>> from hal.engines._mrope import axes_of
        >>> axes_of((2, 1, 1), False), axes_of((2, 1, 1), True)
        ([0, 0, 1, 2], [0, 1, 2, 0])

    Source: Wang et al., Qwen2-VL (arXiv:2409.12191); interleaved: Huang et al. (arXiv:2510.23095).
    """
    if not interleaved:
        return [axis for axis, pairs in enumerate(section) for _ in range(pairs)]
    total = sum(section)
    axes = [0] * total
    for axis in (1, 2):
        for pair in range(axis, min(3 * section[axis], total), 3):
            axes[pair] = axis
    return axes


def rows_of_tokens(cos_sin_cache: Tensor, positions: Tensor, axes: Tensor) -> tuple[Tensor, Tensor]:
    """(a table, positions) by which rotation by one position a token is M-RoPE's.

    Args:
        cos_sin_cache: ``[max_positions, rotary_dim]``, cos then sin.
        positions: ``[axes, n]`` integers, each below max_positions.
        axes: ``[rotary_dim]`` int64: `axes_of`'s, twice, for cos and for sin.

    Returns:
        ``[n, rotary_dim]`` and ``[n]`` int64, 0 to n - 1.
    """
    lanes = torch.arange(axes.shape[0], dtype=torch.int64, device=axes.device)
    tokens = torch.arange(positions.shape[1], dtype=torch.int64, device=positions.device)
    # index_select's result is contiguous, and so the table is, as the ops ask.
    return cos_sin_cache[positions.T.index_select(1, axes), lanes], tokens
