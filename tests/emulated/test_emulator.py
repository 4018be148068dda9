"""The emulated device can tell: each fault that a device would show, late or as garbage, shows here, and each time."""

import ctypes
import os
import signal
import threading

import pytest
import torch
import triton.language as tl
from torch_npu._runtime import lib

from hal.triton import launch

npu = torch.npu


@launch.jit(do_not_specialize=("src", "dst", "n"))
def _copy(src, dst, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(dst + lane, tl.load(src + lane, mask=lane < n), mask=lane < n)


def far(value: int, device: str = "npu:0") -> torch.Tensor:
    return torch.full((64,), value, dtype=torch.int32, device="cpu").to(device)


def test_the_host_that_touches_device_memory_dies() -> None:
    t = far(1)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(t.data_ptr(), 4)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def test_a_copy_from_pinned_memory_is_late_and_one_from_pageable_memory_is_waited_for() -> None:
    source = torch.arange(64, dtype=torch.int32).pin_memory()
    late = torch.empty(64, dtype=torch.int32, device="npu")
    late.copy_(source, non_blocking=True)
    source.fill_(-1)
    assert late.cpu().eq(-1).all()
    pageable = torch.arange(64, dtype=torch.int32)
    late.copy_(pageable, non_blocking=True)
    pageable.fill_(-1)
    assert late.cpu().tolist() == list(range(64))


def test_a_result_is_in_pinned_memory_only_once_somebody_has_waited() -> None:
    out = torch.zeros(64, dtype=torch.int32).pin_memory()
    out.copy_(far(7), non_blocking=True)
    event = npu.Event()
    event.record()
    assert out.eq(0).all()
    event.synchronize()
    assert out.eq(7).all()


def test_another_stream_sees_it_only_behind_an_event() -> None:
    for waits in (False, True):
        t, out = far(1), torch.zeros(64, dtype=torch.int32).pin_memory()
        side = npu.Stream()
        t.fill_(2)
        if waits:
            side.wait_stream(npu.current_stream())
        with npu.stream(side):
            out.copy_(t, non_blocking=True)
        side.synchronize()
        assert out.eq(2 if waits else 1).all()


def test_a_freed_block_is_the_next_ones_whatever_another_stream_still_does_with_it() -> None:
    t, out = far(3), torch.zeros(64, dtype=torch.int32).pin_memory()
    side, address = npu.Stream(), t.data_ptr()
    with npu.stream(side):
        out.copy_(t, non_blocking=True)
    del t
    again = torch.empty(64, dtype=torch.int32, device="npu:0")
    assert again.data_ptr() == address
    npu.default_stream().synchronize()
    side.synchronize()
    assert not out.eq(3).any()


def test_a_block_that_another_stream_was_recorded_for_waits_for_it() -> None:
    t, out = far(3), torch.zeros(64, dtype=torch.int32).pin_memory()
    side = npu.Stream()
    with npu.stream(side):
        out.copy_(t, non_blocking=True)
    t.record_stream(side)
    del t
    npu.default_stream().synchronize()
    side.synchronize()
    assert out.eq(3).all()


def test_a_forked_process_has_no_device_that_its_parent_has_used() -> None:
    far(1)
    child = os.fork()
    if child == 0:
        try:
            far(1)
        except RuntimeError as e:
            os._exit(7 if "forked" in str(e) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_pinned_block_that_a_batch_reads_is_not_kept() -> None:
    out = [torch.empty(64, dtype=torch.int32, device="npu")]
    source = torch.full((64,), 5, dtype=torch.int32).pin_memory()
    torch._foreach_copy_(out, [source], non_blocking=True)
    del source
    assert not out[0].cpu().eq(5).any()


@pytest.mark.parametrize("batches", [True, False])
def test_pairs_go_in_a_batch_on_the_current_device_of_a_chip_that_has_it(batches: bool) -> None:
    lib.npu_batches(batches)
    try:
        for device in (0, 1):
            before = [lib.npu_count(i) for i in range(2)]
            out = [torch.zeros(64, dtype=torch.int32).pin_memory() for _ in range(3)]
            torch._foreach_copy_(out, [far(i, f"npu:{device}") for i in range(3)], non_blocking=True)
            npu.synchronize(device)
            assert [int(t[0]) for t in out] == [0, 1, 2]
            more = [lib.npu_count(i) - was for i, was in enumerate(before)]
            assert more == ([1, 0] if batches and device == 0 else [0, 3])
    finally:
        lib.npu_batches(True)


def test_devices_wait_for_each_other_where_bytes_go_between_them() -> None:
    a, b = far(1, "npu:0"), far(2, "npu:1")
    a.fill_(9)
    b.copy_(a)
    b.add_(1)
    assert b.cpu().eq(10).all()


def test_a_kernel_is_late_and_its_fault_is_whoevers_that_waits() -> None:
    a, b = far(1), far(0)
    _copy((1,), a, b, 64, BLOCK=64)
    a.fill_(4)
    assert lib.npu_put(0, 0) > lib.npu_done(0, 0)
    assert b.cpu().eq(1).all()
    _copy((1,), a[:32], b, 64, BLOCK=64)
    with pytest.raises(RuntimeError, match=r"_copy, program .*: read of 256 bytes .* past the end of src"):
        npu.synchronize()


def test_a_kernel_reaches_its_own_device_alone() -> None:
    a, b = far(1, "npu:1"), far(0, "npu:1")
    start = _copy.jit[(1,)]
    with pytest.raises(RuntimeError, match="src is on npu:1, the kernel starts on npu:0"):
        start(a, b, 64, BLOCK=64)
    with pytest.raises(ValueError, match="src is on cpu"):
        start(a.cpu(), b, 64, BLOCK=64)


def test_a_thread_begins_on_the_first_device_and_the_default_stream() -> None:
    seen = []
    with npu.stream(npu.Stream("npu:1")):
        run = lambda: seen.append((npu.current_device(), npu.current_stream(1).stream_id))  # noqa: E731
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert seen == [(0, 0)]
