"""The host code that only an NPU runs, on the emulated one: every op on whichever device and stream its caller is on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch_npu._runtime import lib

from hal._remote import memory, perform
from hal._remote.target import RegistryTarget
from hal.backends.ascend import _runtime
from hal.conformance._cases import PLACEMENTS
from hal.conformance.execute import BOUND, DISPATCHED, Refused, execute
from hal.ops import BUILTIN, get_spec

npu = torch.npu


@contextmanager
def late(monkeypatch: pytest.MonkeyPatch, device: str) -> Iterator[list[bool]]:
    """The inputs are put into a side stream, and npu:0 is current; was that stream still waiting after each call?"""
    side, waits = npu.Stream(device), []
    settle = perform.settle

    def pushed(placed: memory.Placed, arguments: object = None) -> None:
        for there, here in placed._copies(arguments or placed.arguments):
            there.copy_(here.pin_memory() if there.device.type == "npu" else here, non_blocking=True)

    def settled(where: torch.device) -> None:
        at = side.device.index, side.stream_id
        waits.append(lib.npu_put(*at) > lib.npu_done(*at))
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


@pytest.mark.parametrize("where", PLACEMENTS)
def test_rows_move_between_the_memories_in_order_with_the_callers_stream(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = get_spec("kv_transfer")
    # Small staging: every transfer is in several pieces.
    monkeypatch.setattr(_runtime, "STAGING_BYTES", 4096)
    samples = [s for s in spec.samples if s.tag == "required" and not s.large and s.control is None]
    for sample in samples[:: len(samples) // 4]:
        if where == "host-to-host":
            continue
        singles = lib.npu_count(1)
        with late(monkeypatch, "npu:1") as waits:
            try:
                execute(
                    spec,
                    spec.make(**sample.params),
                    RegistryTarget.of("ascend", "device", "npu:1"),
                    where=where,
                )
            except Refused as e:
                assert str(e).startswith("device_slots")
                assert "host" in where and "cpu-slots" not in where
                continue
        assert waits == [True], sample.name
        assert lib.npu_count(1) == singles, "copies one by one, where a batch was possible"
