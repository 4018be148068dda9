"""The suite as pytest tests, for developing a backend. It never certifies; ``hal conformance --certify`` does."""

from __future__ import annotations

from functools import cache
from random import SystemRandom
from typing import Any

import pytest

from hal._remote.target import RegistryTarget
from hal.conformance._cases import case_list
from hal.conformance._report import failure_text
from hal.conformance._result import FAILED, PASSED, Case
from hal.conformance.proofs.run import run_case
from hal.registry import current


@cache
def _seed() -> int:
    return SystemRandom().randrange(2**32)


@cache
def _target(backend: str, lane: str) -> RegistryTarget:
    return RegistryTarget.of(backend, lane)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config: Any = metafunc.config
    if not config.getoption("--hal-backend", None):
        raise pytest.UsageError("hal.conformance: which backend? Give --hal-backend BACKEND")
    table = current()
    names = config.getoption("--hal-op") or table.op_names
    cases = case_list({name: table.spec(name) for name in names})
    metafunc.parametrize("case", cases, ids=[c.id for c in cases])


def test_conformance(case: Case, pytestconfig: pytest.Config) -> None:
    target = _target(pytestconfig.getoption("--hal-backend"), pytestconfig.getoption("--hal-lane"))
    result = run_case(case, target, current().spec(case.op), fixed=False, seed=_seed())
    if result.outcome == FAILED:
        pytest.fail(failure_text(result.to_json()), pytrace=False)
    if result.outcome != PASSED:
        pytest.skip(f"{result.outcome}: {result.reason}")
