"""assign_extend_cache_locs: the slots of the tokens that a batch of requests is about to compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal._errors import ArgumentError
from hal.ops._checks import check_range
from hal.ops._spans import clamped_lengths, spread
from hal.ops._torch import in_range
from hal.ops.spec import INDEX, OpSpec, TensorArg, describe


def assign_extend_cache_locs(
    req_to_token: Tensor, req_pool_indices: Tensor, start_offsets: Tensor, end_offsets: Tensor, out: Tensor
) -> Tensor:
    """Packs ``req_to_token[r_i, start_i:end_i]`` of every request, one after the other, into `out`.

    ``out[sum(len_j for j < i) + t] = req_to_token[r_i, start_i + t]`` with ``len_i = max(end_i - start_i, 0)``.
    What would be read outside the table is -1; what is left of `out` becomes -1; nothing is written
    past `out`, whatever the lengths sum to. The cost is linear in `out`, whatever the skew.

    Args:
        req_to_token: ``[max_requests, max_context_len]`` int32; may be a row-strided view.
        req_pool_indices: ``[bs]`` int32 or int64. Any value is safe.
        start_offsets: ``[bs]`` int32 or int64, the first column of each request. Any value is safe.
        end_offsets: ``[bs]`` int32 or int64, one past its last. Any value is safe.
        out: ``[capacity]`` int32 or int64, overwritten whole.

    Returns:
        `out` itself.

    Raises:
        ArgumentError: a wrong dtype, rank, length, device or stride. With ``HAL_CHECKS=full`` also an index or offset
            out of range, and an `out` that the lengths do not fit into, which the contract allows and hardly anyone
            means.

    Example:
        >>> import torch, hal
        >>> table = torch.arange(8, dtype=torch.int32).view(2, 4)
        >>> out = torch.empty(6, dtype=torch.int64)
        >>> hal.assign_extend_cache_locs(table, torch.tensor([1, 0]), torch.tensor([1, 0]), torch.tensor([4, 2]), out)
        tensor([ 5,  6,  7,  0,  1, -1])

    Source: the contract of SGLang's function of the same name, with every index value defined. The
    reference searches each output's request in the prefix sum of the lengths.
    """
    rows, width = req_to_token.shape
    bs, capacity = start_offsets.shape[0], out.shape[0]
    if capacity == 0:
        return out
    if bs == 0 or rows == 0 or width == 0:
        return out.fill_(-1)
    start, end = start_offsets.to(torch.int64), end_offsets.to(torch.int64)
    i, t, used = spread(clamped_lengths(start, end, capacity), capacity)
    request, first = req_pool_indices.to(torch.int64)[i], start[i]
    # Compared before it is added, so that the sum can't wrap.
    valid = used & in_range(request, rows) & (first >= -t) & (first < width - t)
    column = torch.where(valid, first, 0) + torch.where(valid, t, 0)
    found = req_to_token[torch.where(valid, request, 0), column]
    return out.copy_(torch.where(valid, found, -1))


def _check_values(a: Mapping[str, Any]) -> None:
    rows, width = a["req_to_token"].shape
    for name, low, high in (("req_pool_indices", -1, rows - 1), ("start_offsets", 0, width), ("end_offsets", 0, width)):
        check_range("assign_extend_cache_locs", name, a[name], low, high)
    needed = int((a["end_offsets"].to(torch.int64) - a["start_offsets"]).clamp(min=0).sum())
    if needed > a["out"].shape[0]:
        raise ArgumentError(
            "assign_extend_cache_locs",
            "out",
            f"room for the {needed} slots that the lengths sum to",
            describe(a["out"]),
        )


SPEC = OpSpec(
    assign_extend_cache_locs,
    core=True,
    args={
        "req_to_token": TensorArg("max_requests max_context_len", (torch.int32,), stride="inner"),
        "req_pool_indices": TensorArg("bs", INDEX),
        "start_offsets": TensorArg("bs", INDEX),
        "end_offsets": TensorArg("bs", INDEX),
        "out": TensorArg("capacity", INDEX, mutated=True),
    },
    returns="out",
    check_values=_check_values,
    proof="hal.ops.proofs.assign_extend_cache_locs",
)
