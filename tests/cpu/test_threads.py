"""Threads, fork, spawn, asyncio: the pool shares work, and survives what kills numba's own."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import threading
import traceback
from typing import Any

import pytest
import torch
from cpu.cases import judge, ours

import hal.backends.cpu._pool as pool
from hal.ops import spec


def _rope(seed: int = 0) -> None:
    s = spec("rope_kv_write")
    judge(
        "rope_kv_write",
        lambda a: ours("rope_kv_write")(**a),
        lambda: s.make(seed=seed, n=300, slots=512, q_heads=8, kv_heads=2, head_dim=128),
    )


def _transfer(seed: int = 0) -> None:
    s = spec("kv_transfer")
    params = {
        "n": 200,
        "src_slots": 256,
        "dst_slots": 256,
        "num_layers": 8,
        "head_dim": 128,
        "order": "pages",
    }
    judge("kv_transfer", lambda a: ours("kv_transfer")(**a), lambda: s.make(seed=seed, **params))


@pytest.fixture(autouse=True)
def _two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_large_call_wakes_the_pool() -> None:
    _rope()
    assert pool._pool.threads


def test_a_small_call_stays_on_the_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: Any, n: int) -> None:
        raise AssertionError("a thread was asked for")

    monkeypatch.setattr(pool, "_pool", pool._Pool())
    monkeypatch.setattr(pool._Pool, "grow", never)
    ours("rope_kv_write")(**spec("rope_kv_write").make(n=2))
    torch.set_num_threads(1)
    ours("rope_kv_write")(**spec("rope_kv_write").make(n=300, slots=512, q_heads=32, head_dim=128))


def test_every_item_once_whoever_takes_it() -> None:
    """A kernel in Python that counts: no item is left out or done twice, and both threads are in it together."""
    lock, both, seen, who = threading.Lock(), threading.Barrier(2, timeout=30), [], set()

    def kernel(counter: int, grain: int, items: int, *rest: Any) -> None:
        import ctypes

        both.wait()
        place = ctypes.c_int64.from_address(counter)
        while True:
            with lock:
                begin, place.value = place.value, place.value + grain
            if begin >= items:
                return
            seen.extend(range(begin, min(begin + grain, items)))
            who.add(threading.get_ident())

    pool.run(kernel, 1000, pool.GRAIN // 4, (), None)
    assert sorted(seen) == list(range(1000))


def test_turns_are_whole_groups() -> None:
    grains = []
    pool.run(lambda counter, grain, items: grains.append(grain), 1000, pool.GRAIN, (), None, together=48)
    assert grains
    assert all(g % 48 == 0 and g > 0 for g in grains)


def test_a_helper_that_comes_late_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = pool._Pool()
    monkeypatch.setattr(fresh, "grow", lambda n: None)  # nobody will ever take the job from the queue
    monkeypatch.setattr(pool, "_pool", fresh)
    calls = []
    pool.run(lambda *a: calls.append(a), 1000, pool.GRAIN, (), None)
    assert len(calls) == 1
    assert not fresh.work.get().take()


def test_an_error_in_a_helper_reaches_the_caller() -> None:
    caller, ready = threading.get_ident(), threading.Event()

    def kernel(*args: Any) -> None:
        if threading.get_ident() != caller:
            ready.set()
            raise ValueError("in the helper")
        assert ready.wait(30)

    with pytest.raises(ValueError, match="in the helper"):
        pool.run(kernel, 1000, pool.GRAIN, (), None)


def test_four_threads_at_once() -> None:
    failed: list[str] = []

    def work(seed: int) -> None:
        try:
            for i in range(5):
                _rope(seed + i)
                _transfer(seed + i)
        except BaseException:
            failed.append(traceback.format_exc())

    threads = [threading.Thread(target=work, args=(10 * i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed, failed[0]


def test_two_threads_then_fork_then_a_call_in_the_child() -> None:
    test_four_threads_at_once()
    assert pool._pool.threads
    # Made, and judged, here: torch's own OpenMP threads do not survive a fork, so that its larger ops hang.
    rope, s = ours("rope_kv_write"), spec("rope_kv_write")
    args, right = ({**s.make(n=300, slots=512, q_heads=8, kv_heads=2, head_dim=128)} for _ in range(2))
    rope(**right)
    pid = os.fork()
    if pid == 0:
        try:
            assert not pool._pool.threads
            rope(**args)
            same = bytes(args["k_cache"].untyped_storage()) == bytes(right["k_cache"].untyped_storage())
            os._exit(0 if same and pool._pool.threads else 3)
        except BaseException:
            traceback.print_exc()
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    _rope()


def _worker(seed: int) -> int:
    torch.set_num_threads(2)
    _rope(seed)
    _transfer(seed)
    return len(pool._pool.threads)


def test_spawned_workers() -> None:
    with multiprocessing.get_context("spawn").Pool(2) as workers:
        assert workers.map(_worker, range(4)) == [1] * 4


def test_under_asyncio() -> None:
    async def main() -> None:
        _rope()
        await asyncio.gather(*(asyncio.to_thread(_rope, i) for i in range(4)))

    asyncio.run(main())


def test_a_process_that_used_the_pool_exits_cleanly() -> None:
    script = """
import torch
torch.set_num_threads(4)
from hal.ops import spec
from hal.backends.cpu.rope_kv_write import rope_kv_write
a = spec("rope_kv_write").make(n=2000, slots=2048, q_heads=8, kv_heads=2, head_dim=128)
for _ in range(20):
    rope_kv_write(**a)
"""
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, "")
