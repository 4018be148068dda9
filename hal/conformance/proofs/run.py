"""A case and the backend that it is proven on, and the table of proofs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hal._devices import EMULATED
from hal._remote.perform import short_trace
from hal._remote.target import Target
from hal.conformance._arena import POISONS
from hal.conformance._hands import Caller, Died, caller_of
from hal.conformance._result import FAILED, NOT_RUN, PASSED, REFUSED, Case, Result, Skip, first_line
from hal.conformance._truths import TRUTHS, names_nothing
from hal.conformance._verdict import Failure
from hal.conformance.execute import BOUND, DISPATCHED, Executor, Refused
from hal.conformance.proofs import device, extremes, inputs, refusals, repetition, soak, value
from hal.conformance.proofs.fresh import fresh
from hal.conformance.proofs.ragged import ragged
from hal.ops.proofs.judge import Want
from hal.ops.spec import OpSpec, Sample

WAYS = ((BOUND, POISONS[0]), (BOUND, POISONS[1]), (DISPATCHED, POISONS[1]))


@dataclass
class Run(Executor):
    """A backend and the case being proven on it.

    Args:
        examples: how many shapes Hypothesis draws.
        fixed: draw the same shapes every time (when certifying).
        imports: modules that register the backend, for the snippet.
        seed: what inputs that are drawn anew in every run are drawn from.
    """

    case: Case
    examples: int = 60
    fixed: bool = True
    imports: Sequence[str] = ()
    seed: int = 0
    failing: dict[str, Any] | None = None
    note: str = ""
    """What whoever reads of a pass should know."""
    trying: bool = False
    """Something is being tried whose crash would be no failure."""

    @property
    def slow(self) -> bool:
        """A lane that stands in for a device: a call takes a thousand times as long, so repetitions are fewer."""
        return self.caller.lane != "device"

    def sample(self, name: str | None = None) -> Sample:
        wanted = self.case.sample if name is None else name
        return next(s for s in self.spec.samples if s.name == wanted)

    @cached_property
    def busy(self) -> list[Sample]:
        """Required samples in which something is to be written."""
        return [s for s in self.spec.samples if s.tag == "required" and not s.large and s.control is None]

    def make(self, **params: Any) -> dict[str, Any]:
        self.failing = params
        return self.spec.make(**params)

    def example(self, params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Want]]:
        """The arguments that `params` make, and what must come of them; kept, as many proofs use one sample."""
        self.failing = dict(params)
        return TRUTHS.get(self.spec, params)

    def prove(
        self,
        params: Mapping[str, Any],
        ways: Sequence[tuple[str, int]] = WAYS,
        shift: int = 0,
        where: str = "",
        side: str = "",
    ) -> dict[str, Want]:
        """Calls the op in all `ways` with what `params` make, and judges every call."""
        arguments, wants = self.example(params)
        # Both poisons and both ways of calling, with a call less.
        for how, poison in (ways[0], ways[-1]) if self.slow and len(ways) > 2 else ways:
            self.execute(arguments, wants, how, poison, shift=shift, where=where, side=side)
        return wants

    def control(self, name: str | None = None) -> None:
        """A call that must write something, so that a no-op case proves something."""
        sample = self.busy[0] if name is None else self.sample(name)
        if names_nothing(self.prove(sample.params, ways=((BOUND, POISONS[1]),))):
            raise TypeError(f"{self.op}: control {sample.name} of {self.case.id} writes nothing")


PROOFS: dict[str, Callable[[Run], None]] = {
    "value": value.value,
    "large": value.large,
    "misaligned": value.misaligned,
    "pages": value.pages,
    "placement": value.placement,
    "supports": refusals.supports,
    "errors": refusals.errors,
    "determinism": repetition.determinism,
    "sequence": repetition.sequence,
    "threads": repetition.threads,
    "extremes": extremes.prove,
    "ragged": ragged,
    "fresh": fresh,
    "defaults": inputs.defaults,
    "empty": inputs.empty,
    "soak": soak.soak,
    "leak": soak.leak,
    "later": soak.later,
    **device.PROOFS,
}


def run_case(
    case: Case,
    target: Target | Caller,
    spec: OpSpec,
    *,
    examples: int = 60,
    fixed: bool = True,
    imports: Sequence[str] = (),
    seed: int = 0,
) -> Result:
    """Proves one case on a target. Never raises: whatever happens is the outcome."""
    began = time.perf_counter()
    run = Run(caller_of(target), spec, case, examples, fixed, imports, seed)
    # The suite's own arithmetic is many small tensors, for which a pool of threads only waits.
    natural = torch.get_num_threads()
    torch.set_num_threads(1)
    result = Result(case.id, PASSED)
    try:
        why = run.caller.ready(case.op)
        if why is not None:
            raise Skip(NOT_RUN, why)
        with run.caller.arena.borrow():
            PROOFS[case.proof](run)
        result.reason = run.note
    except Skip as e:
        result.outcome, result.reason = e.outcome, str(e)
    except Refused as e:
        result.outcome, result.reason = refusal(case, run.caller, str(e))
    except Failure as e:
        result.outcome, result.reason = FAILED, str(e)
    except Died as e:
        # `supports` had said no, and running it all the same killed the process: it was right.
        if not (run.trying and e.crashed):
            result.outcome, result.reason = FAILED, str(e)
    except Exception as e:
        result.outcome = FAILED
        result.reason = f"{type(e).__name__}: {first_line(e)}\n{short_trace(e)}"
    finally:
        torch.set_num_threads(natural)
    if result.outcome == FAILED:
        result.snippet = snippet(run)
    result.headroom = {k: round(v, 6) for k, v in run.room.items()}
    result.seconds = round(time.perf_counter() - began, 4)
    return result


def refusal(case: Case, target: Caller, why: str) -> tuple[str, str]:
    """A refusal is a failure where the sample is required, or where no declared limit covers it."""
    if case.tag == "required":
        return FAILED, f"supports refuses what is required: {why}"
    if target.limits is not None and not any(why.startswith(limit) for limit in target.limits):
        declared = ", ".join(target.limits) or "none"
        return (FAILED, f"refused for a reason that names no limit of the manifest (declared: {declared}): {why}")
    return REFUSED, why


def snippet(run: Run) -> str:
    """A program that runs the failing example again."""
    t = run.caller
    lane = t.lane.replace(EMULATED, "device")
    head = "".join(f"import {module}\n" for module in run.imports)
    if run.case.proof in ("value", "ragged", "fresh", "sequence", "large") and run.failing is not None:
        params = "".join(f", {k}={v!r}" for k, v in run.failing.items())
        call = f"replay({run.op!r}, backend={t.backend!r}, lane={lane!r}{params})"
        return f"{head}from hal.conformance import replay\n{call}\n"
    return (
        f"{head}from hal.conformance import replay_case\n"
        f"replay_case({run.case.id!r}, backend={t.backend!r}, lane={lane!r})\n"
    )
