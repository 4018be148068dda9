"""Every op on a device that is not the current one: alone, in threads, and in processes that share a cache folder.

The last two on one device as well: two threads that share its caches, two contexts that share a folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from hal._remote.perform import Hands
from hal._remote.target import RegistryTarget
from hal.conformance._arena import Arena
from hal.conformance._hands import Local
from hal.conformance.execute import DISPATCHED, Executor, Refused
from hal.ops import BUILTIN, get_spec

OPS = sorted(BUILTIN)
SAMPLES = 4


def judge(op: str, backend: str, device: str) -> int:
    """How many of an op's samples were called on the device and judged, by memory that no other thread uses."""
    spec = get_spec(op)
    caller = Local(RegistryTarget.of(backend, "device", device))
    caller.arena = Arena()
    caller.hands = Hands(caller.target, caller.arena.memory)
    executor = Executor(caller, spec)
    called = 0
    required = [s for s in spec.samples if s.tag == "required" and not s.large]
    for sample in required[:: max(1, len(required) // SAMPLES)][:SAMPLES]:
        arguments = spec.make(**sample.params)
        try:
            executor.execute(arguments, spec.oracle(arguments), DISPATCHED)
        except Refused:
            continue
        called += 1
    return called


def judge_all(backend: str, device: str) -> dict[str, int]:
    return {op: judge(op, backend, device) for op in OPS}


@pytest.fixture
def device() -> str:
    if os.environ.get("HAL_LANE") or not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return "cuda:0"


@pytest.fixture
def devices() -> tuple[str, str]:
    if os.environ.get("HAL_LANE") or not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    torch.cuda.set_device(0)
    return "cuda:0", "cuda:1"


@pytest.mark.parametrize("op", OPS)
def test_an_op_on_the_second_device_while_the_first_is_current(op: str, devices: tuple[str, str]) -> None:
    assert judge(op, "cuda", devices[1]) > 0
    assert torch.cuda.current_device() == 0


def run_in_threads(backend: str, devices: tuple[str, str]) -> list[dict[str, int]]:
    """Every op on both devices at once, a thread each."""
    found: list[dict[str, int]] = [{}, {}]
    broken: list[BaseException] = []

    def work(i: int) -> None:
        try:
            found[i] = judge_all(backend, devices[i])
        except BaseException as e:
            broken.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if broken:
        raise broken[0]
    return found


def run_in_processes(backend: str, devices: tuple[str, str], cache: Path) -> list[dict[str, int]]:
    """Every op by two processes that begin with the same empty cache folders."""
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(cache),
        "XDG_CACHE_HOME": str(cache),
        "HAL_CACHE_DIR": str(cache),
    }
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import json, test_second_device as t\n"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", f"{script}print(json.dumps(t.judge_all({backend!r}, {device!r})))"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for device in devices
    ]
    said = [c.communicate(timeout=600)[0] for c in children]
    assert [c.returncode for c in children] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in said]


def test_every_op_in_two_threads_a_device_each(devices: tuple[str, str]) -> None:
    assert all(min(calls.values()) > 0 for calls in run_in_threads("cuda", devices))


def test_every_op_in_two_processes_that_share_a_cache_folder(devices: tuple[str, str], tmp_path: Path) -> None:
    assert all(min(calls.values()) > 0 for calls in run_in_processes("cuda", devices, tmp_path))


def test_every_op_in_two_threads_of_one_device(device: str) -> None:
    assert all(min(calls.values()) > 0 for calls in run_in_threads("cuda", (device, device)))


def test_every_op_in_two_processes_on_one_device_that_share_a_cache_folder(device: str, tmp_path: Path) -> None:
    assert all(min(calls.values()) > 0 for calls in run_in_processes("cuda", (device, device), tmp_path))
