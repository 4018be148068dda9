"""Slots: the paged allocator, and what SGLang does with a request's row of the table before a step."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_decode, alloc_token_slots
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from torch import Tensor

import hal


def alloc_extend(
    self: Any,
    prefix_lens: Tensor,
    prefix_lens_cpu: Tensor,
    seq_lens: Tensor,
    seq_lens_cpu: Tensor,
    last_loc: Tensor,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
) -> Tensor | None:
    """Slots of the requests' new tokens, of SGLang's paged allocator `self`; None: there are not enough pages."""
    if num_new_pages is None:
        num_new_pages = hal.num_new_pages(prefix_lens_cpu, seq_lens_cpu, self.page_size)
    if not _has(self, num_new_pages):
        return None
    out = torch.empty(extend_num_tokens, dtype=torch.int64, device=self.device)
    hal.alloc_extend(prefix_lens, seq_lens, last_loc, self.free_pages, self.page_size, out)
    self.free_pages = self.free_pages[num_new_pages:]
    return out


def alloc_decode(self: Any, seq_lens: Tensor, seq_lens_cpu: Tensor, last_loc: Tensor) -> Tensor | None:
    """The same of one new token of each."""
    num_new_pages = hal.num_new_pages(seq_lens_cpu - 1, seq_lens_cpu, self.page_size)
    if not _has(self, num_new_pages):
        return None
    out = torch.empty(seq_lens.shape[0], dtype=torch.int64, device=self.device)
    hal.alloc_decode(seq_lens, last_loc, self.free_pages, self.page_size, out)
    self.free_pages = self.free_pages[num_new_pages:]
    return out


def _has(allocator: Any, pages: int) -> bool:
    if pages > len(allocator.free_pages):
        allocator.merge_and_sort_free()
    return pages <= len(allocator.free_pages)


class HalPagedAllocator(PagedTokenToKVPoolAllocator):
    """SGLang's list of free pages, handed out by `alloc_extend` and `alloc_decode`."""

    alloc_extend = alloc_extend
    alloc_decode = alloc_decode


def alloc_for_decode(batch: Any, token_per_req: int) -> Tensor:
    """A slot for the next token of each request of a batch, also written to the requests' rows. Returns ``[bs]``.

    Raises:
        RuntimeError: SGLang's, there are not enough of them.
    """
    assert token_per_req == 1, "speculative decoding has an allocation of its own"
    batch.maybe_evict_swa()
    table, rows, lens = batch.req_to_token_pool.req_to_token, batch.req_pool_indices, batch.seq_lens
    after, after_cpu = lens + 1, batch.seq_lens_cpu + 1
    if batch.tree_cache.page_size == 1:
        slots: Tensor = alloc_token_slots(batch.tree_cache, lens.shape[0])
    else:
        slots = alloc_paged_token_slots_decode(
            tree_cache=batch.tree_cache,
            seq_lens=after,
            seq_lens_cpu=after_cpu,
            last_loc=hal.get_last_loc(table, rows, lens),
            req_pool_indices=rows,
            batch=batch,
        )
    hal.write_req_to_token(table, rows, lens, after, slots)
    later = hasattr(batch.req_to_token_pool, "alloc_aux_to_lengths")
    if later:
        try:
            batch.req_to_token_pool.alloc_aux_to_lengths(
                req_pool_indices_cpu=batch.req_pool_indices_cpu, target_seq_lens_cpu=after_cpu
            )
        except Exception:
            batch.tree_cache.token_to_kv_pool_allocator.free(slots)
            raise
    for req in batch.reqs:
        req.kv.kv_allocated_len += 1
        if later:
            req.kv.kv_committed_len += 1
    return slots


def write_cache_indices(
    out_cache_loc: Tensor,
    req_pool_indices_tensor: Tensor,
    req_pool_indices_cpu: Tensor,
    prefix_lens_tensor: Tensor,
    prefix_lens_cpu: Tensor,
    seq_lens_tensor: Tensor,
    seq_lens_cpu: Tensor,
    extend_lens_tensor: Tensor,
    extend_lens_cpu: Tensor,
    prefix_tensors: list[Tensor],
    req_to_token_pool: Any,
) -> None:
    """A prompt's slots to its row of the table: the cached prefix's, then the new tokens'."""
    table, rows, prefix = req_to_token_pool.req_to_token, req_pool_indices_tensor, prefix_lens_tensor
    cached = [t for t in prefix_tensors if len(t)]
    if cached:
        hal.write_req_to_token(table, rows, torch.zeros_like(prefix), prefix, torch.cat(cached))
    hal.write_req_to_token(table, rows, prefix, seq_lens_tensor, out_cache_loc)


def compute_position(
    attn_backend: str, extend_prefix_lens: Tensor, extend_seq_lens: Tensor, extend_seq_lens_sum: int
) -> tuple[Tensor, Tensor]:
    """(the positions of a step's tokens, where each request begins among them)."""
    lens, device = extend_prefix_lens, extend_prefix_lens.device
    positions = torch.empty(extend_seq_lens_sum, dtype=torch.int64, device=device)
    starts = torch.empty(lens.shape[0] + 1, dtype=extend_seq_lens.dtype, device=device)
    hal.compute_positions(lens, lens + extend_seq_lens, positions, starts)
    return positions, starts[:-1]
