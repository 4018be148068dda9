"""Several threads share one kernel call.

The kernels are serial; the threads run the same call and take turns at a shared counter. None of them needs the GIL:
Python threads that keep an engine busy never delay it.

Whose threads? torch's own, where it has them by OpenMP: between two torch operators they spin, on the very
processors that ours would need, and they begin at once. That is one call of the OpenMP runtime that torch is linked to,
with as many threads as torch uses, for another number would make the runtime end some and start them again. A forked
child has none of them and must not ask; there, and where torch has other threads, a small pool of our own serves.
numba's ``parallel=True`` is no choice: it kills a forked child (omp) or aborts when two threads call (workqueue).

In our own pool the caller never waits for a helper that has not begun. After a call a helper looks for the next one for
a while before it sleeps: waking it costs the caller a system call, and the helper its way back to a processor.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from hal.backends.cpu._again import Call
from hal.backends.cpu._bits import address, load, shift, store, types, view
from hal.backends.cpu._files import warn
from hal.backends.cpu._jit import Kernel
from hal.backends.cpu._team import claim, in_team, invoke, peek, swap, take

SHARE = 1 << 20
"""Bytes that a call must move to be shared: some 40 us of work."""

WAKE = 1 << 22
"""Bytes that a call must move to wake a helper of our own that sleeps: some 150 us of work, twice what that costs."""

GRAIN = 1 << 17
"""Bytes that one turn at the counter should move."""

TURNS = 8
"""Turns a thread takes at most of a large call: few enough for long runs, enough to share evenly."""

LOOKS = 500
"""How often a helper looks for a call before it sleeps, giving way each time: some 150 us."""

# Where in the memory of a pool its numbers are: int64s, a cache line to each group that changes together.
OFFERS, DONE, COUNTER, AWAKE, CLOSED = 0, 8, 16, 24, 32
ADDRESS, BLOCK, FAILED, BYTE = 40, 41, 42, 48

_give_way = types.ExternalFunction("sched_yield", types.int32())
_read = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.int64))
_write = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.int64))


def _serve(box, bed, looks):  # type: ignore[no-untyped-def]
    """A helper: runs each call that is offered at `box`, and sleeps at the pipe `bed` when there is none for long."""
    take(shift(box, AWAKE), 1)
    left = looks
    while not peek(shift(box, CLOSED)):
        offers = peek(shift(box, OFFERS))
        if offers > 0 and claim(shift(box, OFFERS), offers):
            if invoke(load(box, ADDRESS), view(load(box, BLOCK), "i64")):
                store(box, FAILED, 1)
            take(shift(box, DONE), 1)
            left = looks
        elif left:
            left -= 1
            _give_way()
        else:
            take(shift(box, AWAKE), -1)
            # A caller offers first and then counts who is awake; so the order here is the other one.
            if not peek(shift(box, OFFERS)) and not peek(shift(box, CLOSED)):
                _read(bed, address(shift(box, BYTE)), 1)
            take(shift(box, AWAKE), 1)
            left = looks
    take(shift(box, AWAKE), -1)


def _share(box, bell, kernel, block, helpers, wake):  # type: ignore[no-untyped-def]
    """Runs a call here and in up to so many helpers. Whether it failed."""
    store(box, ADDRESS, kernel)
    store(box, BLOCK, block)
    store(box, FAILED, 0)
    swap(shift(box, DONE), 0)
    swap(shift(box, OFFERS), helpers)
    if wake:
        for _ in range(helpers - peek(shift(box, AWAKE))):
            _write(bell, address(shift(box, BYTE)), 1)
    failed = invoke(kernel, view(block, "i64"))
    begun = helpers - swap(shift(box, OFFERS), 0)
    while peek(shift(box, DONE)) < begun:
        _give_way()
    return failed or load(box, FAILED) != 0


def _team(parallel, threads, kernel, block):  # type: ignore[no-untyped-def]
    """Runs a call in so many threads of OpenMP. Whether it failed."""
    return in_team(parallel, threads, kernel, view(block, "i64"))


serve = Kernel(_serve, "i64 int int")
share = Kernel(_share, "i64 int int int int bool")
team = Kernel(_team, "int int int int")


def _openmp() -> int:
    """Where ``GOMP_parallel`` lies in the OpenMP runtime that torch's threads are from; 0: they are from elsewhere."""
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return 0
    for library in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        # A symbol is looked for in the library and in those that it needs.
        with suppress(OSError, AttributeError):
            return ctypes.cast(ctypes.CDLL(str(library)).GOMP_parallel, ctypes.c_void_p).value or 0
    return 0


openmp = _openmp()


