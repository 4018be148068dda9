"""How far a run has got, for who waits for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from hal import _progress
from hal.conformance._result import FAILED, Case, Result

Progress = Callable[[Result, int, int], None]

WEIGHTS = {
    "soak": 100,
    "leak": 100,
    "later": 100,
    "ragged": 100,
    "fresh": 15,
    "sequence": 15,
    "threads": 15,
    "extremes": 5,
    "defaults": 5,
}
"""How many times as long as a plain call a case of a proof takes, about: or the time left would be told too short."""


def teller(bar: _progress.Bar, cases: Sequence[Case]) -> Progress:
    """On a terminal a bar, elsewhere a line per op."""
    left = {c.id: c for c in cases}
    whole, done, bad = sum(map(weight, cases)), 0.0, 0
    seen: set[str] = set()
    drawn = _progress.is_wanted()
    bar.size(whole)

    def tell(result: Result, i: int, n: int) -> None:
        nonlocal done, bad
        done += weight(left.pop(result.id))
        bad += result.outcome == FAILED
        op = result.id.partition("/")[0]
        if not drawn and op not in seen:
            print(f"{op} ...", file=sys.stderr, flush=True)
        seen.add(op)
        bar.at(done, f"{f'{bad} failed, now ' if bad else ''}{next(iter(left), '')}")

    bar.at(0.0, next(iter(left), ""))
    return tell


def weight(case: Case) -> float:
    return WEIGHTS.get(case.proof, 1)
