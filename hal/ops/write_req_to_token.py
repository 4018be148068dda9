"""write_req_to_token: notes the slots of new tokens in the table of requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal.ops._checks import check_range
from hal.ops._spans import LONGEST, clamped_lengths, spread
from hal.ops._torch import in_range
from hal.ops.spec import INDEX, OpSpec, TensorArg


def write_req_to_token(
    req_to_token: Tensor, req_pool_indices: Tensor, start_offsets: Tensor, end_offsets: Tensor, src: Tensor
) -> None:
    """Unpacks `src` into ``req_to_token[r_i, start_i:end_i]`` of every request: the inverse of
    `assign_extend_cache_locs`.

    ``req_to_token[r_i, start_i + t] = src[sum(len_j for j < i) + t]`` with ``len_i = max(end_i - start_i, 0)``.
    A slot that is -1, negative or more than int32 holds is skipped, as is what lies outside the table or
    past the end of `src`. Where two requests name one element, it becomes either's.

    Args:
        req_to_token: ``[max_requests, max_context_len]`` int32, written to; may be a row-strided view.
        req_pool_indices: ``[bs]`` int32 or int64. Any value is safe.
        start_offsets: ``[bs]`` int32 or int64, the first column of each request. Any value is safe.
        end_offsets: ``[bs]`` int32 or int64, one past its last. Any value is safe.
        src: ``[capacity]`` int32 or int64, the slots, packed.

    Raises:
        ArgumentError: a wrong dtype, rank, length, device or stride.

    Example:
        >>> import torch, hal
        >>> table = torch.zeros(2, 4, dtype=torch.int32)
        >>> hal.write_req_to_token(table, torch.tensor([1, 0]), torch.tensor([1, 0]), torch.tensor([3, 2]),
        ...                        torch.tensor([5, 6, 7, -1]))
        >>> table
        tensor([[7, 0, 0, 0],
                [0, 5, 6, 0]], dtype=torch.int32)

    Source: the contract of SGLang's ``write_req_to_token_pool``, with every index value defined.
    """
    rows, width = req_to_token.shape
    bs, capacity = start_offsets.shape[0], src.shape[0]
    if 0 in (bs, capacity, rows, width):
        return
    start, end = start_offsets.to(torch.int64), end_offsets.to(torch.int64)
    i, t, used = spread(clamped_lengths(start, end, capacity), capacity)
    row, first, slot = req_pool_indices.to(torch.int64)[i], start[i], src.to(torch.int64)
    valid = used & in_range(row, rows) & (first >= -t) & (first < width - t) & (slot >= 0) & (slot <= LONGEST)
    # Compared before it is added, so that the sum can't wrap.
    column = torch.where(valid, first, 0) + torch.where(valid, t, 0)
    # A boolean mask would sync. Instead what is invalid repeats the first valid store, or, with none
    # valid, stores element (0, 0) onto itself.
    pick = torch.where(
        valid, torch.arange(capacity, device=src.device, dtype=torch.int64), valid.to(torch.int8).argmax()
    )
    some = valid.any()
    row, column = torch.where(some, row[pick], 0), torch.where(some, column[pick], 0)
    own = req_to_token[:1, 0]
    req_to_token.index_put_((row, column), torch.where(some, slot[pick].to(torch.int32), own))


def _check_values(a: Mapping[str, Any]) -> None:
    rows, width = a["req_to_token"].shape
    for name, low, high in (
        ("req_pool_indices", -1, rows - 1),
        ("start_offsets", 0, width),
        ("end_offsets", 0, width),
        ("src", -1, LONGEST),
    ):
        check_range("write_req_to_token", name, a[name], low, high)


SPEC = OpSpec(
    write_req_to_token,
    args={
        "req_to_token": TensorArg("max_requests max_context_len", (torch.int32,), stride="inner", mutated=True),
        "req_pool_indices": TensorArg("bs", INDEX),
        "start_offsets": TensorArg("bs", INDEX),
        "end_offsets": TensorArg("bs", INDEX),
        "src": TensorArg("capacity", INDEX),
    },
    check_values=_check_values,
    proof="hal.ops.proofs.write_req_to_token",
)
