"""The references of the ops beyond the core, against their oracles; the errors; the examples of their docstrings."""

from __future__ import annotations

import doctest
import importlib

import pytest
from engine.cases import OPS, judge, samples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hal import ArgumentError
from hal.ops import get_spec


@pytest.mark.parametrize(("op", "sample"), samples(), ids=lambda x: getattr(x, "name", x))
def test_reference(op: str, sample: object) -> None:
    s = get_spec(op)
    s.check_call(s.make(**sample.params))
    judge(op, lambda a: s.reference(**a), lambda: s.make(**sample.params))


@pytest.mark.parametrize("op", OPS)
def test_reference_ragged(op: str) -> None:
    s = get_spec(op)
    draw = {
        name: st.integers(*r)
        if isinstance(r, tuple) and all(type(x) is int for x in r)
        else st.sampled_from(list(r))
        for name, r in s.ragged.items()
    }

    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.fixed_dictionaries({"seed": st.integers(0, 2**20), **draw}))
    def check(params: dict) -> None:
        try:
            s.check_call(s.make(**params))
        except ArgumentError:
            return
        judge(op, lambda a: s.reference(**a), lambda: s.make(**params))

    check()


@pytest.mark.parametrize(
    ("op", "error"), [(op, e) for op in OPS for e in get_spec(op).errors], ids=lambda x: getattr(x, "name", x)
)
def test_error(op: str, error: object) -> None:
    with pytest.raises(ArgumentError) as e:
        get_spec(op).check_call(error.make())
    assert e.value.argument == error.argument


@pytest.mark.parametrize("module", [*(f"hal.ops.{op}" for op in OPS), "hal.kv.paging"])
def test_examples_run(module: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert tried
    assert not failed


@pytest.mark.parametrize("op", OPS)
def test_a_no_op_sample_has_a_control(op: str) -> None:
    names = {s.name for s in get_spec(op).samples}
    for s in get_spec(op).samples:
        wants = get_spec(op).oracle(get_spec(op).make(**s.params)).values()
        named = any(bool(x.named.any()) for w in wants for x in (w, *w.fields.values()) if not x.free)
        assert named or s.control in names, s.name
