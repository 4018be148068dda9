"""Faults of paged allocation, its bookkeeping, and kv_write."""

from __future__ import annotations

from typing import Any

import torch

from sabotage._healthy import fault

WRITE, POSITIONS, INDICES = "write_req_to_token", "compute_positions", "build_kv_indices"
TABLE, EXTEND, DECODE = "build_page_table", "alloc_extend", "alloc_decode"
KV, BLOCKS = "kv_write", "build_kv_indices_from_blocks"


@fault(WRITE, r"req_to_token\[\d+, ?\d+\]: ")
def skipped_slots_are_written_as_minus_one(good: Any) -> Any:
    def run(req_to_token: Any, req_pool_indices: Any, start_offsets: Any, end_offsets: Any, src: Any) -> None:
        mark = torch.where(src < 0, torch.full_like(src, 2**31 - 1), src)
        good(req_to_token, req_pool_indices, start_offsets, end_offsets, mark)

    return run


@fault(WRITE, r"req_to_token\[\d+, ?\d+\]: ")
def a_skipped_slot_shifts_what_follows(good: Any) -> Any:
    def run(req_to_token: Any, req_pool_indices: Any, start_offsets: Any, end_offsets: Any, src: Any) -> None:
        packed = torch.cat([src[src >= 0], src[src < 0]])
        good(req_to_token, req_pool_indices, start_offsets, end_offsets, packed)

    return run


@fault(WRITE, r"req_to_token\[\d+, ?\d+\]: expected")
def the_last_token_is_not_noted(good: Any) -> Any:
    def run(req_to_token: Any, req_pool_indices: Any, start_offsets: Any, end_offsets: Any, src: Any) -> None:
        if src.shape[0] == 0:
            return
        short = src.clone()
        total = int((end_offsets.long() - start_offsets.long()).clamp(0, src.shape[0]).sum())
        short[max(0, min(total, src.shape[0]) - 1)] = -1
        good(req_to_token, req_pool_indices, start_offsets, end_offsets, short)

    return run


@fault(WRITE, r"req_to_token\[\d+, ?\d+\]: ")
def slots_beyond_int32_are_cut_to_32_bits(good: Any) -> Any:
    return lambda req_to_token, req_pool_indices, start_offsets, end_offsets, src: good(
        req_to_token, req_pool_indices, start_offsets, end_offsets, torch.where(src < 0, src, src & 0x7FFFFFFF)
    )


@fault(POSITIONS, r"out\[\d+\]: expected")
def positions_count_from_zero(good: Any) -> Any:
    return lambda prefix_lens, seq_lens, out, indptr=None: good(
        torch.zeros_like(prefix_lens), seq_lens - prefix_lens, out, indptr
    )


@fault(POSITIONS, r"indptr\[\d+\]: expected")
def the_last_sum_is_not_written(good: Any) -> Any:
    def run(prefix_lens: Any, seq_lens: Any, out: Any, indptr: Any = None) -> Any:
        was = None if indptr is None else indptr[-1:].clone()
        good(prefix_lens, seq_lens, out, indptr)
        if indptr is not None:
            indptr[-1:] = was
        return out

    return run


@fault(POSITIONS, r"indptr\[\d+\]: expected")
def sums_go_past_what_was_written(good: Any) -> Any:
    def run(prefix_lens: Any, seq_lens: Any, out: Any, indptr: Any = None) -> Any:
        good(prefix_lens, seq_lens, out, indptr)
        if indptr is not None:
            prefix, seq = prefix_lens.long(), seq_lens.long()
            ok = (prefix >= 0) & (seq >= prefix) & (seq < 2**31)
            indptr[1:] = torch.where(ok, seq - prefix, 0).cumsum(0).to(indptr.dtype)
        return out

    return run


