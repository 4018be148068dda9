"""get_last_loc: the slot of each request's last cached token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal.ops._checks import check_range
from hal.ops._torch import in_range
from hal.ops.spec import INDEX, OpSpec, TensorArg


def get_last_loc(req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor) -> Tensor:
    """The slot of the last cached token of each request, or -1 where there is none.

    ``out[i] = req_to_token[req_pool_indices[i], prefix_lens[i] - 1]`` where ``0 < prefix_lens[i] <=
    max_context_len`` and the request is a row of the table, else -1. Paged allocation continues a
    request's open page from it.

    Args:
        req_to_token: ``[max_requests, max_context_len]`` int32; may be a row-strided view.
        req_pool_indices: ``[bs]`` int32 or int64, rows of the table. Any value is safe.
        prefix_lens: ``[bs]`` int32 or int64, cached tokens. Any value is safe.

    Returns:
        ``[bs]``, the dtype and device of `prefix_lens`.

    Raises:
        ArgumentError: a wrong dtype, rank, length, device or stride.

    Example:
        >>> import torch, hal
        >>> req_to_token = torch.tensor([[7, 8, 9], [4, 5, 6]], dtype=torch.int32)
        >>> hal.get_last_loc(req_to_token, torch.tensor([1, 0]), torch.tensor([2, 0]))
        tensor([ 5, -1])

    Source: the contract of SGLang's function of the same name, with every index value defined.
    """
    rows, width = req_to_token.shape
    if rows == 0 or width == 0:
        return torch.full_like(prefix_lens, -1)
    request = req_pool_indices.to(torch.int64)
    valid = in_range(request, rows) & (prefix_lens > 0) & (prefix_lens <= width)
    # The index is made valid before anything is added to it: int64's smallest - 1 would wrap.
    column = torch.where(valid, prefix_lens.to(torch.int64), 1) - 1
    found = req_to_token[torch.where(valid, request, 0), column]
    return torch.where(valid, found.to(prefix_lens.dtype), -1)


def _check_values(a: Mapping[str, Any]) -> None:
    rows, width = a["req_to_token"].shape
    for name, low, high in (("req_pool_indices", -1, rows - 1), ("prefix_lens", 0, width)):
        check_range("get_last_loc", name, a[name], low, high)


SPEC = OpSpec(
    get_last_loc,
    core=True,
    args={
        "req_to_token": TensorArg("max_requests max_context_len", (torch.int32,), stride="inner"),
        "req_pool_indices": TensorArg("bs", INDEX),
        "prefix_lens": TensorArg("bs", INDEX),
    },
    returns=TensorArg("bs", "prefix_lens"),
    check_values=_check_values,
    proof="hal.ops.proofs.get_last_loc",
)