class _Pool:
    """Our own threads of one process."""

    def __init__(self) -> None:
        self.memory = array("q", bytes(8 * 64))
        self.box, _ = self.memory.buffer_info()
        self.bed = self.bell = -1  # the ends of the pipe, once there are threads
        self.threads: list[threading.Thread] = []
        self.growing, self.busy = threading.Lock(), threading.Lock()
        self.closed = False

    @property
    def awake(self) -> int:
        """How many helpers look for a call."""
        return self.memory[AWAKE]

    def helpers(self, n: int, wake: bool) -> int:
        """How many of n helpers a call may have, those that sleep only if they are to `wake`. Some: it has `busy` then.

        A call that finds it taken gets none: waiting for them would take longer than doing without.
        """
        if not wake:
            n = min(n, self.awake)
        if n <= 0 or self.closed or not self.busy.acquire(blocking=False):
            return 0
        if len(self.threads) < n:
            self.grow(n)
        return n

    def grow(self, n: int) -> None:
        with self.growing:
            if self.bell < 0:
                try:
                    self.bed, self.bell = os.pipe()
                except OSError:  # no more files to be had
                    return
                os.set_blocking(self.bell, False)  # full, it wakes them all the same
            while len(self.threads) < n and not self.closed:
                thread = threading.Thread(target=self._serve, name="hal-cpu", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads to be had: the caller does all the work
                    return
                self.threads.append(thread)

    def _serve(self) -> None:
        serve()(self.box, self.bed, LOOKS)

    def close(self) -> None:
        # A thread that asks for the GIL of an interpreter that is going down is unwound through native
        # frames, which ends the process with an abort instead of its exit code.
        with self.growing:
            self.closed = True
        self.memory[CLOSED] = 1
        if self.threads:
            with suppress(BlockingIOError):
                os.write(self.bell, b"." * len(self.threads))
        for thread in self.threads:
            thread.join(timeout=5)

    def leave(self) -> None:
        """In a forked child, which has none of the threads: gives the pipe back."""
        if self.bell >= 0:
            os.close(self.bed)
            os.close(self.bell)


_pool = _Pool()


forked = False
"""Whether this process was forked from one whose torch had threads."""


def _after_fork() -> None:
    global _pool, openmp, forked
    forked = forked or bool(openmp)
    openmp = 0
    _pool.leave()
    _pool = _Pool()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _pool.close())


@contextmanager
def torch_threads() -> Iterator[None]:
    """For torch's own operators: one thread in a forked child, where the others are gone and would be waited for."""
    threads = torch.get_num_threads()
    if not forked or threads == 1:
        yield
        return
    warn(
        "torch's threads do not survive a fork, so attention that torch computes runs on one thread in this process; "
        "start processes by spawn or forkserver for more"
    )
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run(
    kernel: Kernel,
    variant: tuple[str, ...],
    items: int,
    size: int,
    args: tuple[Any, ...],
    together: int = 1,
    call: Call | None = None,
) -> None:
    """Calls ``kernel(counter, grain, items, *args)`` here, and where it pays in other threads as well.

    Args:
        kernel, variant: it takes turns of `grain` items at the int64 that `counter` points to, or, where grain is 0,
            does all of them.
        items: units of work. size: bytes that one moves.
        together: a turn is a multiple of this many items.
        call: calls like this one may be started in the same way.

    Raises:
        MemoryError: a kernel had none for what it needs beside its arguments.
    """
    threads, pool = 1, _pool
    if items * size > SHARE:
        threads = torch.get_num_threads()
        grain = max(GRAIN // max(1, size), items // (TURNS * threads), 1)
        grain = -(-grain // together) * together
        if grain >= items or (openmp and items * size < threads * GRAIN):
            threads = 1
    if threads > 1 and openmp:
        counter = array("q", [0])
        args = (counter.buffer_info()[0], grain, items, *args)
        where, block = kernel.block(variant, args)
        failed = team()(openmp, threads, where, block.buffer_info()[0])
        if call is not None:
            call.keep(kernel, variant, args, threads, openmp)
    elif threads > 1 and (helpers := pool.helpers(min(threads, -(-items // grain)) - 1, items * size > WAKE)):
        try:
            pool.memory[COUNTER] = 0
            where, block = kernel.block(variant, (pool.box + 8 * COUNTER, grain, items, *args))
            failed = share()(pool.box, pool.bell, where, block.buffer_info()[0], helpers, items * size > WAKE)
        finally:
            pool.busy.release()
    else:
        kernel(*variant)(0, 0, items, *args)
        if call is not None:
            call.keep(kernel, variant, (0, 0, items, *args), 1, 0)
        return
    if failed:
        raise MemoryError(f"kernel {kernel.fn.__module__}")
