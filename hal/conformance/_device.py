"""Proofs that need a device: streams, hidden synchronisation, graphs, programmatic launch, memory.

On a CPU, and on the lanes that stand in for a device, they do not apply. `torch.cuda` alone is
driven so far; another accelerator is reported as not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hal.conformance._arena import POISONS, Block, Placed
from hal.conformance._proofs import Outcome, Refused, Run, short_trace
from hal.conformance._result import NOT_APPLICABLE, NOT_RUN
from hal.conformance._verdict import Failure
from hal.ops._spec import Sample

_cuda: Any = torch.cuda  # parts of it have no annotations

SPIN_MS = 60
"""How long the kernel spins that a call must not wait for: far longer than any launch, far shorter than a hang."""


def _needs_cuda(run: Run) -> None:
    if run.device.type == "cpu":
        raise Outcome(NOT_APPLICABLE, f"lane {run.target.lane} on a CPU has no streams")
    if run.device.type != "cuda":
        raise Outcome(NOT_RUN, f"not written for {run.device.type} yet")


@contextmanager
def spinning(ms: float = SPIN_MS) -> Iterator[None]:
    """Keeps the current stream busy for about `ms` before anything that is launched inside."""
    _cuda._sleep(int(ms * 1e-3 * _cycles_per_second()))
    yield


_RATE: list[float] = []


def _cycles_per_second() -> float:
    if not _RATE:
        _cuda._sleep(1_000_000)
        torch.cuda.synchronize()
        begin, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
        begin.record()
        _cuda._sleep(20_000_000)
        end.record()
        end.synchronize()
        _RATE.append(20_000_000 / (begin.elapsed_time(end) * 1e-3))
    return _RATE[0]


def _chosen(run: Run) -> list[Sample]:
    """Three samples of different shapes, none that asks for slots on the CPU."""
    on_device = [s for s in run.busy if s.params.get("method") != "direct"]
    return [on_device[0], on_device[len(on_device) // 2], on_device[-1]]


def _ready(
    run: Run, sample: Sample, seed: int = 0, poison: int = POISONS[1]
) -> tuple[Any, Placed, Callable[[], Any]]:
    """(what must come out, arguments on the device, the bound call), everything compiled and warm."""
    arguments = run.make(**{**sample.params, "seed": seed})
    wants = run.spec.oracle(arguments)
    warm = run.place(arguments, poison)
    why = run.why_not(warm)
    if why is not None:
        raise Refused(why)
    run.judge(wants, warm, run.call(warm))
    placed = run.place(arguments, poison)
    fn = run.target.bound(run.op, placed.values).fn
    torch.cuda.synchronize(run.device)
    return wants, placed, lambda: fn(**placed.values)


def _inputs(placed: Placed) -> list[Block]:
    return list(placed.all())


def stream(run: Run) -> None:
    """The inputs arrive late, on a side stream, and the result is read there: right only if the op runs
    on that stream, wherever else it may have been launched."""
    _needs_cuda(run)
    for sample in _chosen(run):
        wants, placed, call = _ready(run, sample)
        final = [b.raw.clone() for b in _inputs(placed)]
        for b in _inputs(placed):
            b.raw.fill_(0)
        torch.cuda.synchronize(run.device)
        side = _cuda.Stream(run.device)
        with torch.cuda.stream(side), spinning():
            for b, whole in zip(_inputs(placed), final, strict=True):
                b.raw.copy_(whole)
            ret = call()
            copies = [b.raw.clone() for b in _inputs(placed)]
            out = ret.clone() if isinstance(ret, Tensor) and ret is not placed.values.get("out") else ret
        side.synchronize()
        for b, whole in zip(_inputs(placed), copies, strict=True):
            b.raw.copy_(whole)
        torch.cuda.synchronize(run.device)
        _judged(run, wants, placed, out, "on a side stream")


def _judged(run: Run, wants: Any, placed: Placed, ret: Any, where: str) -> None:
    try:
        run.judge(wants, placed, ret)
    except Failure as e:
        raise Failure(f"{where}: {e}") from None


def sync(run: Run) -> None:
    """A call that waits for the device returns only when the spinning kernel ahead of it has ended."""
    _needs_cuda(run)
    for sample in _chosen(run):
        wants, placed, call = _ready(run, sample)
        call()
        torch.cuda.synchronize(run.device)
        placed = run.place(run.make(**sample.params), POISONS[1])
        fn = run.target.bound(run.op, placed.values).fn
        torch.cuda.synchronize(run.device)
        current = torch.cuda.current_stream(run.device)
        mode = torch.cuda.get_sync_debug_mode()
        with spinning():
            try:
                torch.cuda.set_sync_debug_mode("error")
                ret = fn(**placed.values)
            except RuntimeError as e:
                raise Failure(f"hidden synchronisation: {e}\n{short_trace(e)}") from e
            finally:
                torch.cuda.set_sync_debug_mode(mode)
            busy = not current.query()
        torch.cuda.synchronize(run.device)
        if not busy:
            raise Failure(
                f"{sample.name}: hidden synchronisation: behind a kernel that spins for {SPIN_MS} ms the call "
                "returned only when the stream was idle"
            )
        _judged(run, wants, placed, ret, "behind a spinning kernel")


def graph(run: Run) -> None:
    """One capture, four replays, each with new values in the same tensors."""
    _needs_cuda(run)
    for sample in _chosen(run):
        _, placed, call = _ready(run, sample)
        if not run.target.bound(run.op, placed.values).graph_safe:
            if run.spec.core and run.target.backend != "reference":
                raise Failure("not declared graph_safe, which a core op must be")
            raise Outcome(NOT_APPLICABLE, "not declared graph_safe")
        side = _cuda.Stream(run.device)
        with torch.cuda.stream(side):
            call()
        torch.cuda.synchronize(run.device)
        captured = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(captured):
                ret = call()
        except RuntimeError as e:
            raise Failure(f"can't be captured into a graph: {e}\n{short_trace(e)}") from e
        for turn in range(4):
            fresh = run.make(**{**sample.params, "seed": 31 + turn})
            wants = run.spec.oracle(fresh)
            other = run.place(fresh, POISONS[turn % 2])
            same = [b.raw.numel() for b in placed.all()] == [b.raw.numel() for b in other.all()]
            if not same:
                # Sizes that the seed decides: this sample can't be replayed with other values.
                break
            for b, new in zip(placed.all(), other.all(), strict=True):
                b.raw.copy_(new.raw)
                b.snapshot()
            torch.cuda.synchronize(run.device)
            captured.replay()
            torch.cuda.synchronize(run.device)
            _judged(run, wants, placed, ret, f"replay {turn + 1} of a captured graph")


def overlap(run: Run) -> None:
    """One kernel writes all inputs, late, having let the next one start early; the op; a kernel that was let
    start early in its turn copies everything away. Nothing syncs between them.

    An op under programmatic launch must wait before it reads, and on every path before it exits: its end is
    all that the consumer waits for.
    """
    _needs_cuda(run)
    if torch.cuda.get_device_capability(run.device) < (9, 0):
        raise Outcome(NOT_APPLICABLE, "programmatic launch needs sm_90")
    try:
        from hal.conformance._producer import late_copy
    except ImportError:
        raise Outcome(
            NOT_RUN, "the slow producer is a Triton kernel: pip install 'hal-kernels[cuda]'"
        ) from None
    for sample in _chosen(run):
        wants, placed, call = _ready(run, sample)
        blocks = list(placed.all())
        final = [b.raw.clone() for b in blocks]
        copies = [torch.empty_like(b.raw) for b in blocks]
        example = call()
        fresh = isinstance(example, Tensor) and not any(example is v for v in placed.values.values())
        out = torch.empty_like(example) if fresh else example
        produce = _table([(f, b.raw) for f, b in zip(final, blocks, strict=True)])
        for turn in range(6):
            for b in blocks:
                # What an op that does not wait would read: zeros, or numbers out of range as indices.
                b.raw.fill_(0x11 if turn % 2 else 0)
            torch.cuda.synchronize(run.device)
            spin = 0 if turn == 0 else 400_000
            late_copy[(len(blocks),)](produce, spin, WAIT=False, EARLY=True, BLOCK=1024, num_warps=4)
            ret = call()
            pairs = [(b.raw, c) for b, c in zip(blocks, copies, strict=True)]
            consume = _table(pairs + ([(ret, out)] if fresh else []))
            late_copy[(consume.numel() // 3,)](
                consume, 0, WAIT=True, EARLY=False, BLOCK=1024, num_warps=4, launch_pdl=True
            )
            torch.cuda.synchronize(run.device)
            for b, whole in zip(blocks, copies, strict=True):
                b.raw.copy_(whole)
            torch.cuda.synchronize(run.device)
            _judged(
                run, wants, placed, out if fresh else ret, "between a slow producer and an early consumer"
            )


def _table(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """(source, target, bytes) per pair, on the device. Pinned and asynchronous: it must not sync the stream."""
    rows = torch.tensor([[a.data_ptr(), b.data_ptr(), a.nbytes] for a, b in pairs], dtype=torch.int64).view(
        -1
    )
    return rows.pin_memory().to(pairs[0][1].device, non_blocking=True)


def memory(run: Run) -> None:
    """After a call the device holds its result and nothing else."""
    _needs_cuda(run)
    for sample in _chosen(run):
        _, placed, call = _ready(run, sample)
        call()
        torch.cuda.synchronize(run.device)
        before = torch.cuda.memory_allocated(run.device)
        ret = call()
        torch.cuda.synchronize(run.device)
        held = torch.cuda.memory_allocated(run.device) - before
        allowed = -(-max(ret.nbytes, 1) // 512) * 512 if isinstance(ret, Tensor) else 0
        if any(ret is v for v in placed.values.values()):
            allowed = 0
        if held > allowed:
            raise Failure(
                f"{sample.name}: the call holds {held} bytes of device memory; its result needs {allowed}"
            )
    run.control()


PROOFS: dict[str, Callable[[Run], None]] = {
    "stream": stream, "sync": sync, "graph": graph, "overlap": overlap, "memory": memory,
}  # fmt: skip
