"""The ops beyond the core through the Triton launchers: interpreted, or on a CUDA device."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch
from engine.cases import OPS

from hal._remote.target import DirectTarget
from hal.conformance._result import PASSED, Case
from hal.conformance.execute import execute
from hal.conformance.proofs.run import run_case
from hal.ops import get_spec

CUDA = torch.cuda.is_available()

pytestmark = pytest.mark.skipif(
    not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA device or TRITON_INTERPRET=1"
)

SAMPLES = [(op, s) for op in OPS for s in get_spec(op).samples]


def target_of(op: str) -> DirectTarget:
    launcher = getattr(importlib.import_module(f"hal.backends.cuda.{op}"), op)
    return DirectTarget.of(op, launcher, "cuda" if CUDA else "cpu")


@pytest.mark.parametrize(("op", "sample"), SAMPLES, ids=lambda x: getattr(x, "name", x))
def test_sample(op: str, sample: Any) -> None:
    execute(get_spec(op), get_spec(op).make(**sample.params), target_of(op))


@pytest.mark.parametrize("op", OPS)
def test_ragged(op: str) -> None:
    case = Case(op, "ragged", "all")
    result = run_case(case, target_of(op), get_spec(op), examples=200 if CUDA else 12)
    assert (result.outcome, result.reason) == (PASSED, "")


def test_threads() -> None:
    """Triton's interpreter has globals: launches from several threads must not meet in them."""
    target = target_of("kv_write")
    target.lane = "device" if CUDA else "interpreter"
    result = run_case(Case("kv_write", "threads", "all"), target, get_spec("kv_write"))
    assert (result.outcome, result.reason) == (PASSED, "")
