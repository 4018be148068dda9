"""Every op through the Triton launchers: interpreted, or on a CUDA device."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch

from hal._remote.target import DirectTarget
from hal.conformance._result import PASSED, Case
from hal.conformance.execute import execute
from hal.conformance.proofs.run import run_case
from hal.ops import BUILTIN, get_spec
from hal.ops.spec import Sample

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.skipif(not CUDA and not INTERPRETED, reason="needs a CUDA device or TRITON_INTERPRET=1")


def samples(op: str) -> list[Sample]:
    """Of an op; interpreted those that start a kernel with a constant that none before them has, `ci/test all`: all."""
    if CUDA or not INTERPRETED or os.environ.get("CI_ALL"):
        return list(get_spec(op).samples)
    from hal.backends.cuda import inspect

    seen, found = set(), []
    for sample in get_spec(op).samples:
        if not sample.large:
            calls = inspect.calls(op, sample, 100)  # the kernels that are not Hopper's alone
            constants = {(call.kernel.name, *item) for call, _ in calls for item in call.static.items()}
            if constants - seen:
                found.append(sample)
            seen |= constants
    return found


SAMPLES = [(op, sample) for op in BUILTIN for sample in samples(op)]


@pytest.fixture(autouse=True)
def fewer_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, each program of a grid takes its time, whether it finds work or not: 'long' has some for all."""
    if INTERPRETED and not CUDA:
        monkeypatch.setattr("hal.backends.cuda.decode_attention.PER_SM", 1)


def target_of(op: str) -> DirectTarget:
    launcher = getattr(importlib.import_module(f"hal.backends.cuda.{op}"), op)
    return DirectTarget.of(op, launcher, "cuda" if CUDA else "cpu")


@pytest.mark.parametrize(("op", "sample"), SAMPLES, ids=lambda x: getattr(x, "name", x))
def test_sample(op: str, sample: Any) -> None:
    execute(get_spec(op), get_spec(op).make(**sample.params), target_of(op))


@pytest.mark.parametrize("op", BUILTIN)
def test_ragged(op: str) -> None:
    case = Case(op, "ragged", "all")
    result = run_case(
        case, target_of(op), get_spec(op), examples=200 if CUDA else 12 if os.environ.get("CI_ALL") else 5
    )
    assert (result.outcome, result.reason) == (PASSED, "")


def test_threads() -> None:
    """Triton's interpreter has globals: launches from several threads must not meet in them."""
    target = target_of("kv_write")
    target.lane = "device" if CUDA else "interpreter"
    result = run_case(Case("kv_write", "threads", "all"), target, get_spec("kv_write"))
    assert (result.outcome, result.reason) == (PASSED, "")
