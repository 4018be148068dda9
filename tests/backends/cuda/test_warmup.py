"""Warm-up, interpreted or on a CUDA device: it starts the kernels of every op, and changes nothing of the example."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from hal.backends.cuda import hal_backend, warmup
from hal.kv.pool import KVPool
from hal.ops import get_spec

CUDA = torch.cuda.is_available()

pytestmark = pytest.mark.skipif(
    not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA device or TRITON_INTERPRET=1"
)


def tensors(args: dict[str, Any]) -> list[torch.Tensor]:
    """The whole memory behind each."""
    found: list[torch.Tensor] = []
    for value in args.values():
        for x in (value.k, value.v) if isinstance(value, KVPool) else (value,):
            found += [t for t in (x if isinstance(x, tuple) else (x,)) if isinstance(t, torch.Tensor)]
    return [torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()) for t in found]


def test_it_knows_every_op() -> None:
    assert set(warmup.OPS) == set(hal_backend().ops)


@pytest.mark.parametrize("op", warmup.FORMS)
def test_nothing_of_the_example_changes(op: str) -> None:
    launcher = getattr(importlib.import_module(f"hal.backends.cuda.{op}"), op)
    examples = [warmup.example(op, torch.device("cuda" if CUDA else "cpu"))]
    samples = [s for s in get_spec(op).samples if not s.large and s.params.get("n") != 0 and s.params.get("bs") != 0]
    if not CUDA:
        some = 8 if os.environ.get("CI_ALL") else 2
        examples += [get_spec(op).make(**s.params) for s in samples[:: max(1, len(samples) // some)]]
    for args in examples:
        before = [t.clone() for t in tensors(args)]
        calls = warmup.calls(op, args)
        assert calls
        for call in calls:
            launcher(**call)
        assert all(map(torch.equal, before, tensors(args)))
