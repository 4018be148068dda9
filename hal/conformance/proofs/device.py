"""Proofs that need a device: streams, hidden synchronisation, graphs, programmatic launch, memory.

On a CPU, and on the lanes that stand in for a device, they do not apply. Devices other than `torch.cuda`'s were driven
on an emulated one alone so far; what torch's module of a device lacks is reported as not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hal.conformance._arena import POISONS, Placed
from hal.conformance._result import NOT_APPLICABLE, NOT_RUN, Skip
from hal.conformance._verdict import Failure, Ret
from hal.ops.proofs.judge import Want
from hal.ops.spec import Sample

if TYPE_CHECKING:
    from hal.conformance.proofs.run import Run

SPIN_MS = 60
"""How long the kernel spins that a call must not wait for: far longer than any launch, far shorter than a hang."""


def _needs_streams(run: Run) -> None:
    if run.device == "cpu":
        raise Skip(NOT_APPLICABLE, f"lane {run.caller.lane} on a CPU has no streams")


def _choose_samples(run: Run) -> list[Sample]:
    """Three samples of different shapes, none that asks for slots on the CPU."""
    on_device = [s for s in run.busy if s.params.get("method") != "direct"]
    return [on_device[0], on_device[len(on_device) // 2], on_device[-1]]


def _ready(run: Run, sample: Sample) -> tuple[dict[str, Any], dict[str, Want]]:
    """The sample's arguments and what must come of them, everything compiled and warm."""
    arguments, wants = run.example({**sample.params, "seed": 0})
    warm = run.place(arguments, POISONS[1])
    run.judge(wants, warm, run.call(warm))
    return arguments, wants


def _judge(run: Run, wants: Mapping[str, Want], placed: Placed, said: Mapping[str, Any], where: str) -> None:
    try:
        run.judge(wants, placed, Ret.of(said["ret"], placed))
    except Failure as e:
        raise Failure(f"{where}: {e}") from None


def stream(run: Run) -> None:
    """The inputs arrive late, on a side stream, and the result is read there: right only if the op runs
    on that stream, wherever else it may have been launched."""
    _needs_streams(run)
    for sample in _choose_samples(run):
        arguments, wants = _ready(run, sample)
        placed = run.place(arguments, POISONS[1])
        _judge(run, wants, placed, run.do("stream", placed, spin_ms=SPIN_MS), "on a side stream")


def sync(run: Run) -> None:
    """A call that waits for the device returns only when the spinning kernel ahead of it has ended."""
    _needs_streams(run)
    for sample in _choose_samples(run):
        arguments, wants = _ready(run, sample)
        placed = run.place(arguments, POISONS[1])
        said = run.do("sync", placed, spin_ms=SPIN_MS)
        if said["asked"]:
            raise Failure(f"hidden synchronisation: {said['asked']}")
        if not said["busy"]:
            raise Failure(
                f"{sample.name}: hidden synchronisation: behind a kernel that spins for {SPIN_MS} ms the call "
                "returned only when the stream was idle"
            )
        _judge(run, wants, placed, said, "behind a spinning kernel")


def graph(run: Run) -> None:
    """One capture, four replays: with the values that were captured, then each with new ones in the same tensors."""
    _needs_streams(run)
    for sample in _choose_samples(run):
        arguments, _ = _ready(run, sample)
        placed = run.place(arguments, POISONS[1])
        turns = []
        for turn, seed in enumerate((0, 31, 32, 33)):
            fresh, wants = run.example({**sample.params, "seed": seed})
            other = run.place(fresh, POISONS[turn % 2])
            if not placed.same_layout(other):
                # Sizes that the seed decides: this sample can be replayed with its own values alone.
                break
            turns.append((other, wants))
        said = run.do("graph", placed, *(other for other, _ in turns))
        if said["outcome"] == "not_run":
            raise Skip(NOT_RUN, str(said["why"]))
        if not said["graph_safe"]:
            if run.spec.core and run.caller.backend != "reference":
                raise Failure("not declared graph_safe, which a core op must be")
            raise Skip(NOT_APPLICABLE, "not declared graph_safe")
        if said["captured"]:
            raise Failure(f"can't be captured into a graph: {said['captured']}")
        for turn, ((other, wants), one) in enumerate(zip(turns, said["calls"], strict=True)):
            _judge(run, wants, other, one, f"replay {turn + 1} of a captured graph")


def overlap(run: Run) -> None:
    """One kernel writes all inputs, late, having let the next one start early; the op; a kernel that was let
    start early in its turn copies everything away. Nothing syncs between them.

    An op under programmatic launch must wait before it reads, and on every path before it exits: its end is
    all that the consumer waits for.
    """
    _needs_streams(run)
    for sample in _choose_samples(run):
        arguments, wants = _ready(run, sample)
        turns = [run.place(arguments, POISONS[1]) for _ in range(6)]
        said = run.do("overlap", *turns)
        if said["outcome"] != "returned":
            raise Skip(NOT_APPLICABLE if said["outcome"] == "not_applicable" else NOT_RUN, str(said["why"]))
        for placed, one in zip(turns, said["calls"], strict=True):
            _judge(run, wants, placed, one, "between a slow producer and an early consumer")


def memory(run: Run) -> None:
    """After a call the device holds its result and nothing else."""
    _needs_streams(run)
    for sample in _choose_samples(run):
        arguments, _ = _ready(run, sample)
        said = run.do("memory", run.place(arguments, POISONS[1]))
        if said["held"] > said["allowed"]:
            raise Failure(
                f"{sample.name}: the call holds {said['held']} bytes of device memory; its result needs "
                f"{said['allowed']}"
            )
    run.control()


PROOFS: dict[str, Callable[[Run], None]] = {
    "stream": stream,
    "sync": sync,
    "graph": graph,
    "overlap": overlap,
    "memory": memory,
}
