"""Faults of get_last_loc and assign_extend_cache_locs."""

from __future__ import annotations

from typing import Any

import torch

from hal.ops import get_spec
from sabotage._healthy import calling, fault

LAST, ASSIGN = "get_last_loc", "assign_extend_cache_locs"


@fault(LAST, r"return\[0\]: expected \d+, got \d+")
def off_by_one_slot(good: Any) -> Any:
    return lambda req_to_token, req_pool_indices, prefix_lens: good(
        req_to_token, req_pool_indices, (prefix_lens + 1).clamp(max=req_to_token.shape[1])
    )


@fault(LAST, r"return\[\d+\]: expected -1, got")
def empty_prefix_reads_the_first_token(good: Any) -> Any:
    return lambda req_to_token, req_pool_indices, prefix_lens: good(
        req_to_token, req_pool_indices, torch.where(prefix_lens == 0, 1, prefix_lens)
    )


@fault(LAST, r"return\[\d+\]: expected -1, got")
def too_long_a_prefix_is_clamped(good: Any) -> Any:
    return lambda req_to_token, req_pool_indices, prefix_lens: good(
        req_to_token, req_pool_indices, prefix_lens.clamp(max=req_to_token.shape[1])
    )


@calling(LAST, r"return\[\d+\]: expected -1, got")
def request_out_of_range_wraps_around(good: Any, req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
    rows = req_to_token.shape[0]
    return good(req_to_token, req_pool_indices % rows if rows else req_pool_indices, prefix_lens)


@fault(LAST, r"return: expected i32\[\d+\], got i64")
def result_in_another_dtype(good: Any) -> Any:
    return lambda *a, **k: good(*a, **k).to(torch.int64)


@fault(LAST, r"return: expected a tensor on (cpu|cuda), got one on meta")
def output_allocated_on_another_device(good: Any) -> Any:
    return lambda *a, **k: good(*a, **k).to("meta")


@calling(LAST, r"req_pool_indices\[\d+\]: changed, though the contract does not name it")
def mutates_the_index_tensor(good: Any, req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
    out = good(req_to_token, req_pool_indices, prefix_lens)
    req_pool_indices.clamp_(0, max(req_to_token.shape[0] - 1, 0))
    return out


@calling(LAST, r"large|died|expected|raised", "large", dies=True)
def offset_in_32_bits(good: Any, req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
    rows, width = req_to_token.shape
    if not rows or not width:
        return torch.full_like(prefix_lens, -1)
    ok = (req_pool_indices >= 0) & (req_pool_indices < rows) & (prefix_lens > 0) & (prefix_lens <= width)
    row, column = torch.where(ok, req_pool_indices, 0), torch.where(ok, prefix_lens.long(), 1) - 1
    wrapped = (row.long() * req_to_token.stride(0) + column + 2**31) % 2**32 - 2**31
    size = (rows - 1) * req_to_token.stride(0) + width
    flat = req_to_token.as_strided((size,), (1,))
    return torch.where(ok, flat[wrapped.clamp(0, size - 1)].to(prefix_lens.dtype), -1)


@calling(LAST, r"return\[\d+\]: expected")
def row_stride_taken_for_the_width(good: Any, req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
    rows, width = req_to_token.shape
    packed = req_to_token.as_strided((rows, width), (width, 1)) if rows and width else req_to_token
    return good(packed, req_pool_indices, prefix_lens)


@fault(LAST, r"return: expected i64\[5\], got|return\[\d+\]: expected|raised", "sequence", "value")
def stale_launch_cache(good: Any) -> Any:
    kept: dict[str, int] = {}

    def run(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
        bs = prefix_lens.shape[0]
        n = kept.setdefault(f"{prefix_lens.dtype}{req_to_token.is_contiguous()}", bs)
        out = torch.full_like(prefix_lens, -1)
        out[:n] = good(req_to_token, req_pool_indices[:n], prefix_lens[:n])
        return out

    return run


@fault(LAST, r"race between threads", "threads")
def race_between_threads(good: Any) -> Any:
    scratch: dict[str, Any] = {}

    def run(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
        scratch["requests"], scratch["lens"] = req_pool_indices, prefix_lens
        torch.empty(1 << 12).random_()
        return good(req_to_token, scratch["requests"], scratch["lens"])

    return run


@fault(LAST, r"allocation grows: [\d,]+ more tensors alive", "leak")
def keeps_every_result(good: Any) -> Any:
    kept: list[Any] = []

    def run(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
        kept.append(good(req_to_token, req_pool_indices, prefix_lens))
        return kept[-1].clone()

    return run


@calling(LAST, r"fell back in secret: the bound call ran hal's reference's code")
def falls_back_in_secret(good: Any, req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
    return get_spec(LAST).reference(req_to_token, req_pool_indices, prefix_lens)


@calling(LAST, r"supports said yes, and the bound call raised NotImplementedError")
def supports_says_yes_and_raises(good: Any, req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
    if prefix_lens.dtype == torch.int32:
        raise NotImplementedError("int32 lengths")
    return good(req_to_token, req_pool_indices, prefix_lens)


@fault(
    LAST,
    r"supports refuses what is required: int32 lengths",
    supports=lambda sig: "int32 lengths" if sig["prefix_lens"].dtype == torch.int32 else None,
)
def supports_refuses_what_is_required(good: Any) -> Any:
    return good


@fault(LAST, r"return: expected a tensor, got NoneType")
def does_nothing_at_all(good: Any) -> Any:
    return lambda req_to_token, req_pool_indices, prefix_lens: None


@calling(LAST, r"the process died \(SIGSEGV\)", "pages", device=("cpu",), dies=True)
def reads_past_the_end(good: Any, req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
    rows, width = req_to_token.shape
    if rows and width:
        # The value is read and thrown away: only the page after the table notices.
        import ctypes

        end = req_to_token.data_ptr() + ((rows - 1) * req_to_token.stride(0) + width) * 4
        ctypes.c_int32.from_address(end).value  # noqa: B018
    return good(req_to_token, req_pool_indices, prefix_lens)


@calling(LAST, r"hung: no call ended for", dies=True)
def hangs(good: Any, req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
    import time

    time.sleep(3600)


@calling(LAST, r"the process died \(exit code 0\)", dies=True)
def ends_the_process_as_if_all_were_well(good: Any, req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
    import os

    os._exit(0)


# --- assign_extend_cache_locs -----------------------------------------------------------------------


@calling(ASSIGN, r"out\[\d+\]: expected -1, got .*never written")
def unwritten_tail(
    good: Any, req_to_token: Any, req_pool_indices: Any, start_offsets: Any, end_offsets: Any, out: Any
) -> Any:
    before = out.clone()
    good(req_to_token, req_pool_indices, start_offsets, end_offsets, out)
    used = int((end_offsets.long() - start_offsets.long()).clamp(0, out.shape[0]).sum())
    out[used:] = before[used:]
    return out


@calling(ASSIGN, r"out: \d+ bytes written outside the tensor, 0 bytes past the end")
def write_past_the_end(
    good: Any, req_to_token: Any, req_pool_indices: Any, start_offsets: Any, end_offsets: Any, out: Any
) -> Any:
    good(req_to_token, req_pool_indices, start_offsets, end_offsets, out)
    out.as_strided((1,), (1,), out.storage_offset() + out.shape[0]).fill_(-7)
    return out


@calling(ASSIGN, r"out: \d+ bytes written outside the tensor, 8 bytes before it")
def write_before_the_start(
    good: Any, req_to_token: Any, req_pool_indices: Any, start_offsets: Any, end_offsets: Any, out: Any
) -> Any:
    good(req_to_token, req_pool_indices, start_offsets, end_offsets, out)
    if out.dtype == torch.int64:
        out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(-7)
    return out


@calling(ASSIGN, r"out\[\d+\]: expected")
def negative_length_shifts_what_follows(
    good: Any, req_to_token: Any, req_pool_indices: Any, start_offsets: Any, end_offsets: Any, out: Any
) -> Any:
    odd = (end_offsets < start_offsets) & (start_offsets < 2**20)
    return good(req_to_token, req_pool_indices, start_offsets, torch.where(odd, start_offsets + 1, end_offsets), out)


@fault(ASSIGN, r"return: expected out itself, got another tensor")
def returns_a_copy(good: Any) -> Any:
    return lambda *a, **k: good(*a, **k).clone()


@calling(ASSIGN, r"out\[\d+\]: expected")
def only_the_first_block_of_requests(
    good: Any, req_to_token: Any, req_pool_indices: Any, start_offsets: Any, end_offsets: Any, out: Any
) -> Any:
    n = 1024
    return good(req_to_token, req_pool_indices[:n], start_offsets[:n], end_offsets[:n], out)


@calling(ASSIGN, r"out\[\d+\]: expected", "value", "ragged")
def sum_of_lengths_wraps_in_32_bits(
    good: Any, req_to_token: Any, req_pool_indices: Any, start_offsets: Any, end_offsets: Any, out: Any
) -> Any:
    length = end_offsets.long() - start_offsets.long()
    wrapped = (length + 2**31) % 2**32 - 2**31
    end = torch.where(length > 2**31, start_offsets.long() + wrapped, end_offsets.long())
    return good(req_to_token, req_pool_indices, start_offsets.long(), end, out)


# --- those that need a device -----------------------------------------------------------------------


@calling(LAST, r"hidden synchronisation", "sync", device=("cuda",))
def hidden_synchronisation(good: Any, req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
    out = good(req_to_token, req_pool_indices, prefix_lens)
    torch.cuda.current_stream().synchronize()
    return out


@calling(LAST, r"hidden synchronisation", "sync", device=("cuda",))
def hidden_host_copy(good: Any, req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
    return good(req_to_token, req_pool_indices.cpu().to(req_to_token.device), prefix_lens)


@fault(LAST, r"replay \d of a captured graph", "graph", device=("cuda",))
def breaks_on_the_second_graph_replay(good: Any) -> Any:
    def run(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
        out = good(req_to_token, req_pool_indices, prefix_lens)
        # Right once: what a replay reads is what the last one left behind.
        prefix_lens_was = run.__dict__.setdefault("kept", torch.zeros_like(prefix_lens))
        if prefix_lens_was.shape == prefix_lens.shape and torch.cuda.is_current_stream_capturing():
            out += prefix_lens_was
            prefix_lens_was.add_(1)
        return out

    return run


@calling(LAST, r"on a side stream|between a slow producer", "stream", "overlap", device=("cuda",))
def runs_on_the_default_stream(good: Any, req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
    with torch.cuda.stream(torch.cuda.default_stream()):
        return good(req_to_token, req_pool_indices, prefix_lens)


@fault(LAST, r"holds \d+ bytes of device memory", "memory", device=("cuda",))
def keeps_device_memory(good: Any) -> Any:
    kept: list[Any] = []

    def run(req_to_token: Any, req_pool_indices: Any, prefix_lens: Any) -> Any:
        kept.append(torch.empty(1 << 16, device=prefix_lens.device))
        return good(req_to_token, req_pool_indices, prefix_lens)

    return run
