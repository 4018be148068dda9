"""The catalogue of sabotaged backends and what counts as a kill; ``ci/sabotage`` runs all of them."""

from __future__ import annotations

from sabotage import faults
from sabotage._healthy import Fault
from sabotage._run import kill

from hal.ops import BUILTIN


def test_the_catalogue() -> None:
    """At least thirty that a CPU shows, over all four ops; what needs a device is said to be not run."""
    on_cpu = [f for f in faults() if "cpu" in f.device]
    assert len(on_cpu) >= 30
    assert {f.op for f in on_cpu} == set(BUILTIN)
    elsewhere = [f for f in faults() if "cpu" not in f.device]
    assert {p for f in elsewhere for p in f.proofs} == {"stream", "sync", "graph", "overlap", "memory"}
    assert all(kill(f).outcome == "not run" for f in elsewhere)


def test_a_kill_for_another_reason_does_not_count() -> None:
    (fault,) = [f for f in faults() if f.name == "v never written"]
    assert kill(fault).outcome == "killed"
    other = Fault(fault.name, fault.op, fault.make, r"fell back in secret", ("stream", "errors"))
    assert kill(other).outcome == "survived"