@fault(INDICES, r"out\[\d+\]: ")
def the_rest_of_the_buffer_is_cleared(good: Any) -> Any:
    def run(
        req_to_token: Any, req_pool_indices: Any, kv_lens: Any, kv_indptr: Any, out: Any, kv_start: Any = None
    ) -> Any:
        good(req_to_token, req_pool_indices, kv_lens, kv_indptr, out, kv_start)
        out[int(kv_indptr[-1]) :] = -1
        return out

    return run


@fault(INDICES, r"out\[\d+\]: expected")
def the_window_s_start_is_ignored(good: Any) -> Any:
    return lambda req_to_token, req_pool_indices, kv_lens, kv_indptr, out, kv_start=None: good(
        req_to_token, req_pool_indices, kv_lens, kv_indptr, out
    )


@fault(INDICES, r"out\[\d+\]: expected -1, got")
def a_start_before_the_row_reads_from_its_first_token(good: Any) -> Any:
    return lambda req_to_token, req_pool_indices, kv_lens, kv_indptr, out, kv_start=None: good(
        req_to_token, req_pool_indices, kv_lens, kv_indptr, out, None if kv_start is None else kv_start.clamp(min=0)
    )


@fault(TABLE, r"out\[\d+, ?\d+\]: expected -1, got 0")
def pages_past_the_last_are_zero(good: Any) -> Any:
    def run(req_to_token: Any, req_pool_indices: Any, kv_lens: Any, page_size: int, out: Any) -> Any:
        good(req_to_token, req_pool_indices, kv_lens, page_size, out)
        return out.clamp_(min=0)

    return run


@fault(TABLE, r"out\[\d+, ?\d+\]: expected \d+, got -1")
def a_page_begun_is_left_out(good: Any) -> Any:
    return lambda req_to_token, req_pool_indices, kv_lens, page_size, out: good(
        req_to_token, req_pool_indices, kv_lens.clamp(0, req_to_token.shape[1]) // page_size * page_size, page_size, out
    )


@fault(TABLE, r"out\[\d+, ?\d+\]: expected")
def page_size_is_rounded_to_a_power_of_two(good: Any) -> Any:
    return lambda req_to_token, req_pool_indices, kv_lens, page_size, out: good(
        req_to_token, req_pool_indices, kv_lens, 1 << (page_size - 1).bit_length(), out
    )


@fault(EXTEND, r"out\[\d+\]: expected")
def a_request_takes_the_pages_of_the_one_before(good: Any) -> Any:
    def run(prefix_lens: Any, seq_lens: Any, last_loc: Any, free_pages: Any, page_size: int, out: Any) -> Any:
        # Each request reads the list from its front, as if it were alone.
        at, total = 0, torch.zeros(1, dtype=torch.int64, device=out.device)
        out.fill_(-1)
        for i in range(prefix_lens.shape[0]):
            p, s = int(prefix_lens[i]), int(seq_lens[i])
            n = min(max(s - p, 0) if p >= 0 and s < 2**31 else 0, out.shape[0] - at)
            one = slice(i, i + 1)
            total += good(prefix_lens[one], seq_lens[one], last_loc[one], free_pages, page_size, out[at : at + n])
            at += n
        return total

    return run


@fault(EXTEND, r"out\[\d+\]: expected")
def an_open_page_is_left_open(good: Any) -> Any:
    def run(prefix_lens: Any, seq_lens: Any, last_loc: Any, free_pages: Any, page_size: int, out: Any) -> Any:
        return good(prefix_lens, seq_lens, torch.full_like(last_loc, -1), free_pages, page_size, out)

    return run


@fault(EXTEND, r"out\[\d+\]: expected -1, got")
def too_few_pages_are_handed_out_again(good: Any) -> Any:
    def run(prefix_lens: Any, seq_lens: Any, last_loc: Any, free_pages: Any, page_size: int, out: Any) -> Any:
        again = free_pages.repeat(64) if 0 < free_pages.shape[0] < 4096 else free_pages
        return good(prefix_lens, seq_lens, last_loc, again, page_size, out)

    return run


