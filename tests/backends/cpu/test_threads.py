"""Threads, fork, spawn, asyncio: the pool shares work, and survives what kills numba's own."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import traceback
from array import array
from typing import Any

import pytest
import torch
from cpu.cases import ours

import hal.backends.cpu._pool as pool
from hal.backends.cpu._bits import shift, store
from hal.backends.cpu._jit import Kernel
from hal.backends.cpu._team import peek, take
from hal.ops import get_spec
from hal.ops.kv_transfer import stack_layers
from hal.ops.proofs.judge import right_any


def _right(op: str, **params: Any) -> None:
    """What the contract names is right; from any number of threads, which the suite's memory is not for."""
    args = get_spec(op).make(**params)
    wants = get_spec(op).oracle(args)
    ours(op)(**args)
    for name, want in wants.items():
        for half, one in (want.fields or {"": want}).items():
            got = stack_layers(getattr(args[name], half)) if half else args[name]
            assert bool(right_any(got, one).all()), f"{name}.{half}"


def _rope(seed: int = 0) -> None:
    _right("rope_kv_write", seed=seed, n=300, slots=512, q_heads=8, kv_heads=2, head_dim=128)


def _transfer(seed: int = 0) -> None:
    slots = {"src_slots": 256, "dst_slots": 256}
    _right("kv_transfer", seed=seed, n=200, **slots, num_layers=8, head_dim=128, order="pages")


def _share_more() -> None:
    """So that inputs are large enough which do not take long to judge."""
    torch.set_num_threads(2)
    pool.SHARE, pool.WAKE = 1 << 19, 1 << 20


@pytest.fixture(autouse=True)
def _two_threads() -> Any:
    before = torch.get_num_threads(), pool.SHARE, pool.WAKE
    _share_more()
    yield
    torch.set_num_threads(before[0])
    pool.SHARE, pool.WAKE = before[1:]


