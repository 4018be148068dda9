"""Attention in one pass: shared out to threads, and each request by whoever is faster at it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu.cases import judge, ours, params

from hal.backends.cpu import _attention, _online, _pool
from hal.ops import get_spec

OPS = ("decode_attention", "extend_attention")


@pytest.mark.parametrize("op", OPS)
def test_shared_out_it_gives_the_same_bits(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> torch.Tensor:
        found: torch.Tensor = ours(op)(
            **get_spec(op).make(bs=7, longest=60, slots=2000, dtype="fp32", lse=False)
        )
        return found

    alone = run()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for bytes_ in ("SHARE", "WAKE", "GRAIN"):
            monkeypatch.setattr(_pool, bytes_, 64)
        assert torch.equal(alone, run())
    finally:
        torch.set_num_threads(before)


class _Counts:
    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self.function(*args)


@pytest.mark.parametrize("most", [0, 300, 10**9])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_requests_of_either_kind_in_one_batch(dtype: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the line is drawn between them, each request is done, once, and right."""
    fused = _Counts(_attention.fused)
    monkeypatch.setattr(_attention, "fused", fused)
    monkeypatch.setattr(_online, "MOST", dict.fromkeys(_online.MOST, most))
    some = {"bs": 6, "longest": 30, "prefix": 20, "dtype": dtype, "spare": 3, "lse": False, "seed": 3}
    judge("extend_attention", **some)
    assert (fused.calls > 0) == (most < 10**9)
    a = get_spec("extend_attention").make(**some)
    new = a["qo_indptr"].diff()
    large = int(((new > 1) & (new * a["kv_indptr"].diff() > most)).sum())
    assert fused.calls == large


@pytest.mark.parametrize(
    ("sample", "online"),
    [
        ("fp32", True), ("llama3-8b-bf16", True), ("head-dim-80", True), ("head-dim-72", False), ("mla-fp32", True),
        ("mla-128-heads", False), ("logit-cap-fp32", False), ("e5m2-bf16-scale-none", False),
    ],
)  # fmt: skip
def test_who_does_what(sample: str, online: bool) -> None:
    a = get_spec("decode_attention").make(**params("decode_attention", sample))
    assert _online.fits(a["q"], a["k_cache"], a["v_cache"], a["logit_cap"]) == online
