"""Sabotaged backends that are quick to kill; ``ci/sabotage`` runs all of them."""

from __future__ import annotations

import re

import pytest
from sabotage import faults
from sabotage._healthy import Fault
from sabotage._run import false_alarms, kill

from hal.ops import BUILTIN

QUICK = [
    "output allocated on another device", "mutates the index tensor", "falls back in secret",
    "keeps every result", "race between threads", "stale launch cache", "unwritten tail", "write past the end",
    "v never written", "k and v swapped", "accumulates in bf16", "nondeterministic",
    "result on the default device", "scratch on the default device", "table in the default dtype",
    "divides by the heads", "a nan of another request", "supports says no and would run",
    "one layer missed", "layout pair transposed", "moves instead of copying",
]  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_it_is_killed_for_what_is_wrong_with_it(name: str) -> None:
    (fault,) = [f for f in faults() if f.name == name]
    got = kill(fault)
    assert got.outcome == "killed", got.message
    assert re.search(fault.message, got.message)


@pytest.mark.parametrize("fault", [f for f in faults() if f.plugin], ids=lambda f: f.name)
def test_a_cheat_is_not_taken_for_right(fault: Fault) -> None:
    got = kill(fault)
    assert got.outcome == "killed", got.message


@pytest.mark.parametrize("op", BUILTIN)
def test_a_healthy_backend_is_not_accused(op: str) -> None:
    assert false_alarms(op) == []


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
    other = Fault(fault.name, fault.op, fault.make, r"fell back in secret", ("stream", "errors"))
    assert kill(other).outcome == "survived"
