"""Every sample of the ops beyond the core on the CPU backend, and ragged ones."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine.cases import OPS, judge, samples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hal import ArgumentError
from hal.ops import get_spec


def ours(op: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(f"hal.backends.cpu.{op}"), op)
    return found


@pytest.mark.parametrize(("op", "sample"), samples(), ids=lambda x: getattr(x, "name", x))
def test_sample(op: str, sample: Any) -> None:
    judge(op, lambda a: ours(op)(**a), lambda: get_spec(op).make(**sample.params))


@pytest.mark.parametrize("op", OPS)
def test_ragged(op: str) -> None:
    s = get_spec(op)
    draw = {
        name: st.integers(*r)
        if isinstance(r, tuple) and all(type(x) is int for x in r)
        else st.sampled_from(list(r))
        for name, r in s.ragged.items()
    }

    @settings(max_examples=80, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.fixed_dictionaries({"seed": st.integers(0, 2**20), **draw}))
    def check(params: dict[str, Any]) -> None:
        try:
            s.check_call(s.make(**params))
        except ArgumentError:
            return
        judge(op, lambda a: ours(op)(**a), lambda: s.make(**params))

    check()


@pytest.mark.parametrize("op", OPS)
def test_a_device_tensor_is_refused_even_unchecked(op: str) -> None:
    args = get_spec(op).make()
    for name, value in args.items():
        if isinstance(value, torch.Tensor):
            with pytest.raises(ArgumentError, match="meta"):
                ours(op)(**{**args, name: value.to("meta")})
