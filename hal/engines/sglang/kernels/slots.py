"""`get_last_loc`, `assign_extend_cache_locs`, the paged allocator's kernels, `create_flashinfer_kv_indices_triton`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hal
from hal.engines.sglang.kernels._common import Launched, Unsupported, refuse


def get_last_loc(req_to_token: Tensor, req_pool_indices_tensor: Tensor, prefix_lens_tensor: Tensor) -> Tensor:
    """The slot of each request's last cached token, or -1. ``[bs]``, the dtype of `prefix_lens_tensor`.

    Example:
        >>> import torch
        >>> table = torch.tensor([[7, 8, 9]], dtype=torch.int32)
        >>> get_last_loc(table, torch.tensor([0]), torch.tensor([2]))
        tensor([8])
    """
    return hal.get_last_loc(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)


@Launched
def assign_extend_cache_locs(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int = 0,
    bs_upper: int = 0,
) -> None:
    """Packs ``req_to_token[r, start:end]`` of every request into `out_cache_loc`; what is left of it becomes -1."""
    hal.assign_extend_cache_locs(req_to_token, req_pool_indices, start_offset, end_offset, out_cache_loc)


def assign_extend_cache_locs_func(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> Tensor:
    """The same, into a new tensor ``[batch_size * draft_token_num]`` int64."""
    out = torch.empty(batch_size * draft_token_num, dtype=torch.int64, device=device)
    return hal.assign_extend_cache_locs(req_to_token, req_pool_indices, start_offset, end_offset, out)


@Launched
def alloc_extend_kernel(
    pre_lens_ptr: Tensor,
    seq_lens_ptr: Tensor,
    last_loc_ptr: Tensor,
    free_page_ptr: Tensor,
    out_indices: Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    """A slot for each new token of every request, packed into `out_indices`; -1 where there is no page."""
    hal.alloc_extend(pre_lens_ptr, seq_lens_ptr, last_loc_ptr, free_page_ptr, page_size, out_indices)


@Launched
def alloc_decode_kernel(
    seq_lens_ptr: Tensor,
    last_loc_ptr: Tensor,
    free_page_ptr: Tensor,
    out_indices: Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    """A slot for the last token of each request, into `out_indices`; -1 where there is no page."""
    hal.alloc_decode(seq_lens_ptr, last_loc_ptr, free_page_ptr, page_size, out_indices)


@Launched
def create_flashinfer_kv_indices_triton(
    req_to_token_ptr: Tensor,
    req_pool_indices_ptr: Tensor,
    page_kernel_lens_ptr: Tensor,
    kv_indptr: Tensor,
    kv_start_idx: Tensor | None,
    kv_indices_ptr: Tensor,
    req_to_token_ptr_stride: int = 0,
    ENTRY_PAGE_SIZE: int = 1,
    TOKEN_BLOCK_PARALLEL: bool = False,
    token_mapping: Tensor | None = None,
) -> None:
    """Packs each request's slots into `kv_indices_ptr`, where `kv_indptr` says: SGLang's callers have the sums."""
    name = "create_flashinfer_kv_indices_triton"
    refuse(name, token_mapping=token_mapping)
    if ENTRY_PAGE_SIZE != 1:
        raise Unsupported(f"hal: {name}: ENTRY_PAGE_SIZE {ENTRY_PAGE_SIZE}: hal's tables have an entry a token")
    indptr = kv_indptr[: req_pool_indices_ptr.shape[0] + 1]
    hal.build_kv_indices(
        req_to_token_ptr,
        req_pool_indices_ptr,
        page_kernel_lens_ptr,
        None,
        kv_indices_ptr,
        kv_start_idx,
        given_indptr=indptr,
    )


def write_req_to_token_pool_triton(*args: Any, **kwargs: Any) -> None:
    """Refused: the cached prefixes come as a table of addresses."""
    raise Unsupported(
        "hal: write_req_to_token_pool_triton: addresses carry no sizes, so no read could be checked — "
        "hal.write_req_to_token takes the slots packed"
    )
