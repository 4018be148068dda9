"""The two attention ops: their truth against torch's, values checked when asked, and the bound."""

import pytest
import torch

import hal
from hal import ops
from hal._errors import ArgumentError
from hal.ops.proofs import judge as _judge

OPS = ("decode_attention", "extend_attention")


@pytest.mark.parametrize("op", OPS)
def test_the_oracle_agrees_with_torch(op: str) -> None:
    """The truth itself, against torch's own attention in float64."""
    n, size = (1, 9) if op == "decode_attention" else (5, 9)
    args = ops.get_spec(op).make(bs=1, longest=n, lengths="full", dtype="fp32")
    args["kv_indices"] = torch.randperm(240)[:size].int()
    args["kv_indptr"] = torch.tensor([0, size], dtype=torch.int32)
    args["q"] = args["q"][:n]
    args["k_cache"], args["v_cache"] = torch.randn(240, 2, 64), torch.randn(240, 2, 64)
    args["out"], args["lse"] = None, None
    want = ops.get_spec(op).oracle(args)["return"].candidates[0].value
    q, k, v = (
        x.double().transpose(0, 1)
        for x in (args["q"], args["k_cache"][args["kv_indices"]], args["v_cache"][args["kv_indices"]])
    )
    mask = torch.ones(n, size, dtype=torch.bool).tril(size - n)
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(found.transpose(0, 1), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", OPS)
def test_window_and_cap_change_the_truth(op: str) -> None:
    plain = ops.get_spec(op).make(loud=3.0)
    truth = ops.get_spec(op).oracle(plain)["return"].candidates[0].value
    for change in ({"sliding_window": 2}, {"logit_cap": 1.0}, {"scale": 1.0}):
        other = ops.get_spec(op).oracle({**plain, **change})["return"].candidates[0].value
        assert not torch.allclose(other, truth)


@pytest.mark.parametrize("op", OPS)
def test_index_values_are_checked_when_asked(op: str) -> None:
    hal.configure(checks="full")
    try:
        args = ops.get_spec(op).make(values="edge")
        with pytest.raises(ArgumentError, match="kv_indices"):
            getattr(hal, op)(**args, backend="reference")
        args = ops.get_spec(op).make()
        args["kv_indptr"] = args["kv_indptr"].flip(0)
        with pytest.raises(ArgumentError, match="kv_indptr"):
            getattr(hal, op)(**args, backend="reference")
    finally:
        hal.configure(checks="")


# --- the bound --------------------------------------------------------------------------------------


def slack(dtype: torch.dtype, keys: int = 100) -> tuple[float, float]:
    one = torch.ones(1, dtype=torch.float64)
    out, lse = _judge.attention_slack(dtype, 64, 2 * one, torch.tensor([keys]), 3 * one.view(1, 1))
    return float(out), float(lse)


def test_bound_is_the_formula() -> None:
    step = 2.0**-23 * (64 * 2 + 1 + 8)
    assert slack(torch.float32) == (3 * step, step)
    assert slack(torch.bfloat16) == (3 * (2.0**-8 + step), step)
    assert slack(torch.float16) == (3 * (2.0**-11 + step), step)
    assert slack(torch.float32, 513)[1] == step + 2.0**-23
    assert slack(torch.float32, 512)[1] == step


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_bound_refuses_what_is_wrong_by_little(dtype: str) -> None:
    """One key of forty left out, or weights of another dtype's precision, must not pass."""
    spec = ops.get_spec("decode_attention")
    args = spec.make(dtype=dtype, lengths="full", longest=40, out="none")
    want = spec.oracle(args)["return"]
    short = {**args, "kv_indices": args["kv_indices"].clone()}
    short["kv_indices"][7] = -1
    out = spec.reference(**short)
    assert not _judge.right_any(out, want).all()
    coarse = want.candidates[0].value.to(torch.float8_e5m2).to(args["q"].dtype)
    assert not _judge.right_any(coarse, want).all()
