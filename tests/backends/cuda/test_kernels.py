"""Every sample of the four contracts through this backend's own launchers, judged by the oracles.

Runs under TRITON_INTERPRET=1 (``ci/cuda``) or on a CUDA device; the conformance suite does more with
the same samples. `check` is also what ``ci/h200`` runs on the device.
"""

import importlib
import inspect
import os
from typing import Any

import pytest
import torch

from hal import ops
from hal.ops.proofs import judge as _judge

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = ("get_last_loc", "assign_extend_cache_locs", "rope_kv_write")

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a CUDA device or TRITON_INTERPRET=1",
)


def cases(large: bool = False) -> list[Any]:
    return [
        pytest.param(op, s, id=f"{op}-{s.name}")
        for op in OPS
        for s in ops.get_spec(op).samples
        if s.large == large
    ]


def moved(value: Any, memo: dict[int, torch.Tensor] | None = None) -> Any:
    """The argument on DEVICE, views of one storage still views of one storage."""
    if DEVICE == "cpu" or not isinstance(value, torch.Tensor):
        return value
    memo = {} if memo is None else memo
    store = value.untyped_storage()
    key = store.data_ptr()
    if key not in memo:
        raw = torch.empty(0, dtype=torch.uint8).set_(store)
        memo[key] = raw.to(DEVICE)
    out = torch.empty(0, dtype=value.dtype, device=DEVICE)
    return out.set_(memo[key].untyped_storage(), value.storage_offset(), value.shape, value.stride())


def check(op: str, args: dict[str, Any]) -> float:
    """Run one case; raises on a wrong or a touched element. Returns the error in units of the bound."""
    spec = ops.get_spec(op)
    launcher = getattr(importlib.import_module(f"hal.backends.cuda.{op}"), op)
    wants = spec.oracle(args)
    memo: dict[int, torch.Tensor] = {}
    here = {k: moved(v, memo) for k, v in args.items()}
    signature = inspect.signature(spec.reference)
    positional = [here[p.name] for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    keyword = {p.name: here[p.name] for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
    before = {k: v.clone() for k, v in args.items() if isinstance(v, torch.Tensor)}
    result = launcher(*positional, **keyword)
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    worst = 0.0
    for name, want in wants.items():
        out = (result if name == "return" else here[name]).cpu()
        bad = ~_judge.right_any(out, want)
        assert not bad.any(), f"{name}: {int(bad.sum())} wrong, first at {bad.nonzero()[0].tolist()}"
        worst = max(worst, _judge.headroom(out, want))
    for name, old in before.items():
        if name == "out" and "return" in wants:
            continue
        new = here[name].cpu()
        same = _judge.same_bits(new, old)
        if name in wants:
            same |= wants[name].named
        assert same.all(), f"{name}: {int((~same).sum())} elements changed that the op does not name"
    return worst


@pytest.mark.parametrize(("op", "sample"), cases())
def test_sample(op: str, sample: Any) -> None:
    args = ops.get_spec(op).make(**sample.params)
    assert check(op, args) <= 1.0


@pytest.mark.parametrize("bs", [256, 257, 512, 513, 2000])
def test_assign_at_the_sizes_where_its_launch_changes(bs: int) -> None:
    assert (
        check(
            "assign_extend_cache_locs",
            ops.get_spec("assign_extend_cache_locs").make(bs=bs, longest=9, seed=bs),
        )
        == 0
    )
