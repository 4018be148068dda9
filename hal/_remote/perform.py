"""The calls: each task is made of a backend as it says, and answered with what was seen. No answer is judged here."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from hal._errors import ArgumentError, FallbackWarning, NoBackendError
from hal._remote.around import around
from hal._remote.memory import Memory, Placed
from hal._remote.target import Bound, Target
from hal._remote.watch import code_of, watch
from hal._remote.wire import Arguments, Task
from hal.ops._native import taker_of
from hal.ops.spec import SHORT, describe

Answer = dict[str, Any]


class Hands:
    """A backend, the memory that its arguments lie in, and the calls that are made of it.

    Args:
        beat: called after each of many calls in one task: it goes on.
    """

    def __init__(self, target: Target, memory: Memory, beat: Callable[[], None] = lambda: None) -> None:
        self.target = target
        self.memory = memory
        self.beat = beat
        self.kept: list[tuple[Placed, Any]] = []
        self.copies: list[Placed] = []
        self._foreign: dict[str, dict[CodeType, str]] = {}
        self._like: dict[tuple[str, str], Bound] = {}

    @property
    def device(self) -> torch.device:
        return self.target.device

    def do(self, task: Task) -> Answer:
        """What came of a task: plain data."""
        try:
            return KINDS[task.kind](self, task)
        except Exception as e:
            return raised(e) | {"outcome": "broke"}

    def placed(self, arguments: Arguments) -> Placed:
        return Placed(self.memory, arguments, self.device)

    def bound(self, op: str, placed: Placed, like: str = "") -> Bound:
        """The launcher for such arguments; with `like`, a name, that of the task before of the same name."""
        if not like:
            return self.target.bound(op, placed.values)
        if (op, like) not in self._like:
            self._like[op, like] = self.target.bound(op, placed.values)
        return self._like[op, like]

    def settle(self) -> None:
        settle(self.device)

    def foreign(self, op: str) -> dict[CodeType, str]:
        if op not in self._foreign:
            self._foreign[op] = self.target.foreign(op)
        return self._foreign[op]

    def returned(self, placed: Placed, ret: Any, arguments: Arguments | None = None) -> Answer:
        """What a call returned: its kind, and, of a new tensor, the bytes in the place that was left for them."""
        if ret is None:
            return {"kind": "none"}
        if not isinstance(ret, Tensor):
            return {"kind": "other", "type": type(ret).__name__}
        start, size = (arguments or placed.arguments).result
        whose = (ret.data_ptr(), ret.shape, ret.dtype)
        stored = ret.device.type != "meta" and 0 < ret.nbytes <= size
        if stored:
            self.memory.raw(start, start + ret.nbytes).copy_(ret.detach().contiguous().view(-1).view(torch.uint8))
        return {
            "kind": "tensor",
            "dtype": SHORT.get(ret.dtype, str(ret.dtype)),
            "shape": list(ret.shape),
            "device": ret.device.type,
            "shown": describe(ret),
            "stored": stored or not ret.nbytes,
            "is": [
                n
                for n, v in placed.values.items()
                if v is ret or (isinstance(v, Tensor) and (v.data_ptr(), v.shape, v.dtype) == whose)
            ],
        }


# --- single calls -----------------------------------------------------------------------------------


def call(hands: Hands, task: Task) -> Answer:
    """One call, ``bound`` or ``dispatched``, watched for whose code runs.

    Options: ``keep`` what it returned, for ``again``; ``around``: what it stands in; ``like``, as in `Hands.bound`.
    """
    op, how = task.op, task.options["how"]
    placed = hands.placed(task.arguments[0])
    try:
        bound = hands.bound(op, placed, task.options.get("like", ""))
    except NoBackendError as e:
        try:
            hands.target.dispatch(op, placed.values)
        except NoBackendError:
            through = False
        else:
            through = True
        hands.settle()
        placed.pull()
        return {"outcome": "refused", "why": str(e), "through": through}
    own = code_of(bound.fn)
    foreign = {c: o for c, o in hands.foreign(op).items() if c is not own}
    standing = around(task.options.get("around"))
    with watch(foreign, own, taker_of(bound.fn)) as seen, warnings.catch_warnings(), placed.guard_pages(), standing:
        warnings.simplefilter("error", FallbackWarning)
        try:
            if how == "bound":
                ret = bound.fn(**placed.values)
            else:
                ret = hands.target.dispatch(op, placed.values)
        except Exception as e:
            return raised(e)
    hands.settle()
    placed.pull()
    if task.options.get("keep"):
        hands.kept.append((placed, ret))
    return {
        "outcome": "returned",
        "ret": hands.returned(placed, ret),
        "others": sorted(seen - {"own"}),
        "own": own is None or "own" in seen,
        **declarations(bound),
    }


def declarations(bound: Bound) -> Answer:
    return {"impl": bound.impl, "graph_safe": bound.graph_safe, "deterministic": bound.deterministic}


def attempt(hands: Hands, task: Task) -> Answer:
    """One call of one implementation, whatever it supports."""
    impls = hands.target.implementations(task.op)
    index = task.options["index"]
    if index >= len(impls):
        return {"outcome": "none"}
    placed = hands.placed(task.arguments[0])
    try:
        ret = impls[index].fn(**placed.values)
    except Exception as e:
        return raised(e) | {"impl": impls[index].impl}
    hands.settle()
    placed.pull()
    return {"outcome": "returned", "ret": hands.returned(placed, ret), "impl": impls[index].impl}


def refuse(hands: Hands, task: Task) -> Answer:
    """The dispatched call of arguments that it should not take."""
    placed = hands.placed(task.arguments[0])
    try:
        hands.target.dispatch(task.op, placed.values)
    except Exception as e:
        said = raised(e)
    else:
        said = {"outcome": "returned"}
    hands.settle()
    placed.pull()
    return said


def raised(e: Exception) -> Answer:
    argument = e.argument if isinstance(e, ArgumentError) else None
    return {
        "outcome": "raised",
        "type": type(e).__name__,
        "text": str(e),
        "trace": short_trace(e),
        "argument": argument if isinstance(argument, str) else None,
    }


def short_trace(e: BaseException) -> str:
    return "".join(traceback.format_tb(e.__traceback__)[-3:]).rstrip()


# --- many calls -------------------------------------------------------------------------------------


def threads(hands: Hands, task: Task) -> Answer:
    """Several threads at once, each with its share of the arguments, call by call in step."""
    count = task.options["count"]
    placed = [hands.placed(a) for a in task.arguments]
    shares = [placed[i::count] for i in range(count)]
    hands.settle()
    fn = hands.bound(task.op, placed[0]).fn
    barrier = threading.Barrier(count)
    out: dict[int, Any] = {}

    def body(mine: list[Placed]) -> None:
        for one in mine:
            barrier.wait()
            try:
                out[id(one)] = fn(**one.values)
            except Exception as e:
                out[id(one)] = e
            hands.beat()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        crew = [threading.Thread(target=body, args=(mine,), daemon=True) for mine in shares]
        for t in crew:
            t.start()
        for t in crew:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    hands.settle()
    gone = RuntimeError("the thread ended before its call")
    return {"outcome": "returned", "calls": [_one(hands, p, out.get(id(p), gone)) for p in placed]}


def repeat(hands: Hands, task: Task) -> Answer:
    """The same call again and again; what the process holds after it."""
    placed = hands.placed(task.arguments[0])
    fn = hands.bound(task.op, placed).fn
    for i in range(task.options["calls"]):
        if i % task.options["dispatched_every"]:
            fn(**placed.values)
        else:
            hands.target.dispatch(task.op, placed.values)
        hands.beat()
    hands.settle()
    gc.collect()
    return {"outcome": "returned", "census": list(census(hands.device))}


def many(hands: Hands, task: Task) -> Answer:
    """A call of each of several arguments, one after another; without arguments, of those of the task before."""
    if task.arguments:
        hands.copies = [hands.placed(a) for a in task.arguments]
    hows = task.options["hows"]
    fn = hands.bound(task.op, hands.copies[0]).fn
    out: list[Any] = []
    for how, placed in zip(hows, hands.copies, strict=False):
        placed.push()
        try:
            out.append(fn(**placed.values) if how == "bound" else hands.target.dispatch(task.op, placed.values))
        except Exception as e:
            out.append(e)
        hands.beat()
    hands.settle()
    return {"outcome": "returned", "calls": [_one(hands, *p) for p in zip(hands.copies, out, strict=False)]}


def again(hands: Hands, task: Task) -> Answer:
    """What is there now of the calls that were kept: their arguments, and what they returned."""
    kept, hands.kept = hands.kept, []
    return {"outcome": "returned", "calls": [_one(hands, *pair) for pair in kept]}


def _one(hands: Hands, placed: Placed, ret: Any) -> Answer:
    placed.pull()
    if isinstance(ret, Exception):
        return raised(ret)
    return {"outcome": "returned", "ret": hands.returned(placed, ret)}


def settle(device: torch.device) -> None:
    """Waits for the device."""
    if device.type in ("cuda", "npu"):
        torch.get_device_module(device).synchronize(device)


def census(device: torch.device) -> tuple[int, ...]:
    """Of this process: tensors, Python memory blocks, resident bytes, address space, open files, threads, mappings,
    device bytes. What the system does not tell is 0."""
    tensors = sum(1 for o in gc.get_objects() if type(o) is Tensor)
    resident = space = files = threads = mappings = 0
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm", encoding="ascii") as f:
            space, resident = (int(x) * os.sysconf("SC_PAGE_SIZE") for x in f.read().split()[:2])
        files, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        with open("/proc/self/maps", "rb") as f:
            mappings = sum(1 for _ in f)
    used = 0
    if device.type in ("cuda", "npu"):
        used = torch.get_device_module(device).memory_allocated(device)
    return tensors, sys.getallocatedblocks(), resident, space, files, threads, mappings, used


def _on_device(name: str) -> Callable[[Hands, Task], Answer]:
    def do(hands: Hands, task: Task) -> Answer:
        from hal._remote import device

        answer: Answer = getattr(device, name)(hands, task)
        return answer

    return do


KINDS: Mapping[str, Callable[[Hands, Task], Answer]] = {
    "call": call,
    "attempt": attempt,
    "refuse": refuse,
    "threads": threads,
    "repeat": repeat,
    "many": many,
    "again": again,
    **{name: _on_device(name) for name in ("stream", "sync", "graph", "overlap", "memory")},
}
