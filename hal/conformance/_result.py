"""What a case may come to. Standard library only."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

PASSED, FAILED, REFUSED, NOT_APPLICABLE, NOT_RUN = "passed", "failed", "refused", "not_applicable", "not_run"
SIMULATED = "simulated"
OUTCOMES = (PASSED, FAILED, REFUSED, NOT_APPLICABLE, NOT_RUN, SIMULATED)


class Skip(Exception):
    """The suite, not the backend, decides that a case does not apply or could not run."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


@dataclass(frozen=True)
class Case:
    """One thing to prove.

    Attributes:
        id: ``op/proof/name``.
        sample: the `Sample` whose arguments it uses, or None where it makes its own.
        tag: ``required``, or ``feature:<name>``.
        may_die: may end the process; runs where its death is its own.
    """

    op: str
    proof: str
    name: str
    sample: str | None = None
    tag: str = "required"
    may_die: bool = False

    @property
    def id(self) -> str:
        return f"{self.op}/{self.proof}/{self.name}"


@dataclass
class Result:
    """What came of a case.

    Attributes:
        outcome: one of `OUTCOMES`.
        reason: why; of a pass, what there is to know of it, such as fewer repetitions for a slow backend.
        snippet: a program that runs the failing example again.
        headroom: dtype of a result -> its largest error, in units of the bound.
    """

    id: str
    outcome: str
    reason: str = ""
    snippet: str = ""
    headroom: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def first_line(e: BaseException) -> str:
    return str(e).strip().splitlines()[0] if str(e).strip() else repr(e)
