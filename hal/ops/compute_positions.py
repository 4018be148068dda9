"""compute_positions: the position of every new token in its request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal._errors import ArgumentError
from hal.ops._checks import check_range
from hal.ops._spans import LONGEST, extents, spread
from hal.ops.spec import INDEX, OpSpec, TensorArg, describe


def compute_positions(prefix_lens: Tensor, seq_lens: Tensor, out: Tensor, indptr: Tensor | None = None) -> Tensor:
    """Packs ``prefix_i, prefix_i + 1, ..., seq_i - 1`` of every request, one after the other, into `out`.

    What is left of `out` becomes -1; nothing is written past it. A request counts only where
    ``0 <= prefix_i <= seq_i < 2^31``, else it has no tokens.

    Args:
        prefix_lens: ``[bs]`` int32 or int64, tokens that are cached already. Any value is safe.
        seq_lens: ``[bs]`` int32 or int64, tokens in all. Any value is safe.
        out: ``[capacity]`` int32 or int64, overwritten whole.
        indptr: ``[bs + 1]`` int32 or int64, overwritten: where each request begins in `out`, and last where
            all end, at most capacity.

    Returns:
        `out` itself.

    Raises:
        ArgumentError: a wrong dtype, rank, length, device or stride.

    Example:
        >>> import torch, hal
        >>> hal.compute_positions(torch.tensor([4, 0]), torch.tensor([6, 3]), torch.empty(6, dtype=torch.int64))
        tensor([ 4,  5,  0,  1,  2, -1])

    Source: the contract of SGLang's ``compute_position``, with every value defined.
    """
    prefix, seq = extents(prefix_lens, seq_lens)
    length, bs, capacity = seq - prefix, prefix.shape[0], out.shape[0]
    if indptr is not None:
        indptr[:1] = 0
        indptr[1:] = length.cumsum(0).clamp(max=capacity).to(indptr.dtype)
    if bs == 0 or capacity == 0:
        return out.fill_(-1)
    i, t, used = spread(length, capacity)
    return out.copy_(torch.where(used, prefix[i] + t, -1))


def _check_sizes(prefix_lens: Tensor, seq_lens: Tensor, out: Tensor, indptr: Tensor | None) -> None:
    if indptr is not None and indptr.shape[0] != prefix_lens.shape[0] + 1:
        raise ArgumentError("compute_positions", "indptr", f"[bs + 1] = [{prefix_lens.shape[0] + 1}]", describe(indptr))


def _check_values(a: Mapping[str, Any]) -> None:
    for name in ("prefix_lens", "seq_lens"):
        check_range("compute_positions", name, a[name], 0, LONGEST)


SPEC = OpSpec(
    compute_positions,
    args={
        "prefix_lens": TensorArg("bs", INDEX),
        "seq_lens": TensorArg("bs", INDEX),
        "out": TensorArg("capacity", INDEX, mutated=True),
        "indptr": TensorArg("bs_and_1", INDEX, optional=True, mutated=True),
    },
    returns="out",
    check_sizes=_check_sizes,
    check_values=_check_values,
    proof="hal.ops.proofs.compute_positions",
)
