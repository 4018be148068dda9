"""build_page_table: the pages of each request, a row each, for attention that reads page tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal.ops._checks import check_range
from hal.ops._spans import check_page_size
from hal.ops._torch import in_range
from hal.ops.spec import INDEX, OpSpec, TensorArg, ValueArg


def build_page_table(
    req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, page_size: int, out: Tensor
) -> Tensor:
    """``out[i, p] = req_to_token[r_i, p * page_size] // page_size`` for every page that request i has tokens in.

    Else -1: past the request's last page, for a slot below 0, outside the table. `out` is overwritten whole.

    Args:
        req_to_token: ``[max_requests, max_context_len]`` int32; may be a row-strided view. The slots of a
            page's tokens are consecutive, so its first one says which page it is.
        req_pool_indices: ``[bs]`` int32 or int64, rows of the table. Any value is safe.
        kv_lens: ``[bs]`` int32 or int64, tokens of each request. Any value is safe.
        page_size: slots in a page, 1 to 2^30; any, not only a power of two.
        out: ``[bs, max_pages]`` int32 or int64; may be a row-strided view.

    Returns:
        `out` itself.

    Raises:
        ArgumentError: a wrong dtype, rank, length, device, stride or page size.

    Example:
        >>> import torch, hal
        >>> table = torch.tensor([[8, 9, 10, 11, 4, 5], [0, 0, 0, 0, 0, 0]], dtype=torch.int32)
        >>> hal.build_page_table(table, torch.tensor([0]), torch.tensor([5]), 4, torch.empty(1, 3, dtype=torch.int32))
        tensor([[ 2,  1, -1]], dtype=torch.int32)

    Source: the page tables of SGLang's FlashAttention backend, ``req_to_token[:, ::page_size] // page_size``.
    """
    rows, width = req_to_token.shape
    if out.numel() == 0:
        return out
    if rows == 0 or width == 0:
        return out.fill_(-1)
    column = torch.arange(out.shape[1], device=out.device, dtype=torch.int64) * page_size
    request = req_pool_indices.to(torch.int64).unsqueeze(1)
    valid = in_range(request, rows) & (column < kv_lens.to(torch.int64).unsqueeze(1)) & (column < width)
    slot = req_to_token[torch.where(valid, request, 0), torch.where(valid, column, 0)]
    return out.copy_(torch.where(valid & (slot >= 0), slot // page_size, -1))


def _check_sizes(req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, page_size: int, out: Tensor) -> None:
    # Not of the call's kind, which is checked once, but of each call.
    check_page_size("build_page_table", page_size)


def _check_values(a: Mapping[str, Any]) -> None:
    rows, width = a["req_to_token"].shape
    check_range("build_page_table", "req_pool_indices", a["req_pool_indices"], -1, rows - 1)
    check_range("build_page_table", "kv_lens", a["kv_lens"], 0, width)


SPEC = OpSpec(
    build_page_table,
    args={
        "req_to_token": TensorArg("max_requests max_context_len", (torch.int32,), stride="inner"),
        "req_pool_indices": TensorArg("bs", INDEX),
        "kv_lens": TensorArg("bs", INDEX),
        "page_size": ValueArg(),
        "out": TensorArg("bs max_pages", INDEX, stride="inner", mutated=True),
    },
    returns="out",
    check_sizes=_check_sizes,
    check_values=_check_values,
    proof="hal.ops.proofs.build_page_table",
)
