"""Calls that need a device: on a side stream, behind a spinning kernel, captured, between other kernels.

Through torch's module of the device's type (``torch.cuda``, ``torch.npu``); what such a module lacks is said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal._remote.memory import Placed
from hal._remote.perform import Answer, Hands, declarations, settle, short_trace
from hal._remote.wire import Task


def _module(device: torch.device) -> Any:
    """Streams, events and memory of a type of device: parts of it have no annotations."""
    return torch.get_device_module(device.type)


@contextmanager
def spinning(device: torch.device, ms: float) -> Iterator[None]:
    """Keeps the device's current stream busy for about `ms` before anything that is launched inside."""
    if hasattr(_module(device), "_sleep"):
        _module(device)._sleep(int(ms * 1e-3 * _cycles_per_second()))
    else:
        size, seconds = _product(device)
        x = torch.ones(size, size, dtype=torch.float16, device=device)
        for _ in range(int(ms * 1e-3 / seconds) + 1):
            torch.mm(x, x)
    yield


@cache
def _cycles_per_second() -> float:
    cuda: Any = torch.cuda
    cuda._sleep(1_000_000)
    cuda.synchronize()
    begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    begin.record()
    cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    return float(20_000_000 / (begin.elapsed_time(end) * 1e-3))


@cache
def _product(device: torch.device) -> tuple[int, float]:
    """(a size, the seconds of a product of two such matrices): no shorter than 0.3 ms, so that few are launched."""
    size, seconds = 256, 0.0
    while seconds < 3e-4:
        size *= 2
        x = torch.ones(size, size, dtype=torch.float16, device=device)
        torch.mm(x, x)
        settle(device)
        begin = time.perf_counter()
        torch.mm(x, x)
        settle(device)
        seconds = time.perf_counter() - begin
    return size, seconds


def _ready(hands: Hands, task: Task) -> tuple[Placed, Callable[[], Any]]:
    """(the arguments on the device, the bound call of them), the device idle."""
    placed = hands.placed(task.arguments[0])
    fn = hands.bound(task.op, placed).fn
    hands.settle()
    return placed, lambda: fn(**placed.values)


def _fresh(ret: Any, placed: Placed) -> bool:
    return isinstance(ret, Tensor) and not any(ret is v for v in placed.values.values())


def stream(hands: Hands, task: Task) -> Answer:
    """The inputs arrive late, on a side stream, and the result is read there."""
    placed, call = _ready(hands, task)
    final = [raw.clone() for raw in placed.raws]
    for raw in placed.raws:
        raw.fill_(0)
    hands.settle()
    module = _module(hands.device)
    side = module.Stream(hands.device)
    with module.stream(side), spinning(hands.device, task.options["spin_ms"]):
        for raw, whole in zip(placed.raws, final, strict=True):
            raw.copy_(whole)
        ret = call()
        copies = [raw.clone() for raw in placed.raws]
        out = ret.clone() if _fresh(ret, placed) else ret
    side.synchronize()
    for raw, whole in zip(placed.raws, copies, strict=True):
        raw.copy_(whole)
    hands.settle()
    placed.pull()
    return {"outcome": "returned", "ret": hands.returned(placed, out)}


def sync(hands: Hands, task: Task) -> Answer:
    """Behind a spinning kernel: did the call ask for the device to be waited for, and was the stream busy after it?"""
    placed, call = _ready(hands, task)
    call()
    hands.settle()
    placed.push()
    hands.settle()
    module = _module(hands.device)
    current = module.current_stream(hands.device)
    watched = hasattr(module, "set_sync_debug_mode")
    mode = module.get_sync_debug_mode() if watched else 0
    asked, ret = "", None
    with spinning(hands.device, task.options["spin_ms"]):
        try:
            if watched:
                module.set_sync_debug_mode("error")
            ret = call()
        except RuntimeError as e:
            asked = f"{e}\n{short_trace(e)}"
        finally:
            if watched:
                module.set_sync_debug_mode(mode)
        busy = not current.query()
    hands.settle()
    placed.pull()
    return {"outcome": "returned", "ret": hands.returned(placed, ret), "asked": asked, "busy": busy}