@fault(EXTEND, r"return\[0\]: expected \d+, got \d+")
def the_total_stops_at_the_list_s_length(good: Any) -> Any:
    def run(prefix_lens: Any, seq_lens: Any, last_loc: Any, free_pages: Any, page_size: int, out: Any) -> Any:
        return good(prefix_lens, seq_lens, last_loc, free_pages, page_size, out).clamp(max=free_pages.shape[0])

    return run


@fault(EXTEND, r"free_pages\[\d+\]: changed, though the contract does not name it")
def takes_the_pages_out_of_the_list_itself(good: Any) -> Any:
    def run(prefix_lens: Any, seq_lens: Any, last_loc: Any, free_pages: Any, page_size: int, out: Any) -> Any:
        total = good(prefix_lens, seq_lens, last_loc, free_pages, page_size, out)
        free_pages[: int(total.clamp(max=free_pages.shape[0]))] = -1
        return total

    return run


@fault(DECODE, r"out\[\d+\]: expected")
def the_next_slot_without_looking_at_the_page(good: Any) -> Any:
    def run(seq_lens: Any, last_loc: Any, free_pages: Any, page_size: int, out: Any) -> Any:
        total = good(seq_lens, last_loc, free_pages, page_size, out)
        out.copy_(torch.where(last_loc >= 0, last_loc + 1, out))
        return total

    return run


@fault(DECODE, r"out\[\d+\]: expected -1, got")
def goes_on_after_a_slot_in_the_wrong_place(good: Any) -> Any:
    def run(seq_lens: Any, last_loc: Any, free_pages: Any, page_size: int, out: Any) -> Any:
        total = good(seq_lens, last_loc, free_pages, page_size, out)
        opens = (seq_lens.long() - 1) % page_size == 0
        sane = (seq_lens >= 1) & (last_loc >= 0) & (last_loc < 2**31 - 1) & ~opens
        out.copy_(torch.where(sane, last_loc.long() + 1, out.long()))
        return total

    return run


@fault(DECODE, r"return\[0\]: expected \d+, got \d+|return: expected")
def counts_the_requests_instead_of_the_pages(good: Any) -> Any:
    def run(seq_lens: Any, last_loc: Any, free_pages: Any, page_size: int, out: Any) -> Any:
        good(seq_lens, last_loc, free_pages, page_size, out)
        return torch.full((1,), seq_lens.shape[0], dtype=torch.int64, device=out.device)

    return run


# --- build_kv_indices_from_blocks -------------------------------------------------------------------


def _from_blocks(change: Any) -> Any:
    """The healthy op on arguments that `change` has altered."""

    def broken(good: Any) -> Any:
        def run(
            block_table: Any,
            kv_lens: Any,
            page_size: int,
            kv_indptr: Any,
            out: Any,
            kv_start: Any = None,
            *,
            keep_last: int = -1,
        ) -> Any:
            a = {"block_table": block_table, "kv_lens": kv_lens, "page_size": page_size, "kv_start": kv_start}
            a = {**a, "keep_last": keep_last}
            return good(**{**a, "kv_indptr": kv_indptr, "out": out, **change(a)})

        return run

    return broken


@fault(BLOCKS, r"out\[\d+\]: expected -1, got")
def a_block_that_is_none_is_the_first(good: Any) -> Any:
    return _from_blocks(lambda a: {"block_table": a["block_table"].clamp(min=0)})(good)


@fault(BLOCKS, r"out\[\d+\]: expected")
def blocks_are_rounded_up_to_a_power_of_two(good: Any) -> Any:
    return _from_blocks(lambda a: {"page_size": 1 << (a["page_size"] - 1).bit_length()})(good)


