"""The second line: untraced, tensors end where their last page does, and the next page can't be touched.

In a child process each time: what the guard catches ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import subprocess
from typing import Any

import pytest
import torch
from ascend import children

from hal.backends.ascend import hal_backend

OPS = list(hal_backend().ops)
PAGE = mmap.PAGESIZE
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


def child(what: str, front: bool) -> None:
    """Runs `what`: every op on its samples, or a sabotaged kernel."""
    from ascend import sabotage
    from ascend.test_sabotage import inputs

    from hal.lowered import untraced

    def guard(value: Any) -> Any:
        return guarded(value, front) if isinstance(value, torch.Tensor) else value

    with untraced():
        if what != "ops":
            grid, args, constexprs, _, _ = inputs()[what]
            getattr(sabotage, what)(grid, *map(guard, args), **constexprs)
        for op in OPS if what == "ops" else ():
            ops_on_guarded_tensors(op, guard)
            print(op, flush=True)


def ops_on_guarded_tensors(op: str, guard: Any) -> None:
    from importlib import import_module

    from hal.kv.pool import KVPool
    from hal.ops import get_spec

    contract = get_spec(op)
    module = import_module(f"hal.backends.ascend.{op}")
    for sample in contract.samples:
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


def spawn(what: str, front: bool) -> subprocess.CompletedProcess[str]:
    return children.run(f"from ascend.test_guard import child; child({what!r}, {front})")


@pytest.mark.parametrize("front", [False, True], ids=["end", "start"])
def test_ops_stay_inside(front: bool) -> None:
    """All ops in one child: what it printed last is the last op that came through."""
    ran = spawn("ops", front)
    assert ran.stdout.split() == OPS, ran.stderr
    assert ran.returncode == 0, ran.stderr


BITES = [("copy_where", False), ("store_where", False), ("take_pages", False), ("last_loc_masked", True)]


@pytest.mark.parametrize(("name", "front"), BITES)
def test_the_guard_bites(name: str, front: bool) -> None:
    assert spawn(name, front).returncode in (-signal.SIGSEGV, -signal.SIGBUS)
