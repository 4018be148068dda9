"""What the engines' workers do in the lowered lane: count what was traced, and inject a fault.

Beside the workers, and imported as they are: without the package of these tests.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOWERED = os.environ.get("HAL_LANE") == "lowered"


class NoDevice:
    """Triton's driver where there is no device. triton-ascend 3.2.0 asks for one as soon as a kernel is declared to be
    tuned, as SGLang's own are when they are imported; it may have this one, and no kernel can be started with it."""

    def get_benchmarker(self) -> Any:
        return self.refuse

    def refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a Triton kernel that is not hal's was started")

    def __getattr__(self, name: str) -> Any:
        self.refuse()


def declare_no_device() -> None:
    import triton

    triton.runtime.driver.set_active(NoDevice())


KINDS = ("scalar_reads", "scalar_writes", "rows_in", "rows_out")


@contextmanager
def watched() -> Iterator[dict[str, list[int]]]:
    """By kernel: how often it was started in this block, and the accesses that were traced. Filled when it ends."""
    seen: dict[str, list[int]] = {}
    if not LOWERED:
        yield seen
        return
    from hal.lowered import recording

    with recording() as launches:
        yield seen
    for launch in launches:
        count = seen.setdefault(launch.lowered.name, [0, 0])
        count[0] += 1
        count[1] += sum(getattr(t, kind) for t in launch.traffic.values() for kind in KINDS)


def count_all(path: Path) -> None:
    """The same, from now on in this process, for one that is killed: a line of JSON a launch."""
    from hal.lowered import machine

    start = machine.Machine.__call__

    def counting(self: Any, *args: Any) -> Any:
        token = machine._recorded.set([])
        try:
            traffic = start(self, *args)
        finally:
            machine._recorded.reset(token)
        accesses = sum(getattr(t, kind) for t in traffic.values() for kind in KINDS)
        with path.open("a") as out:
            out.write(json.dumps([self.lowered.name, accesses]) + "\n")
        return traffic

    machine.Machine.__call__ = counting  # type: ignore[method-assign]


def counted(path: Path) -> dict[str, list[int]]:
    """What `count_all` has written, as `watched` gives it."""
    seen: dict[str, list[int]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        name, accesses = json.loads(line)
        count = seen.setdefault(name, [0, 0])
        count[0] += 1
        count[1] += accesses
    return seen


def inject(op: str) -> None:
    """From now on a launch of the op's kernel is followed by one of a kernel that writes one element past `out`."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))
    sabotage = importlib.import_module("ascend.sabotage")
    module = importlib.import_module(f"hal.backends.ascend.{op}")
    kernel = getattr(module, f"_{op}")
    out = [p.name for p in kernel.params if not p.constexpr].index("out")

    def faulty(grid: Any, *args: Any, **static: Any) -> None:
        kernel(grid, *args, **static)
        size = args[out].numel()
        sabotage.fill_rows((1,), args[out], 0, size + 1, BLOCK=1 << size.bit_length())

    setattr(module, f"_{op}", faulty)
