"""The steps of a report, each run in a process of its own (`hal._report`): a line of JSON for each thing found."""

from __future__ import annotations

import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from hal._output import data_output

PACKAGES = tuple(
    """
    hal-kernels torch torch-npu triton triton-ascend ascendnpu-ir numba llvmlite numpy sgl-kernel-npu sglang vllm
    vllm-ascend transformers flashinfer-python
    """.split()
)
VARIABLES = tuple(
    """
    ASCEND_HOME_PATH ASCEND_TOOLKIT_HOME ASCEND_OPP_PATH ASCEND_RT_VISIBLE_DEVICES ASCEND_LAUNCH_BLOCKING
    ASCEND_GLOBAL_LOG_LEVEL
    """.split()
)
"""Read besides hal's own; no others are."""
ASCEND = ("/usr/local/Ascend", "/usr/local/Ascend/ascend-toolkit/latest")
VERSIONS = (
    "version.info",
    "version.cfg",
    "driver/version.info",
    "firmware/version.info",
    "*/ascend_toolkit_install.info",
)
PROPERTIES = tuple(
    """
    total_memory multi_processor_count major minor L2_cache_size cube_core_num vector_core_num
    """.split()
)
TOOLS = (("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"), ("npu-smi", "-v"))
COPIES = (1 << 16, 1 << 22, 1 << 26)
"""Bytes of the timed ones."""
out: TextIO | None = None


def tell(**row: Any) -> None:
    print(json.dumps(row, default=str), file=out, flush=True)


def check(name: str, look: Callable[[], Any], **more: Any) -> None:
    """Tells what `look` returns, how long it took, and what it raises."""
    begin = time.perf_counter()
    row: dict[str, Any] = {"name": name, **more}
    try:
        row.update(ok=True, saw=look())
    except Exception as e:
        text = f"{type(e).__name__}: {e}".splitlines()
        row.update(ok=False, saw=text[0], detail=text[1:20])
    tell(**row, seconds=round(time.perf_counter() - begin, 4))


def machine() -> None:
    """Versions, the processor, the tools of vendors, the variables that matter."""
    check("date", lambda: datetime.now(UTC).isoformat(timespec="minutes"))
    check("python", platform.python_version)
    check("system", lambda: f"{platform.system()} {platform.machine()} {' '.join(platform.libc_ver())}")
    check("cores", lambda: os.cpu_count())
    for part in ("_cpu", "_commit"):
        check(part.strip("_"), partial(_of_bench, part))
    for package in PACKAGES:
        try:
            tell(name=package, ok=True, saw=metadata.version(package))
        except metadata.PackageNotFoundError:
            tell(name=package, ok=None, saw="not installed")
    for root in dict.fromkeys([os.environ.get("ASCEND_HOME_PATH") or ASCEND[1], *ASCEND]):
        for file in sorted({f for pattern in VERSIONS for f in Path(root).glob(pattern)}):
            said = [x for x in file.read_text(errors="replace").splitlines() if "version" in x.lower()][:8]
            tell(name="/".join(file.parts[-2:]), ok=True, saw="; ".join(said))
    for tool in TOOLS:
        try:
            done = subprocess.run(tool, capture_output=True, text=True, timeout=20, check=False)
            tell(name=tool[0], ok=done.returncode == 0, saw=(done.stdout or done.stderr).strip()[:500])
        except FileNotFoundError:
            tell(name=tool[0], ok=None, saw="no such tool")
        except (OSError, subprocess.SubprocessError) as e:
            tell(name=tool[0], ok=False, saw=str(e))
    from hal import _doctor, _env

    for name in (*_env.VARIABLES, *VARIABLES):
        if name in os.environ:
            tell(name=name, ok=None, saw=os.environ[name])
    tell(name="triton", ok=None, saw="; ".join(_doctor._notes()))
    check("import torch", lambda: importlib.import_module("torch").__version__)


def _of_bench(part: str) -> str:
    return str(getattr(importlib.import_module("hal.bench.report"), part)())


def states() -> None:
    """Each backend on each lane: what its probe says, and how long that took."""
    from hal.registry import current

    table = current()
    tell(backend="reference", lane="device", state="ready", reason="", devices=["cpu"], ops=list(table.op_names))
    for name, entry in table.entries.items():
        for lane in entry.lanes or ("device",):
            begin = time.perf_counter()
            state = entry.state(lane)
            devices = entry.manifest.lanes.get(lane, ()) if entry.manifest else ()
            tell(
                backend=name,
                lane=lane,
                state=state.state,
                reason=str(state),
                devices=list(devices),
                ops=[op for op in table.op_names if entry.usual(op)],
                seconds=round(time.perf_counter() - begin, 3),
            )


