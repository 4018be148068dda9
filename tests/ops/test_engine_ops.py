"""The examples in the docstrings of the ops beyond the core, and the controls of their samples."""

from __future__ import annotations

import doctest
import importlib

import pytest
from engine.cases import OPS

from hal.ops import get_spec


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
