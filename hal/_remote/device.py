"""Calls that need a device: on a side stream, behind a spinning kernel, captured, between other kernels.

`torch.cuda` alone is driven so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal._remote.memory import Placed
from hal._remote.perform import Answer, Hands, declared, short_trace
from hal._remote.wire import Task

_cuda: Any = torch.cuda  # parts of it have no annotations


@contextmanager
def spinning(ms: float) -> Iterator[None]:
    """Keeps the current stream busy for about `ms` before anything that is launched inside."""
    _cuda._sleep(int(ms * 1e-3 * _cycles_per_second()))
    yield


_RATE: list[float] = []


def _cycles_per_second() -> float:
    if not _RATE:
        _cuda._sleep(1_000_000)
        torch.cuda.synchronize()
        begin, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
        begin.record()
        _cuda._sleep(20_000_000)
        end.record()
        end.synchronize()
        _RATE.append(20_000_000 / (begin.elapsed_time(end) * 1e-3))
    return _RATE[0]


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
    side = _cuda.Stream(hands.device)
    with torch.cuda.stream(side), spinning(task.options["spin_ms"]):
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
    current = torch.cuda.current_stream(hands.device)
    mode = torch.cuda.get_sync_debug_mode()
    asked, ret = "", None
    with spinning(task.options["spin_ms"]):
        try:
            torch.cuda.set_sync_debug_mode("error")
            ret = call()
        except RuntimeError as e:
            asked = f"{e}\n{short_trace(e)}"
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        busy = not current.query()
    hands.settle()
    placed.pull()
    return {"outcome": "returned", "ret": hands.returned(placed, ret), "asked": asked, "busy": busy}


def graph(hands: Hands, task: Task) -> Answer:
    """One capture of the first arguments, a replay with the values of each of the others in the same tensors."""
    placed = hands.placed(task.arguments[0])
    bound = hands.bound(task.op, placed)
    said = declared(bound)
    if not bound.graph_safe:
        return {"outcome": "returned", "calls": [], "captured": "", **said}
    hands.settle()
    side = _cuda.Stream(hands.device)
    with torch.cuda.stream(side):
        bound.fn(**placed.values)
    hands.settle()
    captured = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(captured):
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
    if torch.cuda.get_device_capability(hands.device) < (9, 0):
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
        late_copy[(consume.numel() // 3,)](
            consume, 0, WAIT=True, EARLY=False, BLOCK=1024, num_warps=4, launch_pdl=True
        )
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
    before = torch.cuda.memory_allocated(hands.device)
    ret = call()
    hands.settle()
    held = torch.cuda.memory_allocated(hands.device) - before
    own = -(-max(ret.nbytes, 1) // 512) * 512 if _fresh(ret, placed) else 0
    return {"outcome": "returned", "held": held, "allowed": own}
