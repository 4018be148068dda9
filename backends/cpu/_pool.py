"""A small pool of threads that share one kernel call.

The kernels are serial and release the GIL; several threads run the same call and take turns at a shared
counter. The caller works too and never waits for a helper that has not begun, so a busy machine, or a pool
that another thread is using, costs nothing but the help. numba's own ``parallel=True`` is no choice
here: its threads kill a forked child (omp) or abort when two threads call (workqueue).
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

GRAIN = 1 << 17
"""Bytes that one turn at the counter should move: some 10 us of work, the time that waking a thread costs."""

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


_work: queue.SimpleQueue[_Job]
_size: int


def _reset() -> None:
    global _work, _size
    _work, _size = queue.SimpleQueue(), 0


_reset()
_grow = threading.Lock()


def _after_fork() -> None:
    # A forked child has none of the threads, and whatever the queue held is the parent's.
    global _grow
    _grow = threading.Lock()
    _reset()


os.register_at_fork(after_in_child=_after_fork)


def _serve(work: queue.SimpleQueue[_Job]) -> None:
    while True:
        job = work.get()
        if job.take():
            try:
                job.kernel(*job.args)
            except BaseException as e:
                job.error = e
            job.done.put(None)
        del job  # else its tensors would live until the next one


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
    if items * size > GRAIN:
        threads = torch.get_num_threads()
        grain = max(GRAIN // max(1, size), items // (TURNS * threads), 1)
        grain = -(-grain // together) * together
        n = min(threads, -(-items // grain)) - 1
    if n <= 0:
        kernel(0, 0, items, *args)
        return
    global _size
    if _size < n:
        with _grow:
            while _size < n:
                threading.Thread(target=_serve, args=(_work,), name="hal-cpu", daemon=True).start()
                _size += 1
    counter = torch.zeros(1, dtype=torch.int64)
    job = _Job(kernel, (counter.data_ptr(), grain, items, *args), n, (counter, keep))
    for _ in range(n):
        _work.put(job)
    kernel(*job.args)
    while job.take():
        n -= 1
    for _ in range(n):
        job.done.get()
    if job.error is not None:
        raise job.error
