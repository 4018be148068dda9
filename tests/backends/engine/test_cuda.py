"""Every op through the Triton launchers: interpreted, or on a CUDA device."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from fractions import Fraction
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


FEW = 8
"""Tokens, or requests, of an interpreted sample that may have as few: each takes its time."""


def samples(op: str) -> list[Sample]:
    """Of an op; interpreted as few as start each kernel with each constant that any does, `ci/test all`: all."""
    if CUDA or not INTERPRETED or os.environ.get("CI_ALL"):
        return list(get_spec(op).samples)
    from hal.backends.cuda import inspect

    def constants(sample: Sample) -> set[Any]:  # of kernels that are not Hopper's alone
        return {
            (call.kernel.name, *x)
            for call, _ in inspect.calls(op, sample, 100, ready=False)
            for x in call.static.items()
        }

    starts = []
    for sample in get_spec(op).samples:
        if not sample.large:
            short = {name: min(sample.params[name], FEW) for name in ("n", "bs") if name in sample.params}
            small, all_of = replace(sample, params={**sample.params, **short}), constants(sample)
            starts.append((small if constants(small) == all_of else sample, all_of))
    left, found = set[Any]().union(*(x for _, x in starts)), []
    while left:
        most, its = max(starts, key=lambda start: len(start[1] & left))
        found.append(most)
        left -= its
    return found


SAMPLES = [(op, sample) for op in BUILTIN for sample in samples(op)]


@pytest.fixture(autouse=True)
def fewer_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, each program of a grid takes its time, whether it finds work or not: 4 of them, of 16 processors."""
    if INTERPRETED and not CUDA:
        from hal.backends.cuda import decode_attention

        few = Fraction(1, 4)
        monkeypatch.setattr(decode_attention, "PER_SM", few)
        deep = {most: form._replace(per_sm=few) for most, form in decode_attention.DEEP.items()}
        monkeypatch.setattr(decode_attention, "DEEP", deep)


def target_of(op: str) -> DirectTarget:
    launcher = getattr(importlib.import_module(f"hal.backends.cuda.{op}"), op)
    return DirectTarget.of(op, launcher, "cuda" if CUDA else "cpu")


@pytest.mark.parametrize(("op", "sample"), SAMPLES, ids=lambda x: getattr(x, "name", x))
def test_sample(op: str, sample: Any) -> None:
    execute(get_spec(op), get_spec(op).make(**sample.params), target_of(op))


@pytest.mark.parametrize("op", BUILTIN)
def test_ragged(op: str) -> None:
    spec, examples = get_spec(op), 200 if CUDA else 12
    if not CUDA and not os.environ.get("CI_ALL"):
        few = {n: (0, min(FEW, spec.ragged[n][1])) for n in ("n", "bs", "longest") if n in spec.ragged}
        spec, examples = replace(spec, ragged={**spec.ragged, **few}), 5
    result = run_case(Case(op, "ragged", "all"), target_of(op), spec, examples=examples)
    assert (result.outcome, result.reason) == (PASSED, "")


def test_threads() -> None:
    """Triton's interpreter has globals: launches from several threads must not meet in them."""
    target = target_of("kv_write")
    target.lane = "device" if CUDA else "interpreter"
    result = run_case(Case("kv_write", "threads", "all"), target, get_spec("kv_write"))
    assert (result.outcome, result.reason) == (PASSED, "")