@fault(BLOCKS, r"out\[\d+\]: expected")
def a_start_inside_a_block_is_its_beginning(good: Any) -> Any:
    def begun(a: Any) -> Any:
        start, page = a["kv_start"], a["page_size"]
        return {} if start is None else {"kv_start": start // page * page}

    return _from_blocks(begun)(good)


@fault(BLOCKS, r"(out|kv_indptr)\[\d+\]: expected")
def the_window_is_ignored(good: Any) -> Any:
    return _from_blocks(lambda a: {"keep_last": -1})(good)


@fault(BLOCKS, r"out\[\d+\]: expected")
def the_first_tokens_are_kept_and_not_the_last(good: Any) -> Any:
    def first(a: Any) -> Any:
        if a["keep_last"] < 0:
            return {}
        lens = a["kv_lens"]
        return {"kv_lens": lens.clamp(max=min(a["keep_last"], 2**31 - 1)).where(lens < 2**31, 0).to(lens.dtype)}

    return _from_blocks(first)(good)


def _after(change: Any) -> Any:
    """The healthy op, after which `change` spoils what it wrote: (table, lens, page size, indptr, out, start, keep)."""

    def broken(good: Any) -> Any:
        def run(
            block_table: Any,
            kv_lens: Any,
            page_size: int,
            kv_indptr: Any,
            out: Any,
            kv_start: Any = None,
            *,
            keep_last: int = -1,
        ) -> Any:
            good(block_table, kv_lens, page_size, kv_indptr, out, kv_start, keep_last=keep_last)
            change(block_table, kv_lens, page_size, kv_indptr, out)
            return out

        return run

    return broken


@fault(BLOCKS, r"out\[\d+\]: changed, though the contract does not name it")
def the_block_begun_is_listed_to_its_end(good: Any) -> Any:
    def longer(table: Any, lens: Any, page: int, indptr: Any, out: Any) -> None:
        end, n = int(indptr[-1]), lens.shape[0]
        if 0 < end < out.shape[0] and n and int(out[end - 1]) >= 0:
            out[end : end + (page - 1 - int(out[end - 1]) % page)] = 7

    return _after(longer)(good)


@fault(BLOCKS, r"kv_indptr\[\d+\]: expected")
def sums_count_blocks(good: Any) -> Any:
    def blocks(table: Any, lens: Any, page: int, indptr: Any, out: Any) -> None:
        n = lens.long().clamp(0, table.shape[1] * page)
        indptr[1:] = ((n + page - 1) // page).cumsum(0).clamp(max=out.shape[0]).to(indptr.dtype)

    return _after(blocks)(good)


@fault(BLOCKS, r"kv_indptr\[\d+\]: expected")
def sums_go_past_the_buffer(good: Any) -> Any:
    def past(table: Any, lens: Any, page: int, indptr: Any, out: Any) -> None:
        if indptr.shape[0] > 1 and int(indptr[-1]) == out.shape[0]:
            indptr[-1] += 1

    return _after(past)(good)


# --- kv_write ---------------------------------------------------------------------------------------


@fault(KV, r"v_cache\[.*\]: expected")
def v_is_never_written_without_rope(good: Any) -> Any:
    def run(
        k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, *, k_scale: Any = None, v_scale: Any = None
    ) -> None:
        bits = v_cache.view(torch.uint8) if v_cache.dtype.itemsize == 1 else v_cache
        was = bits.clone()
        good(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)
        bits.copy_(was)

    return run


@fault(KV, r"[kv]_cache\[.*\]: expected")
def the_scales_are_exchanged(good: Any) -> Any:
    return lambda k, v, k_cache, v_cache, slots, *, k_scale=None, v_scale=None: good(
        k, v, k_cache, v_cache, slots, k_scale=v_scale, v_scale=k_scale
    )


@fault(KV, r"k_cache\[.*\]: changed, though the contract does not name it")
def minus_one_is_the_last_slot(good: Any) -> Any:
    def run(
        k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, *, k_scale: Any = None, v_scale: Any = None
    ) -> None:
        size = k_cache.shape[0] * (k_cache.shape[1] if k_cache.ndim == 4 else 1)
        wrapped = torch.where(slots == -1, max(size - 1, 0), slots).to(slots.dtype)
        good(k, v, k_cache, v_cache, wrapped, k_scale=k_scale, v_scale=v_scale)

    return run
