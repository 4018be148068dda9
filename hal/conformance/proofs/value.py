"""Every element right and the rest untouched: as the samples are, far, off their alignment, at pages, in host pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal._errors import HalError
from hal.conformance._arena import POISONS
from hal.conformance._result import NOT_APPLICABLE, NOT_RUN, Skip, first_line
from hal.conformance._truths import names_nothing
from hal.conformance.execute import BOUND, DISPATCHED, Refused

if TYPE_CHECKING:
    from hal.conformance.proofs.run import Run


def value(run: Run) -> None:
    sample = run.sample()
    if names_nothing(run.prove(sample.params)):
        run.control(sample.control)


def large(run: Run) -> None:
    sample = run.sample()
    try:
        with run.caller.arena.borrow():
            run.place(run.make(**sample.params))
    except (RuntimeError, OSError, MemoryError) as e:
        if isinstance(e, HalError):
            raise
        raise Skip(NOT_RUN, f"no memory for so large a sample: {first_line(e)}") from None
    run.prove(sample.params, ways=((BOUND, POISONS[1]),))


def misaligned(run: Run) -> None:
    if names_nothing(run.prove(run.sample().params, ways=((BOUND, POISONS[0]), (DISPATCHED, POISONS[1])), shift=1)):
        run.control()


def pages(run: Run) -> None:
    if run.device != "cpu":
        raise Skip(NOT_APPLICABLE, "guard pages are for host memory; the device has compute-sanitizer")
    nothing = False
    for side in ("end",) if run.slow else ("end", "start"):
        nothing = names_nothing(run.prove(run.sample().params, ways=((BOUND, POISONS[0]),), side=side))
    if nothing:
        run.control()


def placement(run: Run) -> None:
    if run.device == "cpu":
        raise Skip(NOT_APPLICABLE, "on a CPU there is one place for a pool")
    where = run.case.name
    if where == "host-to-host" and run.caller.takes is not None and "cpu" not in run.caller.takes:
        raise Skip(NOT_APPLICABLE, "the lane takes no tensors of the CPU: two host pools are another backend's")
    for sample in run.busy:
        method = sample.params.get("method", "auto")
        if method == "direct" and not (where.endswith("cpu-slots") or where == "host-to-host"):
            continue
        try:
            run.prove(sample.params, ways=((BOUND, POISONS[1]), (DISPATCHED, POISONS[0])), where=where)
        except Refused as e:
            raise Refused(f"{sample.name}: {e}") from None
