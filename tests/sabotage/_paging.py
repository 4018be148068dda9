"""Faults of paged allocation, its bookkeeping, and kv_write."""

from __future__ import annotations

from typing import Any

import torch

from sabotage._healthy import calling, changing, spoiling

WRITE, POSITIONS, INDICES = "write_req_to_token", "compute_positions", "build_kv_indices"
TABLE, EXTEND, DECODE = "build_page_table", "alloc_extend", "alloc_decode"
KV, BLOCKS = "kv_write", "build_kv_indices_from_blocks"
Arguments = dict[str, Any]


@changing(WRITE, r"req_to_token\[\d+, ?\d+\]: ")
def skipped_slots_are_written_as_minus_one(a: Arguments) -> None:
    a["src"] = torch.where(a["src"] < 0, torch.full_like(a["src"], 2**31 - 1), a["src"])


@changing(WRITE, r"req_to_token\[\d+, ?\d+\]: ")
def a_skipped_slot_shifts_what_follows(a: Arguments) -> None:
    a["src"] = torch.cat([a["src"][a["src"] >= 0], a["src"][a["src"] < 0]])


@changing(WRITE, r"req_to_token\[\d+, ?\d+\]: expected")
def the_last_token_is_not_noted(a: Arguments) -> None:
    size = a["src"].shape[0]
    if size:
        a["src"] = a["src"].clone()
        total = int((a["end_offsets"].long() - a["start_offsets"].long()).clamp(0, size).sum())
        a["src"][max(0, min(total, size) - 1)] = -1


@changing(WRITE, r"req_to_token\[\d+, ?\d+\]: ")
def slots_beyond_int32_are_cut_to_32_bits(a: Arguments) -> None:
    a["src"] = torch.where(a["src"] < 0, a["src"], a["src"] & 0x7FFFFFFF)


@changing(POSITIONS, r"out\[\d+\]: expected")
def positions_count_from_zero(a: Arguments) -> None:
    a["seq_lens"] = a["seq_lens"] - a["prefix_lens"]
    a["prefix_lens"] = torch.zeros_like(a["prefix_lens"])


@calling(POSITIONS, r"indptr\[\d+\]: expected")
def the_last_sum_is_not_written(good: Any, prefix_lens: Any, seq_lens: Any, out: Any, indptr: Any = None) -> Any:
    was = None if indptr is None else indptr[-1:].clone()
    good(prefix_lens, seq_lens, out, indptr)
    if indptr is not None:
        indptr[-1:] = was
    return out


@spoiling(POSITIONS, r"indptr\[\d+\]: expected")
def sums_go_past_what_was_written(a: Arguments, found: Any) -> None:
    if a["indptr"] is not None:
        prefix, seq = a["prefix_lens"].long(), a["seq_lens"].long()
        ok = (prefix >= 0) & (seq >= prefix) & (seq < 2**31)
        a["indptr"][1:] = torch.where(ok, seq - prefix, 0).cumsum(0).to(a["indptr"].dtype)


@spoiling(INDICES, r"out\[\d+\]: ")
def the_rest_of_the_buffer_is_cleared(a: Arguments, found: Any) -> None:
    a["out"][int(a["kv_indptr"][-1]) :] = -1


@changing(INDICES, r"out\[\d+\]: expected")
def the_window_s_start_is_ignored(a: Arguments) -> None:
    a["kv_start"] = None


@changing(INDICES, r"out\[\d+\]: expected -1, got")
def a_start_before_the_row_reads_from_its_first_token(a: Arguments) -> None:
    a["kv_start"] = None if a["kv_start"] is None else a["kv_start"].clamp(min=0)


@changing(INDICES, r"out\[\d+\]: ")
def sums_that_are_given_are_made_anew(a: Arguments) -> None:
    if a["given_indptr"] is not None:
        a["kv_indptr"], a["given_indptr"] = torch.empty_like(a["given_indptr"]), None


@changing(INDICES, r"out\[\d+\]: ")
def a_list_that_begins_before_the_buffer_begins_with_it(a: Arguments) -> None:
    if a["given_indptr"] is not None:
        a["given_indptr"] = a["given_indptr"].clamp(min=0)


@calling(INDICES, r"out\[\d+\]: ")
def a_list_runs_on_into_the_next(good: Any, **a: Any) -> Any:
    given, out = a["given_indptr"], a["out"]
    if given is None:
        return good(**a)
    for i in reversed(range(given.shape[0] - 1)):
        one = {n: a[n][i : i + 1] for n in ("req_pool_indices", "kv_lens", "kv_start") if a[n] is not None}
        end = torch.full_like(given[:1], out.shape[0])
        good(**{**a, **one, "given_indptr": torch.cat([given[i : i + 1], end])})
    return out


@spoiling(TABLE, r"out\[\d+, ?\d+\]: expected -1, got 0")
def pages_past_the_last_are_zero(a: Arguments, found: Any) -> None:
    a["out"].clamp_(min=0)


@changing(TABLE, r"out\[\d+, ?\d+\]: expected \d+, got -1")
def a_page_begun_is_left_out(a: Arguments) -> None:
    page = a["page_size"]
    a["kv_lens"] = a["kv_lens"].clamp(0, a["req_to_token"].shape[1]) // page * page


@changing(TABLE, r"out\[\d+, ?\d+\]: expected")
def page_size_is_rounded_to_a_power_of_two(a: Arguments) -> None:
    a["page_size"] = 1 << (a["page_size"] - 1).bit_length()


@calling(EXTEND, r"out\[\d+\]: expected")
def a_request_takes_the_pages_of_the_one_before(
    good: Any, prefix_lens: Any, seq_lens: Any, last_loc: Any, free_pages: Any, page_size: int, out: Any
) -> Any:
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


