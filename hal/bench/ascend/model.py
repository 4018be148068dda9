"""An estimate of each kernel's time on an Ascend chip that is not here, from what its lowered code would do.

A program's counts (`count`) become cycles of the units of a core (`machine`), cores go on until their programs are
done, and the slowest core, or the memory that all share, is the kernel. Nothing was measured, here or elsewhere: use
it to see which kernel is worst and by what, and never as a time.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, TextIO

from hal._errors import HalError
from hal.bench import Row
from hal.bench.ascend import machine as m
from hal.bench.ascend.cases import Case, cases
from hal.bench.ascend.count import Counted, Work, counting
from hal.bench.ascend.machine import ASSUMPTIONS, MACHINES, Machine

COLUMNS = ("op", "shape", "machine", "cores", "bytes", "floor_us", "estimate_us", "ratio", "bound")


def cycles(work: Work, mixed: bool) -> dict[str, float]:
    """What a program keeps each unit of its core busy, and what it waits, in cycles."""
    u = work.units

    def copying(*kinds: str) -> float:
        count, rows, lines = (work.copied(what, *kinds) for what in ("copies", "rows", "lines"))
        return count * m.COPY_CYCLES + (rows - count) * m.ROW_CYCLES + lines * m.LINE / m.CORE_BYTES

    waits = work.copied("copies", "in") * m.LATENCY
    return {
        "scalar": u["scalar"] + u["division"] * m.DIVISION_CYCLES + u["hit"] * m.HIT_CYCLES + u["miss"] * m.LATENCY,
        "vector": u["vector"] * m.VECTOR_CYCLES + u["repeat"] + u["slow"] * m.SLOW,
        "cube": u["cube"] + u["cube32"] * 2,
        "hand over": u["exchange"] * m.HAND_OVER + u["exchanged"] / m.CORE_BYTES,
        "copies": copying("in", "out") + waits,
        "copies in": copying("in_loop"),
        "copies out": copying("out_loop"),
    }


def busy(work: Work, mixed: bool) -> tuple[float, str]:
    """Cycles from a program's start to its end, and the part that takes the most of them."""
    t = cycles(work, mixed)
    together = ("scalar", "copies in", "copies out") if mixed else ("scalar", "vector", "copies in", "copies out")
    longest = max(together, key=lambda k: t[k])
    serial = {k: v for k, v in t.items() if k not in together}
    parts = {**serial, longest: t[longest]}
    return sum(parts.values()), max(parts, key=lambda k: parts[k])


def seconds(counted: Counted, machine: Machine) -> tuple[float, int, str]:
    """(time, cores used, what bounds it) of one launch on `machine`."""
    cores = machine.cube_cores if counted.mixed else machine.vector_cores
    times = [busy(p, counted.mixed) for p in counted.programs]
    # The driver hands a core every cores-th program.
    sums = [sum(t for t, _ in times[core::cores]) for core in range(min(cores, len(times)))]
    slowest = max(range(len(sums)), key=lambda c: sums[c]) if sums else 0
    working = sums[slowest] / machine.hertz if sums else 0.0
    lines = sum(p.copied("lines") * m.LINE + p.units["miss"] * 64 for p in counted.programs)
    memory = lines / machine.bandwidth
    bound = "memory" if memory > working else times[slowest][1] if times else "launch"
    longest = max(memory, working)
    return m.LAUNCH + longest, len(sums), "launch" if longest < m.LAUNCH else bound


@contextlib.contextmanager
def _cores(machine: Machine) -> Iterator[None]:
    """The backend takes the device for `machine`."""
    from hal.backends.ascend import _device

    real = _device.VECTOR_CORES
    _device.VECTOR_CORES = machine.vector_cores
    _device.vector_cores.cache_clear()
    try:
        yield
    finally:
        _device.VECTOR_CORES = real
        _device.vector_cores.cache_clear()


def estimate(case: Case, machine: Machine, args: dict[str, Any] | None = None) -> Row:
    """The row of one case on one machine."""
    args = case.make() if args is None else args
    function = getattr(import_module(f"hal.backends.ascend.{case.op}"), case.op)
    with _cores(machine), counting() as launches:
        function(**args)
    found = [seconds(c, machine) for c in launches]
    time, (_, cores, bound) = sum(t for t, _, _ in found), max(found)
    floor = max(case.needed(args) / machine.bandwidth, case.flops(args) / machine.flops)
    return {
        "op": case.op,
        "shape": case.name,
        "machine": machine.name,
        "cores": cores,
        "launches": len(found),
        "bytes": sum(c.bytes for c in launches),
        "bytes_needed": case.needed(args),
        "flops": case.flops(args),
        "floor_us": round(floor * 1e6, 4),
        "estimate_us": round(time * 1e6, 2),
        "ratio": round(time / floor, 1),
        "bound": bound,
    }


def rows(names: Sequence[str] = ()) -> list[Row]:
    """Every case of the ops `names` (none: of all), on every machine.

    Raises:
        HalError: not the lowered lane, or no such op.
        ToolchainError: the Ascend tools are missing.
    """
    from hal.lowered import toolchain
    from hal.triton import launch

    toolchain.require()
    if launch.lane() != "lowered":
        raise HalError("hal: bench: the model counts kernels in the lowered lane; set HAL_LANE=lowered")
    ops = dict.fromkeys(c.op for c in cases())
    for name in names:
        if name not in ops:
            raise HalError(f"hal: bench: no op {name!r} in the model of ascend; there are {', '.join(ops)}")
    found = []
    for case in cases():
        if not names or case.op in names:
            args = case.make()
            found += [estimate(case, machine, args) for machine in MACHINES]
    return found


def show(found: Sequence[Row], as_json: bool, out: TextIO) -> None:
    """The rows with what they rest on."""
    if as_json:
        machines = [{**vars(machine), "hertz": machine.hertz} for machine in MACHINES]
        data = {"estimate": True, "assumptions": ASSUMPTIONS, "machines": machines, "rows": list(found)}
        print(json.dumps(data, indent=1), file=out)
        return
    print("ESTIMATE, from the lowered code of each kernel: nothing here was measured, no NPU was at hand.", file=out)
    for machine in MACHINES:
        print(
            f"  {machine.name}: {machine.cube_cores} cube and {machine.vector_cores} vector cores at "
            f"{machine.hertz / 1e9:.2f} GHz, {machine.bandwidth / 1e12:.1f} TB/s, {machine.flops / 1e12:.0f} TFLOPS",
            file=out,
        )
    for assumption in ASSUMPTIONS:
        print(f"  assumed: {assumption}", file=out)
    print("  floor: the bytes that must move at the full bandwidth, or the arithmetic at the full rate", file=out)
    body = [COLUMNS, *(tuple(str(row[c]) for c in COLUMNS) for row in found)]
    width = [max(len(line[i]) for line in body) for i in range(len(COLUMNS))]
    for line in body:
        print("  ".join(x.ljust(w) for x, w in zip(line, width, strict=True)).rstrip(), file=out)


def main(names: Sequence[str] = (), as_json: bool = False) -> int:
    """``hal bench --device ascend --model [OP…]``."""
    import sys

    from hal._output import data_output

    if as_json:
        with data_output() as out:
            show(rows(names), True, out)
    else:
        show(rows(names), False, sys.stdout)
    return 0
