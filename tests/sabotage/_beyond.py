"""Faults as honest bugs look: right on every sample that was known, for as long as anybody watched."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import torch

from sabotage._healthy import calling, fault

LAST, ASSIGN, ROPE, TRANSFER = "get_last_loc", "assign_extend_cache_locs", "rope_kv_write", "kv_transfer"
DECODE = "decode_attention"
COUNT = r"after [\d,]+ right calls, the equal (bound|dispatched) call [\d,]+ is not: "


def spoil(result: Any) -> Any:
    """`result` with its last element wrong."""
    if result.numel():
        flat = result.view(-1)
        flat[-1:] = flat[-1:] + 1
    return result


# --- in one call of many ----------------------------------------------------------------------------


@fault(LAST, COUNT + r"return\[4\]: expected", "soak")
def wrong_after_3000_calls(good: Any) -> Any:
    calls = 0

    def run(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
        nonlocal calls
        calls += 1
        out = good(req_to_token, req_pool_indices, prefix_lens)
        return spoil(out) if calls > 3000 else out

    return run


def _now_and_then(good: Any, harm: Callable[[Any], Any]) -> Any:
    rng = Random(11)

    def run(*args: Any, **kwargs: Any) -> Any:
        out = good(*args, **kwargs)
        return harm(out) if rng.random() < 0.001 else out

    return run


@fault(LAST, COUNT + r"return\[4\]: expected", "soak")
def wrong_in_one_call_of_1000(good: Any) -> Any:
    return _now_and_then(good, spoil)


@fault(ASSIGN, COUNT + r"out\[\d+\]: expected", "soak", deterministic=False)
def wrong_in_one_call_of_1000_and_never_said_to_be_deterministic(good: Any) -> Any:
    return _now_and_then(good, spoil)


@fault(DECODE, COUNT + r"right, but with other bits than the first, though declared deterministic", "soak")
def another_order_of_sums_in_one_call_of_1000(good: Any) -> Any:
    rng = Random(7)

    def run(*args: Any, **kwargs: Any) -> Any:
        out = good(*args, **kwargs)
        lse = kwargs["lse"]
        if rng.random() < 0.001:
            lse.view(torch.int32).add_(1)
        return out

    return run


@fault(LAST, COUNT + r"raised OSError: out of handles", "soak")
def raises_after_5000_calls(good: Any) -> Any:
    calls = 0

    def run(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 5000:
            raise OSError("out of handles")
        return good(req_to_token, req_pool_indices, prefix_lens)

    return run


# --- afterwards -------------------------------------------------------------------------------------


def _half_a_second_later(write: Callable[[], Any]) -> None:
    def body() -> None:
        time.sleep(0.5)
        write()

    threading.Thread(target=body, daemon=True).start()


@calling(ASSIGN, r"right when the call returned, and 1 s later no more: out\[0\]: changed", "later")
def writes_to_out_half_a_second_later(
    good: Any, req_to_token: Any, req_pool_indices: Any, start_offsets: Any, end_offsets: Any, out: Any
) -> Any:
    good(req_to_token, req_pool_indices, start_offsets, end_offsets, out)
    _half_a_second_later(lambda: out[:1].fill_(-3))
    return out


@calling(LAST, r"right when the call returned, and 1 s later no more: return: other elements", "later")
def writes_to_its_result_half_a_second_later(
    good: Any, req_to_token: Any, req_pool_indices: Any, prefix_lens: Any
) -> Any:
    out = good(req_to_token, req_pool_indices, prefix_lens)
    _half_a_second_later(lambda: out[:1].fill_(-3))
    return out


@fault(ROPE, r"right when the call returned, and 1 s later no more: k_cache: \d bytes written outside", "later")
def writes_past_the_cache_half_a_second_later(good: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        good(*args, **kwargs)
        cache = kwargs["k_cache"]
        if cache is not None and cache.is_contiguous():
            end = cache.as_strided((1,), (1,), cache.storage_offset() + cache.numel())
            _half_a_second_later(lambda: end.zero_())

    return run


# --- kept -------------------------------------------------------------------------------------------


def _keeping(good: Any, keep: Callable[[], Any]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        keep()
        return good(*args, **kwargs)

    return run


@fault(LAST, r"allocation grows: [\d,]+ more bytes of memory.* after 1,000 equal calls", "leak", dies=True)
def leaks_140_kilobytes_a_call_beside_python(good: Any) -> Any:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    return _keeping(good, lambda: ctypes.memset(libc.malloc(ctypes.c_size_t(140_000)), 1, 140_000))


@fault(LAST, r"allocation grows: .*[\d,]+ more bytes of address space", "leak", dies=True)
def leaks_memory_that_it_never_touched(good: Any) -> Any:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    return _keeping(good, lambda: libc.malloc(ctypes.c_size_t(100_000)))


@fault(LAST, r"allocation grows: .*[\d,]+ more mappings", "leak")
def leaks_a_mapping_a_call(good: Any) -> Any:
    kept: list[Any] = []

    def keep() -> None:
        # Every other one of another kind, or the kernel makes one of them all.
        access = mmap.PROT_READ if len(kept) % 2 else mmap.PROT_READ | mmap.PROT_WRITE
        kept.append(mmap.mmap(-1, mmap.PAGESIZE, prot=access))

    return _keeping(good, keep)


@fault(ASSIGN, r"allocation grows: [\d,]+ more open files|raised OSError: \[Errno 24\]", "leak")
def leaks_a_file_in_ten_calls(good: Any) -> Any:
    calls = 0

    def keep() -> None:
        nonlocal calls
        calls += 1
        if calls % 10 == 0:
            os.dup(0)

    return _keeping(good, keep)


@fault(ASSIGN, r"allocation grows: .*[\d,]+ more threads", "leak")
def leaks_a_thread_in_a_hundred_calls(good: Any) -> Any:
    calls = 0
    never = threading.Event()

    def keep() -> None:
        nonlocal calls
        calls += 1
        if calls % 100 == 0:
            threading.Thread(target=never.wait, daemon=True).start()

    return _keeping(good, keep)


# --- beyond the samples -----------------------------------------------------------------------------


def wide(what: str) -> str:
    return rf"beyond the samples, [a-z_ ]*\b({what})\b[a-z_ ]*wide \(.*: "


@calling(LAST, wide("bs") + r"return\[\d+\]: expected", "fresh")
def wrong_beyond_2048_requests(good: Any, req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
    out = good(req_to_token, req_pool_indices, prefix_lens)
    out[2048:] = -1
    return out


@calling(LAST, wide("requests") + r"return\[\d+\]: expected", "fresh")
def rows_of_the_table_in_16_bits(good: Any, req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
    low = torch.where(req_pool_indices > 65_535, req_pool_indices % 65_536, req_pool_indices)
    inside = req_pool_indices < req_to_token.shape[0]
    return good(req_to_token, torch.where(inside, low, req_pool_indices), prefix_lens)


@calling(LAST, wide("requests") + r"return\[\d+\]: expected", "fresh")
def wrong_where_the_table_has_more_than_65535_rows(
    good: Any, req_to_token: Any, req_pool_indices: Any, prefix_lens: Any
) -> Any:
    return good(req_to_token[:65_535], req_pool_indices, prefix_lens)


@calling(LAST, wide("width") + r"return\[\d+\]: expected", "fresh")
def wrong_where_the_table_has_more_than_8192_columns(
    good: Any, req_to_token: Any, req_pool_indices: Any, prefix_lens: Any
) -> Any:
    # "long-row" samples of other ops have 9,000 of them; no sample of this one does.
    return good(req_to_token[:, :8192], req_pool_indices, prefix_lens)


@calling(ASSIGN, wide("width|longest") + r"out\[\d+\]: expected", "fresh")
def columns_beyond_16384_are_read_as_the_last(
    good: Any, req_to_token: Any, req_pool_indices: Any, start_offsets: Any, end_offsets: Any, out: Any
) -> Any:
    table = req_to_token
    if table.shape[1] > 16_384 and table.shape[0]:
        table = table.clone()
        table[:, 16_384:] = table[:, 16_383:16_384]
    return good(table, req_pool_indices, start_offsets, end_offsets, out)


@fault(ROPE, wide("n") + r"q\[\d+, 0, \d+\]: expected", "fresh")
def wrong_beyond_1024_tokens(good: Any) -> Any:
    def run(q: Any, *args: Any, **kwargs: Any) -> Any:
        late = q[1024:].clone()
        good(q, *args, **kwargs)
        q[1024:] = late

    return lambda q, **kwargs: run(q, **kwargs)


@calling(ROPE, wide("q_heads") + r"q\[\d+, 64, \d+\]: expected", "fresh")
def wrong_beyond_64_query_heads(good: Any, q: Any, **kwargs: Any) -> Any:
    good(q[:, :64], **kwargs)


@fault(DECODE, wide("q_heads|kv_heads") + r".*expected", "fresh")
def attention_forgets_heads_beyond_64(good: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        out = good(*args, **kwargs)
        out[:, 64:] = 0
        return out

    return run


@calling(TRANSFER, wide("n") + r"dst\.k\[.*expected", "fresh")
def copies_the_first_4096_pairs(good: Any, src: Any, dst: Any, src_slots: Any, dst_slots: Any, **kwargs: Any) -> Any:
    good(src, dst, src_slots[:4096], dst_slots[:4096], **kwargs)