def graph(hands: Hands, task: Task) -> Answer:
    """One capture of the first arguments, a replay with the values of each of the others in the same tensors."""
    placed = hands.placed(task.arguments[0])
    bound = hands.bound(task.op, placed)
    said = declarations(bound)
    if not bound.graph_safe:
        return {"outcome": "returned", "calls": [], "captured": "", **said}
    hands.settle()
    module = _module(hands.device)
    make = getattr(module, f"{hands.device.type.upper()}Graph", None)
    if make is None:
        why = f"torch.{hands.device.type} of this version has no graphs"
        return {"outcome": "not_run", "why": why, "captured": "", **said}
    side = module.Stream(hands.device)
    with module.stream(side):
        bound.fn(**placed.values)
    hands.settle()
    captured = make()
    try:
        with module.device(hands.device), module.graph(captured):
            ret = bound.fn(**placed.values)
    except RuntimeError as e:
        return {"outcome": "returned", "calls": [], "captured": f"{e}\n{short_trace(e)}", **said}
    calls = []
    for arguments in task.arguments[1:]:
        placed.push(arguments)
        hands.settle()
        captured.replay()
        hands.settle()
        placed.pull(arguments)
        calls.append({"outcome": "returned", "ret": hands.returned(placed, ret, arguments)})
    return {"outcome": "returned", "calls": calls, "captured": "", **said}


def overlap(hands: Hands, task: Task) -> Answer:
    """One kernel writes all inputs, late, having let the next one start early; the op; a kernel that was let
    start early in its turn copies everything away. Nothing syncs between them."""
    if hands.device.type != "cuda" or torch.cuda.get_device_capability(hands.device) < (9, 0):
        return {"outcome": "not_applicable", "why": "programmatic launch needs sm_90"}
    try:
        from hal._remote.producer import late_copy
    except ImportError:
        why = "the slow producer is a Triton kernel: pip install 'hal-kernels[cuda]'"
        return {"outcome": "not_run", "why": why}
    placed, call = _ready(hands, task)
    final = [raw.clone() for raw in placed.raws]
    copies = [torch.empty_like(raw) for raw in placed.raws]
    example = call()
    fresh = _fresh(example, placed)
    out = torch.empty_like(example) if fresh else example
    produce = _table(list(zip(final, placed.raws, strict=True)))
    calls = []
    for turn, arguments in enumerate(task.arguments):
        for raw in placed.raws:
            # What an op that does not wait would read: zeros, or numbers out of range as indices.
            raw.fill_(0x11 if turn % 2 else 0)
        hands.settle()
        spin = 0 if turn == 0 else 400_000
        late_copy[(len(final),)](produce, spin, WAIT=False, EARLY=True, BLOCK=1024, num_warps=4)
        ret = call()
        pairs = list(zip(placed.raws, copies, strict=True))
        consume = _table(pairs + ([(ret, out)] if fresh else []))
        late_copy[(consume.numel() // 3,)](consume, 0, WAIT=True, EARLY=False, BLOCK=1024, num_warps=4, launch_pdl=True)
        hands.settle()
        for raw, whole in zip(placed.raws, copies, strict=True):
            raw.copy_(whole)
        hands.settle()
        placed.pull(arguments)
        calls.append({"outcome": "returned", "ret": hands.returned(placed, out if fresh else ret, arguments)})
    return {"outcome": "returned", "calls": calls}


def _table(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """(source, target, bytes) per pair, on the device. Pinned and asynchronous: it must not sync the stream."""
    addresses = [[a.data_ptr(), b.data_ptr(), a.nbytes] for a, b in pairs]
    rows = _host.tensor(addresses, dtype=torch.int64).view(-1)
    return rows.pin_memory().to(pairs[0][1].device, non_blocking=True)


def memory(hands: Hands, task: Task) -> Answer:
    """How many bytes of device memory a call holds beside what it was given, and what of it is its result."""
    placed, call = _ready(hands, task)
    call()
    hands.settle()
    allocated = _module(hands.device).memory_allocated
    before = allocated(hands.device)
    ret = call()
    hands.settle()
    held = allocated(hands.device) - before
    own = -(-max(ret.nbytes, 1) // 512) * 512 if _fresh(ret, placed) else 0
    return {"outcome": "returned", "held": held, "allowed": own}
