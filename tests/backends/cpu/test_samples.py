"""What the suite cannot say of the CPU backend's launchers: paths that samples do not reach, warm-up, other devices."""

from __future__ import annotations

import importlib

import pytest
import torch
from cpu.cases import OPS, judge, ours, params

from hal import ArgumentError
from hal.backends.cpu.warmup import variants, warmup
from hal.ops import BUILTIN, get_spec


@pytest.mark.parametrize("sample", [s.name for s in get_spec("kv_transfer").samples if not s.large])
def test_a_small_transfer_past_the_caches(sample: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only megabytes are written so: here everything is that may be, its rows being whole lines at lines' starts."""
    monkeypatch.setattr(importlib.import_module("hal.backends.cpu.kv_transfer"), "STREAM", 0)
    judge("kv_transfer", **params("kv_transfer", sample))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001])
def test_nan_of_any_bits_in_the_table_stays_nan(bits: int, interleaved: bool) -> None:
    """Rounding by adding would turn 0x7FFFFFFF into -0, and -1 into +0."""
    table = torch.full((2, 64), bits, dtype=torch.int32).view(torch.float32)
    q, k = torch.ones(1, 3, 80, dtype=torch.bfloat16), torch.ones(1, 1, 80, dtype=torch.bfloat16)
    ours("rope_kv_write")(q, k, None, table, torch.tensor([1]), interleaved=interleaved)
    assert q[..., :64].isnan().all()
    assert k[..., :64].isnan().all()
    assert (q[..., 64:] == 1).all()


@pytest.mark.parametrize("op", BUILTIN)
def test_a_device_tensor_is_refused_even_unchecked(op: str) -> None:
    args = get_spec(op).make()
    for name, value in args.items():
        if isinstance(value, torch.Tensor):
            with pytest.raises(ArgumentError, match="meta"):
                ours(op)(**{**args, name: value.to("meta")})


def test_warmup_leaves_nothing_to_compile() -> None:
    warmup([*OPS, "an_op_of_somebody_else"])
    before = {op: set(variants(op)[0]._entries) for op in OPS}
    for op in OPS:
        for sample in get_spec(op).samples:
            if not sample.large:
                ours(op)(**get_spec(op).make(**sample.params))
    assert {op: set(variants(op)[0]._entries) for op in OPS} == before
    assert all(before.values())


def test_equal_bits_in_cache_and_k_for_every_dtype() -> None:
    for dtype in ("fp16", "bf16", "fp32"):
        a = get_spec("rope_kv_write").make(dtype=dtype, n=9, slots=64, specials=True)
        ours("rope_kv_write")(**a)
        assert torch.equal(a["k_cache"][a["slots"]].view(torch.uint8), a["k"].contiguous().view(torch.uint8))
