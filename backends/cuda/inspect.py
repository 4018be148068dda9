"""What the compiler made of the kernels: registers, shared memory, spills, width of accesses. No GPU needed.

An op's own launcher is run with its launches recorded instead of started; each is then compiled to a
cubin for any architecture, and Triton's own ``cuobjdump`` reads it. `hal inspect` prints the rows.

Example:
    >>> from hal.backends.cuda import inspect                                     # doctest: +SKIP
    >>> for row in inspect.op("get_last_loc", arch=90): print(row)                # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hal import ops
from hal._errors import HalError
from hal.backends.cuda import _device, hal_backend
from hal.ops.spec import Sample
from hal.triton import launch

ARCHES = (80, 90, 100)
OPS = tuple(hal_backend().ops)
Call = tuple[launch.Launch, tuple[Any, ...]]


@dataclass(frozen=True)
class Row:
    """One compiled kernel."""

    op: str
    case: str
    kernel: str
    arch: int
    registers: int
    spills: int
    """Bytes of stack and local memory."""
    shared: int
    widest: int
    """Bits of the widest global load."""
    static: dict[str, Any]


@contextmanager
def record(arch: int = 90) -> Iterator[list[Call]]:
    """Launches inside are recorded as they would be on compute capability `arch`, not started."""
    calls: list[Call] = []

    def record(self: launch.Launch, grid: Any, *args: Any) -> None:
        calls.append((self, args))

    launch.Launch.recorder, _device.target = record, arch
    launch.forget()
    try:
        yield calls
    finally:
        launch.Launch.recorder, _device.target = None, 90
        launch.forget()


def compile_call(call: Call, arch: int) -> Any:
    """The Triton or Gluon kernel that `call` would start on compute capability `arch`."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.experimental.gluon._runtime import GluonASTSource

    jit = call[0].kernel.jit
    signature, constexprs, attrs, options = form_of(call, arch)
    source = GluonASTSource if jit.is_gluon() else ASTSource
    made = source(jit, signature, constexprs, attrs)
    return compile(made, target=GPUTarget("cuda", arch, 32), options=options.__dict__)


