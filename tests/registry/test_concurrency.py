"""The dispatch table is bounded, and safe among threads, tasks and processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from plugins import TABLE, TWO, ZERO, last

import hal
from hal.ops import get_spec
from hal.registry import current
from hal.registry._table import live

ROOT = Path(hal.__file__).parents[1]


@pytest.mark.usefixtures("five")
def test_caches_do_not_grow_with_calls() -> None:
    def calls() -> None:
        for n in range(1, 40):
            with hal.use("b2"):
                hal.get_last_loc(TABLE, ZERO.expand(n).contiguous(), TWO.expand(n).contiguous())
            with hal.use("b3"), hal.use("b1"):
                last()
            last("b4")

    calls()
    size = sum(map(len, current().caches.values()))
    calls()
    assert size == sum(map(len, current().caches.values())) == 3


@pytest.mark.usefixtures("five")
def test_use_does_not_reach_new_threads() -> None:
    seen: list[int] = []
    with hal.use("b3"):
        thread = threading.Thread(target=lambda: seen.append(last()))
        thread.start()
        thread.join()
        assert last() == 3
    assert seen == [1]


@pytest.mark.usefixtures("five")
def test_tasks_have_their_own() -> None:
    async def one(i: int) -> list[int]:
        got = []
        with hal.use(f"b{i}"):
            for _ in range(20):
                await asyncio.sleep(0)
                got.append(last())
        return got

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(one(i) for i in range(1, 6)))

    assert asyncio.run(all_of_them()) == [[i] * 20 for i in range(1, 6)]


@pytest.mark.usefixtures("five")
def test_threads_call_while_tables_are_swapped() -> None:
    errors: list[BaseException] = []
    stop = threading.Event()
    calls = [0] * 4

    def call(i: int) -> None:
        try:
            with hal.use(f"b{i + 1}"):
                while not stop.is_set():
                    assert last() == i + 1
                    assert last("b5") == 5
                    calls[i] += 1
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for i in range(40):
        hal.configure(checks=("args", "full", "off")[i % 3])
        hal.register("kv_transfer", backend=f"extra{i % 2}")(get_spec("kv_transfer").reference)
        hal.reload()
        if i % 2:
            hal.unregister("extra0")
    while not all(calls) and not errors:
        time.sleep(0.01)
    stop.set()
    for t in threads:
        t.join()
    assert not errors


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.usefixtures("five")
def test_forked_worker_while_the_writer_lock_is_held() -> None:
    last("b2")
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with live.lock:
            inside.set()
            leave.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads is the point
        pid = os.fork()
    if not pid:
        try:
            hal.configure(backend="b3")
            os._exit(last())
        finally:
            os._exit(99)
    leave.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert last("b2") == 2


def test_spawned_worker_reads_the_environment_anew(tmp_path: Path) -> None:
    code = (
        "import multiprocessing as m, sys\n"
        "def work(q):\n"
        "    import hal\n"
        "    from hal.registry import current\n"
        "    q.put(current().choices[0].source)\n"
        "if __name__ == '__main__':\n"
        "    c = m.get_context('spawn'); q = c.Queue(); p = c.Process(target=work, args=(q,)); p.start()\n"
        "    print(q.get(timeout=300)); p.join(); sys.exit(p.exitcode)\n"
    )
    (tmp_path / "work.py").write_text(code)
    env = {**os.environ, "HAL_BACKEND": "reference", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "work.py")]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "HAL_BACKEND=reference"
