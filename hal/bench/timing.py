# mypy: disable-error-code="no-untyped-call, unused-ignore"
# torch.cuda has untyped streams and events.
"""How calls are timed: `measure` on a CPU, the others on a GPU.

Rounds are interleaved: each runs every implementation in turn. On a GPU, device time is the median over replays of
CUDA graphs of many calls on rotating inputs; host time the median of single calls without a sync.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hal.bench import OURS, Row

LIMIT_S = 5.0
"""After so long `measure` ends with fewer rounds, at least five: a busy machine must not make a bench of hours."""
Calls = Mapping[str, Callable[[int], Any]]
"""Implementation -> call on the i-th set of inputs."""


# --- a CPU ------------------------------------------------------------------------------------------


def measure(
    calls: Mapping[str, Callable[[], Any]], quick: bool = False, rounds: int = 15, slice_s: float = 0.02
) -> Row:
    """Microseconds of each call: ``wall_us``, ``best``, ``spread``, and ``ratios`` to `OURS`.

    The order of a round rotates. Within a round, an implementation's time is the median of its calls. Shown are the
    median over rounds, the spread (half the range of the middle half, over the median), and ratios of the best calls:
    on a machine that others use too, a median says much of them, and the more the more threads an implementation
    waits for.

    Args:
        slice_s: about how long an implementation runs in a round, at least three calls.
    """
    names = list(calls)
    count = {}
    for name, call in calls.items():
        call()
        begin = time.perf_counter()
        call()
        count[name] = max(3, min(2000, int((0.002 if quick else slice_s) / max(1e-7, time.perf_counter() - begin))))
    times: dict[str, list[float]] = {name: [] for name in names}
    best = dict.fromkeys(names, float("inf"))
    end = time.perf_counter() + LIMIT_S
    for r in range(3 if quick else rounds):
        if r >= 5 and time.perf_counter() > end:
            break
        for name in names[r % len(names) :] + names[: r % len(names)]:
            call, one = calls[name], []
            for _ in range(count[name]):
                begin = time.perf_counter()
                call()
                one.append((time.perf_counter() - begin) * 1e6)
            times[name].append(statistics.median(one))
            best[name] = min(best[name], *one)
    row: Row = {
        "wall_us": {n: statistics.median(t) for n, t in times.items()},
        "best": best,
        "spread": {n: _spread(t) for n, t in times.items()},
    }
    if OURS in times:
        row["ratios"] = {n: row["best"][n] / row["best"][OURS] for n in names if n != OURS}
    return row


def _spread(t: list[float]) -> float:
    low, _, high = statistics.quantiles(t, n=4)
    return (high - low) / 2 / statistics.median(t)


# --- a GPU ------------------------------------------------------------------------------------------


def device_us(calls: Calls, sets: int, per_graph: int = 96, rounds: int = 25) -> dict[str, float]:
    """Median microseconds of device time per call, by replay of graphs of `per_graph` calls."""
    graphs = {}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for name, call in calls.items():
            for i in range(min(sets, 3)):
                call(i)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for i in range(per_graph):
                    call(i % sets)
            graphs[name] = graph
        times: dict[str, list[float]] = {name: [] for name in calls}
        for r in range(rounds + 3):
            for name, graph in graphs.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                graph.replay()
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                if r >= 3:
                    times[name].append(start.elapsed_time(end) * 1000 / per_graph)
    return {name: statistics.median(t) for name, t in times.items()}


def capture(call: Callable[[], Any]) -> None:
    """One call in a graph, as `device_us` has many: raises where the call can't be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        graph.replay()
    torch.cuda.synchronize()


def host_us(calls: Calls, sets: int = 1, count: int = 300) -> dict[str, float]:
    """Median microseconds that one call keeps the host, not waiting for the device."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(4):
        for name, call in calls.items():
            torch.cuda.synchronize()
            for i in range(count // 4):
                begin = time.perf_counter()
                call(i % sets)
                times[name].append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return {name: statistics.median(t) * 1e6 for name, t in times.items()}


def wall_gbs(calls: Mapping[str, Callable[[], Any]], nbytes: int, rounds: int = 5) -> dict[str, float]:
    """Median GB/s by the wall clock, from an idle device to an idle device."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for r in range(rounds + 1):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if r:
                times[name].append(time.perf_counter() - begin)
    return {name: nbytes / statistics.median(t) / 1e9 for name, t in times.items()}


def copy_gbs(nbytes: int = 1 << 31) -> float:
    """GB/s of a device-to-device copy, read and written bytes counted: the ceiling."""
    a = torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_(0, 255)
    b = torch.empty_like(a)
    times: list[float] = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * nbytes / statistics.median(times) / 1e6


def free_memory() -> None:
    """Gives what a case leaves behind back to the device: the next may need all of it."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def time_kernels(run: Callable[[], Any], most: int = 24) -> list[Row]:
    """The `most` kernels that took longest while `run` ran: ``{"kernel", "calls", "us"}``, `us` of all its calls.

    Torch's profiler slows the host, not the kernels: what the device waits for is not in these times.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    rows: list[Row] = [
        {"kernel": e.key[:100], "calls": e.count, "us": round(e.self_device_time_total, 1)}
        for e in profiler.key_averages()
        if e.device_type.name == "CUDA"
    ]
    return sorted(rows, key=lambda row: -float(row["us"]))[:most]