def form_of(call: Call, arch: int) -> tuple[Any, Any, Any, Any]:
    """What Triton tells the forms of a kernel apart by: signature, constexprs, attributes, options."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    bound, args = call
    jit, on = bound.kernel.jit, arch >= 90
    static = {**bound.static, **({"PDL": on, "launch_pdl": on} if "PDL" in bound.static else {})}
    backend = CUDABackend(GPUTarget("cuda", arch, 32))
    binder = create_function_from_signature(jit.signature, jit.params, backend)
    values, specialization, options = binder(*bound.given(args), **static)
    kwargs = {**static, "debug": False}
    options, signature, constexprs, attrs = jit._pack_args(backend, kwargs, values, specialization, options)
    return signature, constexprs, attrs, options


def resources(cubin: bytes) -> tuple[int, int, int]:
    """(registers, bytes of stack and local memory, bytes of shared memory) of a cubin's kernel."""
    out = _tool("cuobjdump", "--dump-resource-usage", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", out)
    if found is None:
        raise HalError(f"hal: cuobjdump says nothing of registers:\n{out}")
    registers, stack, shared, local = map(int, found.groups())
    return registers, stack + local, shared


def sass(cubin: bytes) -> str:
    """The machine code."""
    return _tool("cuobjdump", "--dump-sass", cubin)


def widest_load(text: str) -> int:
    """Bits of the widest global load in machine code; 0 where there is none."""
    widths = [0]
    for line in re.findall(r"LDG\S*", text):
        size = re.search(r"\.(128|64|U?16|U?8)(?:\.|$)", line + "")
        widths.append(int(size.group(1).lstrip("US")) if size else 32)
    return max(widths)


def _tool(name: str, option: str, cubin: bytes) -> str:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        done = subprocess.run(
            [getattr(knobs.nvidia, name).path, option, str(path)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise HalError(f"hal: {name} failed: {done.stderr.strip()}")
    return done.stdout


def calls(op: str, sample: Any, arch: int = 90, *, ready: bool = True) -> list[Call]:
    """The launches of one sample of the contract; `ready`: and those that its first call makes ready for others."""
    spec = ops.get_spec(op)
    values = spec.make(**sample.params)
    import inspect

    parameters = inspect.signature(spec.reference).parameters.values()
    with record(arch) as found:
        for _ in range(1 if ready else 2):
            found.clear()
            launcher(op)(
                *(values[p.name] for p in parameters if p.kind is not p.KEYWORD_ONLY),
                **{p.name: values[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY},
            )
    return found


def launcher(op: str) -> Callable[..., Any]:
    """The backend's own function of an op."""
    found: Callable[..., Any] = getattr(importlib.import_module(f"hal.backends.cuda.{op}"), op)
    return found


BETWEEN = {"assign_extend_cache_locs": (Sample("past-256", {"bs": 300}),)}
"""Sizes for which a launcher has a tile, and the contract no sample."""


def op(name: str, arch: int = 90, only: str = "") -> Iterator[Row]:
    """A row for every different kernel that the contract's samples make the op start."""
    seen = set()
    for sample in (*ops.get_spec(name).samples, *BETWEEN.get(name, ())):
        cache = str(sample.params.get("cache_dtype"))
        if sample.large or only not in sample.name or (arch < 89 and cache.startswith("e")):
            continue  # fp8 caches: `supports` refuses them there
        for call in calls(name, sample, arch):
            compiled = compile_call(call, arch)
            if compiled.hash in seen:
                continue
            seen.add(compiled.hash)
            cubin = compiled.asm["cubin"]
            registers, spills, shared = resources(cubin)
            yield Row(
                name,
                sample.name,
                call[0].kernel.name,
                arch,
                registers,
                spills,
                shared,
                widest_load(sass(cubin)),
                call[0].static,
            )


def inspect(kernel: str | None = None, jobs: int | None = None, arches: Sequence[int] = ARCHES) -> list[dict[str, Any]]:
    """Rows for ``hal inspect``: every kernel and tile that the contract's samples start, on every architecture.

    Args:
        kernel: an op's name; None for all.
        jobs: processes that compile; None: as many as there are processors.
        arches: compute capabilities, as in sm_90.

    Returns:
        Rows with ``op``, ``case``, ``kernel``, ``arch``, ``registers``, ``spills`` (bytes), ``shared`` (bytes),
        ``widest_load`` (bits) and ``verdict``: ``ok``, or what is wrong.
    """
    if kernel not in (None, *OPS):
        raise HalError(f"hal: inspect: no op {kernel!r}; there are: {', '.join(OPS)}")
    return _inspect_kernels([o for o in OPS if kernel in (None, o)], jobs, arches)


def _inspect_kernels(names: Sequence[str], jobs: int | None, arches: Sequence[int]) -> list[dict[str, Any]]:
    # The longest first; rows come out by op and architecture all the same.
    work = sorted(((o, a) for o in names for a in arches), key=lambda w: "attention" not in w[0])
    with _pool(jobs or os.cpu_count()) as pool:
        rows = [r for part in pool.map(_rows, *zip(*work, strict=True)) for r in part]
    rows.sort(key=lambda r: (names.index(r.op), r.arch))
    return [
        {
            "op": r.op,
            "case": r.case,
            "kernel": r.kernel,
            "arch": f"sm_{r.arch}",
            "registers": r.registers,
            "spills": r.spills,
            "shared": r.shared,
            "widest_load": r.widest,
            "verdict": "ok" if r.spills == 0 else f"spills {r.spills} bytes",
        }
        for r in rows
    ]


def _pool(jobs: int | None) -> ProcessPoolExecutor:
    """Processes that compile, none of which outlives this one."""
    return ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=_end_with, initargs=(os.getpid(),)
    )


def _end_with(parent: int) -> None:
    """A worker must look for itself: the pipe it waits at has its other end in its siblings too, and stays open."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="hal-inspect-parent", daemon=True).start()


def _rows(name: str, arch: int) -> list[Row]:
    torch.set_num_threads(1)
    return list(op(name, arch))


def main() -> int:
    """The rows of some ops (none named: of all) on some architectures; 1 if a kernel spills."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m hal.backends.cuda.inspect", description=main.__doc__)
    parser.add_argument("ops", nargs="*", metavar="op", help=", ".join(OPS))
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHES, default=ARCHES)
    given = parser.parse_args()
    if unknown := [o for o in given.ops if o not in OPS]:
        parser.error(f"no op {unknown[0]!r}; there are: {', '.join(OPS)}")
    rows = _inspect_kernels([o for o in OPS if not given.ops or o in given.ops], None, given.arch)
    for r in rows:
        print("  ".join(str(v) for v in r.values()))
    bad = [r for r in rows if r["verdict"] != "ok"]
    print(
        f"{len(rows)} cubins compiled for {', '.join(f'sm_{a}' for a in given.arch)}"
        + (f", {len(bad)} spill" if bad else "")
    )
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