@pytest.fixture
def _ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own threads, and none of them yet."""
    monkeypatch.setattr(pool, "openmp", 0)
    monkeypatch.setattr(pool, "_pool", fresh := pool._Pool())
    yield
    fresh.close()


@pytest.fixture(params=["torch's threads", "ours"])
def _either(request: pytest.FixtureRequest) -> None:
    if request.param == "ours":
        request.getfixturevalue("_ours")
    elif not pool.openmp:
        pytest.skip("this torch has no OpenMP")


ours_alone, either = pytest.mark.usefixtures("_ours"), pytest.mark.usefixtures("_either")


def test_large_calls_take_torchs_threads_where_those_are_openmps() -> None:
    assert bool(pool.openmp) == ("ATen parallel backend: OpenMP" in torch.__config__.parallel_info())
    assert _count(expected=2) == ({1}, 2)
    assert bool(pool._pool.threads) == (not pool.openmp)


@ours_alone
def test_a_large_call_wakes_the_pool() -> None:
    _rope()
    assert pool._pool.threads


def test_a_small_call_stays_on_the_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("a thread was asked for")

    monkeypatch.setattr(pool, "_pool", pool._Pool())
    monkeypatch.setattr(pool._Pool, "grow", never)
    monkeypatch.setattr(pool, "team", never)
    ours("rope_kv_write")(**get_spec("rope_kv_write").make(n=2))
    torch.set_num_threads(1)
    ours("rope_kv_write")(**get_spec("rope_kv_write").make(n=300, slots=512, q_heads=32, head_dim=128))


ITEMS, SIZE = 1000, pool.GRAIN
assert ITEMS * SIZE > pool.WAKE


PATIENT, BRIEF = 1 << 33, 1 << 26
"""Looks at how many have come: half a minute, for on a busy machine a thread may get no core for long; a tenth of a
second."""


def _counts(counter, grain, items, seen, threads, expected, looks):  # type: ignore[no-untyped-def]
    """Each item counts itself; a thread that arrives waits, but not for ever, until so many have."""
    take(threads, 1)
    left = looks
    while left and peek(threads) < expected:
        left -= 1
    begin = take(counter, grain) if grain else 0
    while begin < items:
        for i in range(begin, min(begin + grain, items) if grain else items):
            take(shift(seen, i), 1)
        begin = take(counter, grain) if grain else items


def _second_fails(counter, grain, items, threads):  # type: ignore[no-untyped-def]
    me = take(threads, 1)
    while grain and peek(threads) < 2:
        pass
    if me:
        raise MemoryError
    while grain and take(counter, grain) < items:
        pass


def _turns(counter, grain, items, out):  # type: ignore[no-untyped-def]
    begin = take(counter, grain) if grain else 0
    while begin < items:
        store(out, 0, grain)
        begin = take(counter, grain) if grain else items


counts = Kernel(_counts, "i64 int int i64 i64 int int", shared=True)
second_fails = Kernel(_second_fails, "i64 int int i64", shared=True)
turns = Kernel(_turns, "i64 int int i64", shared=True)


def _count(expected: int, size: int = SIZE, looks: int = PATIENT) -> tuple[set[int], int]:
    """How often items were done, and how many threads came."""
    seen, threads = array("q", bytes(8 * ITEMS)), array("q", [0])
    pool.run(counts, (), ITEMS, size, (seen.buffer_info()[0], threads.buffer_info()[0], expected, looks))
    return set(seen), threads[0]


def _sleeping() -> pool._Pool:
    """The pool, with a helper that sleeps."""
    _count(2)
    end = time.monotonic() + 300
    while pool._pool.awake:
        assert time.monotonic() < end
        time.sleep(0.01)
    return pool._pool


@either
def test_every_item_once_whoever_takes_it() -> None:
    for _ in range(50):
        assert _count(expected=2) == ({1}, 2)


@ours_alone
def test_a_sleeping_helper_wakes_for_a_large_call_alone() -> None:
    _sleeping()
    assert _count(expected=1, size=pool.WAKE // ITEMS) == ({1}, 1)
    assert _count(expected=2) == ({1}, 2)


@ours_alone
def test_a_helper_that_is_awake_shares_smaller_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "LOOKS", 1 << 40)  # it never sleeps
    assert _count(expected=2) == ({1}, 2)
    assert pool._pool.awake == 1
    assert _count(expected=2, size=pool.WAKE // ITEMS) == ({1}, 2)
    pool._pool.close()
    assert pool._pool.awake == 0


@either
def test_turns_are_whole_groups() -> None:
    grain = array("q", [0])
    pool.run(turns, (), ITEMS, SIZE, (grain.buffer_info()[0],), together=48)
    assert grain[0] > 0
    assert grain[0] % 48 == 0


@ours_alone
def test_a_helper_that_comes_late_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool._pool, "grow", lambda n: None)  # nobody will ever take the offer
    assert _count(expected=1) == ({1}, 1)
    assert pool._pool.memory[pool.OFFERS] == 0


@either
def test_a_helper_needs_no_gil() -> None:
    """It wakes, works and finishes while another thread holds the GIL, and the caller works."""

    def came() -> int:
        if not pool.openmp:
            _sleeping()
        about_to = threading.Event()

        def hold() -> None:
            about_to.set()
            ctypes.PyDLL(None).usleep(1_000_000)  # a call that keeps the GIL; far longer than the kernel waits

        holder = threading.Thread(target=hold)
        holder.start()
        about_to.wait()
        done, threads = _count(expected=2, looks=BRIEF)
        holder.join()
        assert done == {1}
        return threads

    # On a busy machine it may get no core in time; one that needed the GIL would never come in time.
    assert any(came() == 2 for _ in range(10))


@either
@pytest.mark.parametrize("threads", [2, 1])
def test_a_failure_in_any_thread_reaches_the_caller(threads: int) -> None:
    torch.set_num_threads(threads)
    arrived = array("q", [2 - threads])
    with pytest.raises(MemoryError):
        pool.run(second_fails, (), ITEMS, SIZE, (arrived.buffer_info()[0],))
    assert _count(expected=threads) == ({1}, threads)


@ours_alone
def test_without_files_or_threads_the_caller_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as m:
        m.setattr(pool.os, "pipe", none)
        assert _count(expected=1) == ({1}, 1)
    monkeypatch.setattr(threading.Thread, "start", lambda self: _raise(RuntimeError("can't start new thread")))
    assert _count(expected=1) == ({1}, 1)


def _raise(error: Exception) -> None:
    raise error


def _four_threads_at_once() -> None:
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


@either
def test_four_threads_at_once_then_fork_then_a_call_in_the_child() -> None:
    _four_threads_at_once()
    assert pool.openmp or pool._pool.threads
    # Made, and judged, here: torch's own OpenMP threads do not survive a fork, so that its larger ops hang.
    rope, s = ours("rope_kv_write"), get_spec("rope_kv_write")
    args, right = ({**s.make(n=300, slots=512, q_heads=8, kv_heads=2, head_dim=128)} for _ in range(2))
    rope(**right)
    pid = os.fork()
    if pid == 0:
        try:
            assert not pool.openmp
            assert not pool._pool.threads
            rope(**args)
            same = bytes(args["k_cache"].untyped_storage()) == bytes(right["k_cache"].untyped_storage())
            os._exit(0 if same and pool._pool.threads else 3)
        except BaseException:
            traceback.print_exc()
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    _rope()


def _worker(seed: int) -> bool:
    _share_more()
    _rope(seed)
    _transfer(seed)
    return _count(expected=2) == ({1}, 2)


def test_spawned_workers() -> None:
    with multiprocessing.get_context("spawn").Pool(2) as workers:
        assert workers.map(_worker, range(4)) == [True] * 4


@either
def test_under_asyncio() -> None:
    async def main() -> None:
        _rope()
        await asyncio.gather(*(asyncio.to_thread(_rope, i) for i in range(4)))

    asyncio.run(main())


@pytest.mark.parametrize("whose", ["", "hal.backends.cpu._pool.openmp = 0"])
def test_a_process_that_used_the_pool_exits_cleanly(whose: str) -> None:
    script = f"""
import torch
import hal.backends.cpu._pool
{whose}
torch.set_num_threads(4)
from hal.ops import get_spec
from hal.backends.cpu.rope_kv_write import rope_kv_write
a = get_spec("rope_kv_write").make(n=2000, slots=2048, q_heads=8, kv_heads=2, head_dim=128)
for _ in range(20):
    rope_kv_write(**a)
"""
    for _ in range(3 if os.environ.get("CI_ALL") else 1):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=600)
        assert (done.returncode, done.stderr) == (0, "")
