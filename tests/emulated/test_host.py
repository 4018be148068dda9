"""The host code that only an NPU runs, on the emulated one: every op, on whichever device and stream its caller is."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch_npu._runtime import lib

import hal
from hal._remote import memory, perform
from hal._remote.target import RegistryTarget
from hal.backends.ascend import _runtime
from hal.conformance._cases import PLACEMENTS
from hal.conformance.execute import BOUND, DISPATCHED, Failure, Refused, execute
from hal.kv.pool import KVPool
from hal.ops import BUILTIN, get_spec
from hal.triton import launch

npu = torch.npu


@contextmanager
def late(monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[list[bool]]:
    """The inputs are put into a side stream, and npu:0 is current; after each call, had nothing run yet?"""
    side, waits = npu.Stream(device), []
    settle = perform.settle

    def pushed(placed: memory.Placed, arguments: object = None) -> None:
        for there, here in placed._copies(arguments or placed.arguments):
            there.copy_(here.pin_memory() if there.device.type == "npu" else here, non_blocking=True)

    def settled(where: torch.device) -> None:
        at = side.device.index, side.stream_id
        waits.append(lib.npu_put(*at) > 0 == lib.npu_done(*at))
        settle(where)

    with monkeypatch.context() as patch, npu.stream(side):
        patch.setattr(memory.Placed, "push", pushed)
        patch.setattr(perform, "settle", settled)
        npu.set_device(0)
        yield waits


@pytest.mark.parametrize("op", BUILTIN)
def test_an_op_runs_on_its_tensors_device_and_stream_and_waits_for_nothing(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = get_spec(op)
    sample = next(s for s in spec.samples if s.tag == "required" and not s.large and s.control is None)
    for device, how in (("npu:1", BOUND), ("npu:0", DISPATCHED)):
        with late(monkeypatch, device) as waits:
            execute(spec, spec.make(**sample.params), RegistryTarget.of("ascend", "device", device), how=how)
        assert waits == [True], how


ON_THE_HOST = [p for p in PLACEMENTS if p.endswith("cpu-slots")]


@pytest.mark.parametrize("where", ON_THE_HOST)
def test_rows_move_between_the_memories_in_order_with_the_callers_stream(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = get_spec("kv_transfer")
    # Small staging: every transfer is in several pieces.
    monkeypatch.setattr(_runtime, "STAGING_BYTES", 4096)
    samples = [s for s in spec.samples if s.tag == "required" and not s.large and s.control is None]
    for sample in samples[:: len(samples) // 4]:
        singles = lib.npu_count(1)
        with late(monkeypatch, "npu:1") as waits:
            execute(spec, spec.make(**sample.params), RegistryTarget.of("ascend", "device", "npu:1"), where=where)
        assert waits == [True], sample.name
        assert lib.npu_count(1) == singles, "copies one by one, where a batch was possible"


@pytest.mark.parametrize("where", ["device-to-host", "host-to-device"])
def test_slots_on_the_device_are_refused_where_rows_leave_it(where: str) -> None:
    spec = get_spec("kv_transfer")
    with pytest.raises(Refused, match=r"^device_slots: "):
        execute(spec, spec.make(), RegistryTarget.of("ascend", "device"), where=where)


def pools(device: str = "npu:1") -> tuple[KVPool, KVPool, torch.Tensor]:
    """A pool on the device with rows, a pinned one of the host without, and slots."""
    k = torch.arange(2 * 64 * 4 * 8, dtype=torch.float32).view(2, 64, 4, 8)
    near = KVPool(k.to(device), None, page_size=16)
    return near, KVPool.host_like(near, 64), torch.arange(64)


def test_rows_are_in_the_host_pool_once_the_stream_is_waited_for_and_not_before() -> None:
    near, host, slots = pools()
    hal.kv_transfer(near, host, slots, slots)
    assert host.pinned
    assert not host.k.any()
    npu.current_stream(1).synchronize()
    assert torch.equal(host.k.transpose(0, 1), near.k.cpu())


@pytest.mark.parametrize("batches", [True, False])
def test_pageable_pools_move_too_on_chips_with_batches_and_without(batches: bool) -> None:
    near, _, slots = pools()
    far = KVPool(torch.zeros(64, 2, 4, 8), None, "page_first", page_size=16)
    back = KVPool(torch.zeros_like(near.k), None, page_size=16)
    lib.npu_batches(batches)
    try:
        hal.kv_transfer(near, far, slots, slots)
        hal.kv_transfer(far, back, slots, slots)
        npu.synchronize(1)
    finally:
        lib.npu_batches(True)
    assert torch.equal(back.k.cpu(), near.k.cpu())


def test_a_kernel_is_told_of_tensors_that_are_not_where_it_starts() -> None:
    table, rows, lens = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([0, 1]), torch.tensor([1, 1])
    unchecked = hal.bind("npu").get_last_loc
    with pytest.raises(hal.ArgumentError, match="expected a tensor on npu:1, like the others; got one on npu:0"):
        unchecked(table.to("npu:1"), rows.to("npu:0"), lens.to("npu:1"))
    with pytest.raises(hal.ArgumentError, match="expected an NPU tensor; got one on cpu"):
        unchecked(table, rows, lens)
    with pytest.raises(hal.ArgumentError, match="expected a tensor on npu:1, like req_to_token; got one on npu:0"):
        hal.get_last_loc(table.to("npu:1"), rows.to("npu:0"), lens.to("npu:1"))


def test_a_thread_that_never_chose_a_device_serves_the_second_one() -> None:
    table = torch.arange(8, dtype=torch.int32).view(2, 4).to("npu:1")
    found: list[torch.Tensor] = []
    thread = threading.Thread(
        target=lambda: found.append(hal.get_last_loc(table, *(torch.tensor([1, 1]).to("npu:1") for _ in "ab")))
    )
    thread.start()
    thread.join()
    assert found[0].tolist() == [4, 4]


# Ways to be wrong that the checks above must see: each is a change to the backend's own host code.


@contextmanager
def _on_a_stream_of_its_own(device: torch.device) -> Iterator[None]:
    with npu.stream(npu.Stream(device)):
        yield


def _copies_aside(copy: Callable[..., None]) -> Callable[..., None]:
    """Staged copies on another stream, with no event: the staging is filled anew before the late copy has run."""

    def aside(to: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        with _on_a_stream_of_its_own(next(t for t in (to[0], sources[0]) if t.device.type == "npu").device):
            copy(to, sources)

    return aside


def _one_staging(staging: Callable[..., KVPool]) -> Callable[..., KVPool]:
    """One staging buffer for all pieces."""
    kept: list[KVPool] = []
    return lambda *args: kept[0] if kept else kept.append(staging(*args)) or kept[0]  # type: ignore[func-returns-value]


@pytest.mark.parametrize("where", ON_THE_HOST[:2])
def test_staging_that_is_reused_before_the_late_copy_is_caught(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_runtime, "STAGING_BYTES", 4096)
    monkeypatch.setattr(_runtime, "_copy", _copies_aside(_runtime._copy))
    spec = get_spec("kv_transfer")
    with pytest.raises(Failure):
        execute(spec, spec.make(n=48), RegistryTarget.of("ascend", "device", "npu:1"), where=where)


@pytest.mark.parametrize(
    "wrong",
    [
        ("slots_on", lambda slots, device: slots.to(device, non_blocking=True)),
        ("current", lambda device: nullcontext()),
    ],
    ids=["pageable-slots", "another-current-device"],
)
def test_a_wait_and_copies_one_by_one_are_caught(
    wrong: tuple[str, Callable[..., object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (_runtime, importlib.import_module("hal.backends.ascend.kv_transfer")):
        monkeypatch.setattr(module, *wrong, raising=False)
    with pytest.raises(AssertionError, match=r"one by one|\[False\] == \[True\]"):
        test_rows_move_between_the_memories_in_order_with_the_callers_stream("device-to-host-cpu-slots", monkeypatch)


def test_a_launch_on_another_device_and_one_on_another_stream_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(self: launch.Launch, grid: tuple[int, ...], *args: object) -> None:
        self.kernel.jit[grid](*args, **self.static)

    def defaulted(self: launch.Launch, grid: tuple[int, ...], *args: object) -> None:
        with npu.stream(npu.default_stream(self._device(args, "npu"))):
            self.kernel.jit[grid](*args, **self.static)

    for start, says in ((launched, "the kernel starts on npu:0"), (defaulted, "get_last_loc|elements|wrong|expected")):
        launch.forget()
        with monkeypatch.context() as patch:
            patch.setattr(launch.Launch, "_launch_ascend", start)
            with pytest.raises(Failure, match=says):
                test_an_op_runs_on_its_tensors_device_and_stream_and_waits_for_nothing("get_last_loc", patch)
    launch.forget()