def device(kind: str) -> None:
    """What torch says of the devices, and whether streams, events and copies do what hal needs of them."""
    torch = importlib.import_module("torch")
    if kind == "npu":
        check("import torch_npu", lambda: importlib.import_module("torch_npu").__version__)
    module = torch.get_device_module(kind)
    if kind == "cpu":
        tell(name="streams, events, pinned memory", ok=None, saw="a CPU has none")
    else:
        for i in range(module.device_count()):
            found = module.get_device_properties(i)
            seen = {p: getattr(found, p) for p in PROPERTIES if hasattr(found, p)}
            tell(name=f"{kind}:{i}", ok=True, saw=str(module.get_device_name(i)), **seen)
        if kind == "npu":
            check("triton's device", lambda: _triton_properties())
        for name, look in _checks(torch, module, kind).items():
            check(name, look)
    for size in COPIES:
        for way in ("host to device", "device to host", "device to device"):
            check(f"{way}, {size} bytes", partial(_copy, torch, module, kind, way, size))
    _peak(module)


def _copy(torch: Any, module: Any, kind: str, way: str, size: int) -> dict[str, float]:
    """The time of a copy, from and to pinned memory."""
    host = torch.ones(size, dtype=torch.uint8, device="cpu", pin_memory=kind != "cpu")
    there = torch.ones(size, dtype=torch.uint8, device=kind)
    src, dst = {"host to device": (host, there), "device to host": (there, host)}.get(way, (there, there.clone()))
    found = _median(lambda: dst.copy_(src), module)
    return {**found, "GB/s": round(size / found["median_us"] / 1e3, 2)}


def _triton_properties() -> dict[str, int]:
    driver = importlib.import_module("triton.runtime").driver
    return {k: v for k, v in driver.active.utils.get_device_properties(0).items() if isinstance(v, int)}


def _checks(torch: Any, module: Any, kind: str) -> dict[str, Callable[[], str]]:
    host = torch.arange(1 << 20, dtype=torch.int32, device="cpu")

    def right(found: Any, want: Any = host) -> str:
        module.synchronize()
        if not torch.equal(found.to("cpu"), want):
            raise AssertionError("other values came back")
        return "right"

    def side_stream() -> str:
        stream, done = module.Stream(), module.Event()
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            there = host.to(kind).add_(1)
            done.record()
        module.current_stream().wait_event(done)
        return right(there.add(1), host + 2)

    def time_elapsed() -> str:
        first, last = module.Event(enable_timing=True), module.Event(enable_timing=True)
        first.record()
        host.to(kind).add_(1)
        last.record()
        last.synchronize()
        return f"{first.elapsed_time(last):.3f} ms"

    def pinned() -> str:
        mine = host.pin_memory()
        back = torch.empty_like(mine, pin_memory=True)
        back.copy_(mine.to(kind, non_blocking=True), non_blocking=True)
        if not (mine.is_pinned() and back.is_pinned()):
            raise AssertionError("pin_memory gave memory that is not pinned")
        return right(back)

    def batched() -> str:
        mine = list(host.pin_memory().chunk(16))
        there = [torch.empty_like(t, device=kind) for t in mine]
        back = [torch.zeros_like(t).pin_memory() for t in mine]
        torch._foreach_copy_(there, mine, non_blocking=True)
        torch._foreach_copy_(back, there, non_blocking=True)
        module.synchronize()
        return right(torch.cat(back))

    return {
        "a copy there and back": lambda: right(host.to(kind)),
        "a side stream": side_stream,
        "timed events": time_elapsed,
        "pinned copies": pinned,
        "batched copies": batched,
    }


def times(backend: str, *ops: str) -> None:
    """Each op's first call, compilation included, and the median of the next."""
    import torch

    from hal._remote.target import RegistryTarget
    from hal.ops.proofs.inputs import on_device
    from hal.registry import current

    target = RegistryTarget.of(backend, "device")
    module = torch.get_device_module(target.device.type)
    for op in ops:
        spec = current().spec(op)

        def look(op: str = op, spec: Any = spec) -> dict[str, float]:
            given = on_device(spec.make(**spec.samples[0].params), target.device)
            begin = time.perf_counter()
            target.dispatch(op, given)
            module.synchronize()
            first = time.perf_counter() - begin
            return {"first_us": round(first * 1e6, 1), **_median(lambda: target.dispatch(op, given), module)}

        check(op, look)
    _peak(module)


def _median(call: Callable[[], Any], module: Any) -> dict[str, float]:
    """Of at most 15 calls, each waited for, within about a second."""
    taken: list[float] = []
    end = time.perf_counter() + 1
    call()
    while len(taken) < 15 and (len(taken) < 3 or time.perf_counter() < end):
        module.synchronize()
        begin = time.perf_counter()
        call()
        module.synchronize()
        taken.append(time.perf_counter() - begin)
    return {"median_us": round(statistics.median(taken) * 1e6, 1), "best_us": round(min(taken) * 1e6, 1)}


def _peak(module: Any) -> None:
    import resource

    if hasattr(module, "max_memory_allocated"):
        check("peak memory of the device, bytes", lambda: int(module.max_memory_allocated()))
    check("peak memory of the process, KiB", lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


if __name__ == "__main__":
    with data_output() as stdout:
        out = stdout
        steps: dict[str, Any] = {"machine": machine, "states": states, "device": device, "times": times}
        steps[sys.argv[1]](*sys.argv[2:])
