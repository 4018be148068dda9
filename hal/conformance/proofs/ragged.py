"""Shapes that Hypothesis draws from what the op calls ragged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hal.conformance._arena import POISONS
from hal.conformance._result import NOT_RUN, Skip
from hal.conformance._verdict import Failure
from hal.conformance.execute import BOUND, Refused
from hal.conformance.proofs.fresh import is_range

if TYPE_CHECKING:
    from hal.conformance.proofs.run import Run


def ragged(run: Run) -> None:
    try:
        from hypothesis import HealthCheck, Phase, assume, given, settings, strategies
    except ImportError:
        raise Skip(NOT_RUN, "hypothesis is not installed: pip install 'hal-kernels[conformance]'") from None
    ran = 0
    examples = min(run.examples, 8) if run.slow else run.examples

    def strategy(r: Any) -> Any:
        return strategies.integers(*r) if is_range(r) else strategies.sampled_from(list(r))

    @settings(
        derandomize=run.fixed,
        database=None,
        deadline=None,
        max_examples=examples,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        phases=(Phase.generate, Phase.shrink),
    )
    @given(
        strategies.fixed_dictionaries({name: strategy(r) for name, r in run.spec.ragged.items()}),
        strategies.integers(0, 2**16),
    )
    def draw(params: dict[str, Any], seed: int) -> None:
        nonlocal ran
        try:
            run.prove({**params, "seed": seed}, ways=((BOUND, POISONS[seed % 2]),))
        except Refused:
            assume(False)
        ran += 1

    draw()
    run.control()
    if ran < examples // 3:
        raise Failure(f"only {ran} of the {examples} drawn shapes ran; the others were refused")