@changing(EXTEND, r"out\[\d+\]: expected")
def an_open_page_is_left_open(a: Arguments) -> None:
    a["last_loc"] = torch.full_like(a["last_loc"], -1)


@changing(EXTEND, r"out\[\d+\]: expected -1, got")
def too_few_pages_are_handed_out_again(a: Arguments) -> None:
    if 0 < a["free_pages"].shape[0] < 4096:
        a["free_pages"] = a["free_pages"].repeat(64)


@spoiling(EXTEND, r"return\[0\]: expected \d+, got \d+")
def the_total_stops_at_the_list_s_length(a: Arguments, found: Any) -> Any:
    return found.clamp(max=a["free_pages"].shape[0])


@spoiling(EXTEND, r"free_pages\[\d+\]: changed, though the contract does not name it")
def takes_the_pages_out_of_the_list_itself(a: Arguments, found: Any) -> None:
    a["free_pages"][: int(found.clamp(max=a["free_pages"].shape[0]))] = -1


@spoiling(DECODE, r"out\[\d+\]: expected")
def the_next_slot_without_looking_at_the_page(a: Arguments, found: Any) -> None:
    a["out"].copy_(torch.where(a["last_loc"] >= 0, a["last_loc"] + 1, a["out"]))


@spoiling(DECODE, r"out\[\d+\]: expected -1, got")
def goes_on_after_a_slot_in_the_wrong_place(a: Arguments, found: Any) -> None:
    lens, last = a["seq_lens"], a["last_loc"]
    opens = (lens.long() - 1) % a["page_size"] == 0
    sane = (lens >= 1) & (last >= 0) & (last < 2**31 - 1) & ~opens
    a["out"].copy_(torch.where(sane, last.long() + 1, a["out"].long()))


@spoiling(DECODE, r"return\[0\]: expected \d+, got \d+|return: expected")
def counts_the_requests_instead_of_the_pages(a: Arguments, found: Any) -> Any:
    return torch.full((1,), a["seq_lens"].shape[0], dtype=torch.int64, device=a["out"].device)


# --- build_kv_indices_from_blocks -------------------------------------------------------------------


@changing(BLOCKS, r"out\[\d+\]: expected -1, got")
def a_block_that_is_none_is_the_first(a: Arguments) -> None:
    a["block_table"] = a["block_table"].clamp(min=0)


@changing(BLOCKS, r"out\[\d+\]: expected")
def blocks_are_rounded_up_to_a_power_of_two(a: Arguments) -> None:
    a["page_size"] = 1 << (a["page_size"] - 1).bit_length()


@changing(BLOCKS, r"out\[\d+\]: expected")
def a_start_inside_a_block_is_its_beginning(a: Arguments) -> None:
    if a["kv_start"] is not None:
        a["kv_start"] = a["kv_start"] // a["page_size"] * a["page_size"]


@changing(BLOCKS, r"(out|kv_indptr)\[\d+\]: expected")
def the_window_is_ignored(a: Arguments) -> None:
    a["keep_last"] = -1


@changing(BLOCKS, r"out\[\d+\]: expected")
def the_first_tokens_are_kept_and_not_the_last(a: Arguments) -> None:
    lens = a["kv_lens"]
    if a["keep_last"] >= 0:
        a["kv_lens"] = lens.clamp(max=min(a["keep_last"], 2**31 - 1)).where(lens < 2**31, 0).to(lens.dtype)


@spoiling(BLOCKS, r"out\[\d+\]: changed, though the contract does not name it")
def the_block_begun_is_listed_to_its_end(a: Arguments, found: Any) -> None:
    out, end = a["out"], int(a["kv_indptr"][-1])
    if 0 < end < out.shape[0] and a["kv_lens"].shape[0] and int(out[end - 1]) >= 0:
        out[end : end + (a["page_size"] - 1 - int(out[end - 1]) % a["page_size"])] = 7


@spoiling(BLOCKS, r"kv_indptr\[\d+\]: expected")
def sums_count_blocks(a: Arguments, found: Any) -> None:
    page, indptr = a["page_size"], a["kv_indptr"]
    n = a["kv_lens"].long().clamp(0, a["block_table"].shape[1] * page)
    indptr[1:] = ((n + page - 1) // page).cumsum(0).clamp(max=a["out"].shape[0]).to(indptr.dtype)


@spoiling(BLOCKS, r"kv_indptr\[\d+\]: expected")
def sums_go_past_the_buffer(a: Arguments, found: Any) -> None:
    indptr = a["kv_indptr"]
    if indptr.shape[0] > 1 and int(indptr[-1]) == a["out"].shape[0]:
        indptr[-1] += 1


# --- kv_write ---------------------------------------------------------------------------------------


@calling(KV, r"v_cache\[.*\]: expected")
def v_is_never_written_without_rope(
    good: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, **scales: Any
) -> None:
    bits = v_cache.view(torch.uint8) if v_cache.dtype.itemsize == 1 else v_cache
    was = bits.clone()
    good(k, v, k_cache, v_cache, slots, **scales)
    bits.copy_(was)


@changing(KV, r"[kv]_cache\[.*\]: expected")
def the_scales_are_exchanged(a: Arguments) -> None:
    a["k_scale"], a["v_scale"] = a["v_scale"], a["k_scale"]


@changing(KV, r"k_cache\[.*\]: changed, though the contract does not name it")
def minus_one_is_the_last_slot(a: Arguments) -> None:
    cache, slots = a["k_cache"], a["slots"]
    size = cache.shape[0] * (cache.shape[1] if cache.ndim == 4 else 1)
    a["slots"] = torch.where(slots == -1, max(size - 1, 0), slots).to(slots.dtype)
