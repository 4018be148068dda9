"""A small pool of threads that share one kernel call.

The kernels are serial and release the GIL; several threads run the same call and take turns at a shared
counter. The caller works too and never waits for a helper that has not begun, so a busy machine, or a pool
that another thread is using, costs nothing but the help. numba's own ``parallel=True`` is no choice
here: its threads kill a forked child (omp) or abort when two threads call (workqueue).
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

WAKE = 1 << 20
"""Bytes that a call must move to wake a helper: some 50 us of work, five times what the waking costs."""

GRAIN = 1 << 17
"""Bytes that one turn at the counter should move."""

TURNS = 8
"""Turns a thread takes at most of a large call: few enough for long runs, enough to share evenly."""


class _Job:
    __slots__ = ("args", "done", "error", "keep", "kernel", "tickets")

    def __init__(self, kernel: Callable[..., Any], args: tuple[Any, ...], helpers: int, keep: Any) -> None:
        self.kernel, self.args, self.keep = kernel, args, keep
        self.tickets = [None] * helpers
        self.done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.error: BaseException | None = None

    def take(self) -> bool:
        try:
            self.tickets.pop()  # atomic: each ticket goes to one helper or back to the caller
        except IndexError:
            return False
        return True


class _Pool:
    """The threads of one process."""

    def __init__(self) -> None:
        self.work: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []
        self.growing = threading.Lock()
        self.closed = False

    def grow(self, n: int) -> None:
        with self.growing:
            while len(self.threads) < n and not self.closed:
                thread = threading.Thread(target=_serve, args=(self.work,), name="hal-cpu", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads to be had: the caller does all the work
                    return
                self.threads.append(thread)

    def close(self) -> None:
        # A thread that asks for the GIL of an interpreter that is going down is unwound through native
        # frames, which ends the process with an abort instead of its exit code.
        with self.growing:
            self.closed = True
        for _ in self.threads:
            self.work.put(None)
        for thread in self.threads:
            thread.join(timeout=5)


def _serve(work: queue.SimpleQueue[_Job | None]) -> None:
    while (job := work.get()) is not None:
        if job.take():
            try:
                job.kernel(*job.args)
            except BaseException as e:
                job.error = e
            job.done.put(None)
        del job  # else its tensors would live until the next one


_pool = _Pool()


def _after_fork() -> None:
    global _pool
    _pool = _Pool()  # a forked child has none of the threads, and what the queue held is the parent's


os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _pool.close())


def run(
    kernel: Callable[..., Any], items: int, size: int, args: tuple[Any, ...], keep: Any, together: int = 1
) -> None:
    """Calls ``kernel(counter, grain, items, *args)`` here, and where it pays in helper threads as well.

    Args:
        kernel: an entry point. It takes turns of `grain` items at the int64 that `counter` points to, or,
            where grain is 0, does all of them.
        items: units of work. size: bytes that one moves.
        together: a turn is a multiple of this many items.
        keep: what must stay alive as long as a helper runs, even if the caller is interrupted.
    """
    n = 0
    if items * size > WAKE:
        threads = torch.get_num_threads()
        grain = max(GRAIN // max(1, size), items // (TURNS * threads), 1)
        grain = -(-grain // together) * together
        n = min(threads, -(-items // grain)) - 1
    pool = _pool
    if n <= 0 or pool.closed:
        kernel(0, 0, items, *args)
        return
    if len(pool.threads) < n:
        pool.grow(n)
    counter = torch.zeros(1, dtype=torch.int64)
    job = _Job(kernel, (counter.data_ptr(), grain, items, *args), n, (counter, keep))
    for _ in range(n):
        pool.work.put(job)
    kernel(*job.args)
    while job.take():
        n -= 1
    for _ in range(n):
        job.done.get()
    if job.error is not None:
        raise job.error
