"""`cache_loc_assign`, `cache_loc_update`, `alloc_extend`, and the allocator's Triton kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hal
from hal._errors import ArgumentError
from hal.engines.sglang import kernels
from hal.engines.sglang.kernels._common import Launched


def cache_loc_assign(
    req_indices: Tensor, token_pool: Tensor, start_offset: Tensor, end_offset: Tensor, out_cache_loc: Tensor
) -> Tensor:
    """Unpacks `out_cache_loc` into ``token_pool[r, start:end]`` of every request; returns `token_pool`.

    Any number of slots a request, where sgl-kernel-npu's buffers hold 16.

    Example:
        >>> import torch
        >>> table, row = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([1])
        >>> cache_loc_assign(row, table, row, row + 2, torch.tensor([5, 6], dtype=torch.int32))
        tensor([[0, 0, 0, 0],
                [0, 5, 6, 0]], dtype=torch.int32)
    """
    hal.write_req_to_token(token_pool, req_indices, start_offset, end_offset, out_cache_loc)
    return token_pool


def cache_loc_update(
    req_indices: Tensor, token_pool: Tensor, start_offset: Tensor, end_offset: Tensor, out_cache_loc: Tensor
) -> Tensor:
    """Packs ``token_pool[r, start:end]`` of every request into `out_cache_loc` and returns it; the rest becomes -1."""
    return hal.assign_extend_cache_locs(token_pool, req_indices, start_offset, end_offset, out_cache_loc)


def alloc_extend(
    pre_lens: Tensor,
    seq_lens: Tensor,
    last_loc: Tensor,
    free_pages: Tensor,
    page_size: int,
    out_indices: Tensor,
    values: Tensor,
) -> None:
    """A slot for each new token of every request, packed into `out_indices`; ``values[0]`` is the pages they take.

    int32 or int64. sgl-kernel-npu sets ``values[0]`` only where the last request ends inside a new page.
    """
    if values.ndim != 1 or not values.numel() or values.is_floating_point():
        raise ArgumentError("alloc_extend", "values", "ints [1]", f"{values.dtype} {tuple(values.shape)}")
    hal.alloc_extend(pre_lens, seq_lens, last_loc, free_pages, page_size, out_indices)
    before, after = pre_lens.to(torch.int64), seq_lens.to(torch.int64)
    # Those that hal.alloc_extend counts.
    counted = (before >= 0) & (before <= after) & (after < 2**31)
    first, last = (torch.where(counted, n, 0) + (page_size - 1) for n in (before, after))
    values[:1].copy_((last // page_size - first // page_size).sum())


@Launched
def alloc_extend_kernel(
    pre_lens_ptr: Tensor,
    seq_lens_ptr: Tensor,
    last_loc_ptr: Tensor,
    free_page_ptr: Tensor,
    out_indices: Tensor,
    bs_upper: int,
    page_size: int,
    max_num_extend_tokens: int,
    BLOCK_SIZE: Any = 2048,
) -> None:
    """`kernels.alloc_extend_kernel` with the two arguments that sgl-kernel-npu's has besides, which size its loops."""
    kernels.alloc_extend_kernel(
        pre_lens_ptr, seq_lens_ptr, last_loc_ptr, free_page_ptr, out_indices, bs_upper, page_size
    )
