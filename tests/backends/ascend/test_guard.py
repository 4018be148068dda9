"""The second line: untraced, tensors end where their last page does, and the next page can't be touched.

In child processes: what the guard catches ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
from typing import Any

import torch
from ascend import children

from hal.backends.ascend import hal_backend

OPS = list(hal_backend().ops)
PAGE = mmap.PAGESIZE
# Every access of every sample is checked where it is traced. This is the second line: by default 1 of 16 at each end.
CI_ALL = os.environ.get("CI_ALL")
_held: list[mmap.mmap] = []


def guarded(t: torch.Tensor, front: bool) -> torch.Tensor:
    """A copy of `t`, same strides, that begins (or ends) exactly at a page that can't be touched."""
    if t.numel() == 0:
        return t
    extent = (sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()
    room = -(-extent // PAGE) * PAGE
    memory = mmap.mmap(-1, room + 2 * PAGE)
    _held.append(memory)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for at in (base, base + PAGE + room):
        assert libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(PAGE), 0) == 0
    start = PAGE if front else PAGE + room - extent
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=extent, offset=start).view(t.dtype)
    return flat.as_strided(t.shape, t.stride()).copy_(t)


def ops() -> None:
    """Runs every op on its samples, at the end and at the start of what may be touched."""
    from hal.lowered import untraced

    with untraced():
        for op in OPS:
            for front in (False, True):
                ops_on_guarded_tensors(op, front)
            print(op, flush=True)


def bites() -> None:
    """Runs each sabotaged kernel in a process of its own, and prints how that ended."""
    from ascend import sabotage
    from ascend.test_sabotage import inputs

    from hal.lowered import untraced

    for name, front in BITES:
        pid = os.fork()
        if not pid:
            grid, args, constexprs, _, _ = inputs()[name]
            placed = [guarded(a, front) if isinstance(a, torch.Tensor) else a for a in args]
            with untraced():
                getattr(sabotage, name)(grid, *placed, **constexprs)
            os._exit(0)
        print(name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def ops_on_guarded_tensors(op: str, front: bool) -> None:
    from importlib import import_module

    from hal.kv.pool import KVPool
    from hal.ops import get_spec

    def guard(value: Any) -> Any:
        return guarded(value, front) if isinstance(value, torch.Tensor) else value

    contract = get_spec(op)
    module = import_module(f"hal.backends.ascend.{op}")
    for sample in contract.samples if CI_ALL else contract.samples[8 * front :: 16]:
        if sample.large or sample.tag.startswith("feature:fp8"):
            continue
        args = contract.make(seed=4, **sample.params)
        for name, value in args.items():
            if isinstance(value, KVPool) and isinstance(value.k, torch.Tensor):
                v = None if value.v is None else guard(value.v)
                args[name] = KVPool(guard(value.k), v, layout=value.layout, page_size=value.page_size)
            else:
                args[name] = guard(value)
        getattr(module, op)(**args)


BITES = [("copy_where", False), ("store_where", False), ("take_pages", False), ("last_loc_masked", True)]


def test_ops_stay_inside() -> None:
    """All ops in one child: what it printed last is the last op that came through."""
    ran = children.run("from ascend.test_guard import ops; ops()")
    assert ran.stdout.split() == OPS, ran.stderr
    assert ran.returncode == 0, ran.stderr


def test_the_guard_bites() -> None:
    ran = children.run("from ascend.test_guard import bites; bites()")
    ended = dict(line.split() for line in ran.stdout.splitlines())
    assert list(ended) == [name for name, _ in BITES], ran.stderr
    assert {int(code) for code in ended.values()} <= {-signal.SIGSEGV, -signal.SIGBUS}, ended
