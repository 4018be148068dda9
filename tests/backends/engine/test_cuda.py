"""Every sample of the ops beyond the core through the Triton launchers: interpreted, or on a CUDA device."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from engine.cases import OPS, judge, samples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hal import ArgumentError
from hal.kv.pool import KVPool
from hal.ops import get_spec

CUDA = torch.cuda.is_available()

pytestmark = pytest.mark.skipif(
    not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA device or TRITON_INTERPRET=1"
)


def ours(op: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(f"hal.backends.cuda.{op}"), op)
    return found


def run(op: str, args: dict[str, Any]) -> Any:
    """The op on the device: arguments there, what it wrote back here."""
    if not CUDA:
        return ours(op)(**args)
    memo: dict[int, torch.Tensor] = {}

    def there(value: Any) -> Any:
        if isinstance(value, KVPool):
            halves = [tuple(map(there, h)) if isinstance(h, tuple) else there(h) for h in (value.k, value.v)]
            return KVPool(halves[0], halves[1], layout=value.layout, page_size=value.page_size)
        if not isinstance(value, torch.Tensor):
            return value
        raw = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
        store = memo.setdefault(raw.data_ptr(), raw.cuda())
        out = torch.empty(0, dtype=value.dtype, device="cuda")
        return out.set_(store.untyped_storage(), value.storage_offset(), value.shape, value.stride())

    moved = {name: there(value) for name, value in args.items()}
    result = ours(op)(**moved)
    torch.cuda.synchronize()
    for value in args.values():
        for t in _tensors(value):
            raw = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
            if raw.data_ptr() in memo:
                raw.copy_(memo.pop(raw.data_ptr()))
    if result is None:
        return None
    return next((args[n] for n, m in moved.items() if m is result), result.cpu())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, KVPool):
        halves = [half for half in (value.k, value.v) if half is not None]
        return [t for half in halves for t in (half if isinstance(half, tuple) else (half,))]
    return [value] if isinstance(value, torch.Tensor) else []


@pytest.mark.parametrize(("op", "sample"), samples(), ids=lambda x: getattr(x, "name", x))
def test_sample(op: str, sample: Any) -> None:
    judge(op, lambda a: run(op, a), lambda: get_spec(op).make(**sample.params))


@pytest.mark.parametrize("op", OPS)
def test_ragged(op: str) -> None:
    s = get_spec(op)
    draw = {
        name: st.integers(*r)
        if isinstance(r, tuple) and all(type(x) is int for x in r)
        else st.sampled_from(list(r))
        for name, r in s.ragged.items()
    }

    @settings(
        max_examples=200 if CUDA else 12,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.fixed_dictionaries({"seed": st.integers(0, 2**20), **draw}))
    def check(params: dict[str, Any]) -> None:
        try:
            s.check_call(s.make(**params))
        except ArgumentError:
            return
        judge(op, lambda a: run(op, a), lambda: s.make(**params))

    check()


def test_threads() -> None:
    """Triton's interpreter has globals: launches from several threads must not meet in them."""
    calls = [lambda i=i: judge("kv_write", lambda a: run("kv_write", a), lambda: get_spec("kv_write").make(seed=i, n=9))
             for i in range(12)]  # fmt: skip
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(call) for call in calls]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
