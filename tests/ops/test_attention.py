"""The two attention ops: every sample through the reference, this machine's backends, and the dispatcher.

``TRITON_INTERPRET=1`` (or a CUDA device) adds the Triton kernels; the conformance suite does more with the
same samples.
"""

import importlib
import math
import os
from typing import Any

import pytest
import torch

import hal
from hal import ops
from hal._errors import ArgumentError
from hal.ops.proofs import judge as _judge

OPS = ("decode_attention", "extend_attention")
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available()


def present(backend: str, op: str) -> bool:
    try:
        return importlib.util.find_spec(f"hal.backends.{backend}.{op}") is not None
    except ModuleNotFoundError:
        return False


def implementation(backend: str, op: str) -> Any:
    if backend == "reference":
        return ops.get_spec(op).reference
    return getattr(importlib.import_module(f"hal.backends.{backend}.{op}"), op)


BACKENDS = ["reference", *(["cuda"] if INTERPRETER or CUDA else ["cpu"])]
IMPLS = [(b, op) for b in BACKENDS for op in OPS if b == "reference" or present(b, op)]
CASES = [
    pytest.param(b, op, s, id=f"{b}-{op}-{s.name}")
    for b, op in IMPLS
    for s in ops.get_spec(op).samples
    if not s.large
]


def moved(value: Any, device: str, memo: dict[int, torch.Tensor]) -> Any:
    """The argument on `device`, views of one storage still views of one storage."""
    if device == "cpu" or not isinstance(value, torch.Tensor):
        return value
    store = value.untyped_storage()
    if store.data_ptr() not in memo:
        memo[store.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(store).to(device)
    base = memo[store.data_ptr()].untyped_storage()
    return torch.empty(0, dtype=value.dtype, device=device).set_(
        base, value.storage_offset(), value.shape, value.stride()
    )


def call(fn: Any, op: str, args: dict[str, Any], device: str = "cpu") -> tuple[dict[str, Any], Any]:
    memo: dict[int, torch.Tensor] = {}
    here = {k: moved(v, device, memo) for k, v in args.items()}
    keyword = {p.name for p in ops.get_spec(op).signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
    positional = [v for k, v in here.items() if k not in keyword]
    return here, fn(*positional, **{k: here[k] for k in keyword})


def check(fn: Any, op: str, args: dict[str, Any], poison: float = math.nan, device: str = "cpu") -> float:
    """Run one case; raises on a wrong or a touched element. Returns the error in units of the bound."""
    wants = ops.get_spec(op).oracle(args)
    for name in ("out", "lse"):
        if args[name] is not None:
            args[name].fill_(poison)
    before = {k: v.clone() for k, v in args.items() if isinstance(v, torch.Tensor)}
    here, result = call(fn, op, args, device)
    assert args["out"] is None or result is here["out"]
    worst = 0.0
    for name, want in wants.items():
        out = (result if name == "return" else here[name]).cpu()
        bad = ~_judge.right_any(out, want)
        assert not bad.any(), f"{name}: {int(bad.sum())} wrong, first at {bad.nonzero()[0].tolist()}"
        worst = max(worst, _judge.headroom(out, want))
    for name, old in before.items():
        same = _judge.same_bits(here[name].cpu(), old)
        if name in wants:
            same |= wants[name].named
        assert same.all(), f"{name}: elements changed that the op does not name"
    return worst


@pytest.mark.parametrize(("backend", "op", "sample"), CASES)
def test_sample(backend: str, op: str, sample: Any) -> None:
    device = "cuda" if backend == "cuda" and CUDA else "cpu"
    fn = implementation(backend, op)
    for poison in (math.nan, 3.0) if backend != "cuda" or CUDA else (math.nan,):
        assert check(fn, op, ops.get_spec(op).make(**sample.params), poison, device) <= 1.0
    if sample.params.get("lse", True) and backend == "cpu":  # where nobody asks for it, another path may run
        assert (
            check(fn, op, ops.get_spec(op).make(**{**sample.params, "lse": False}), math.nan, device) <= 1.0
        )


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


@pytest.mark.parametrize(
    ("backend", "op", "error"),
    [pytest.param("reference", op, e, id=f"{op}-{e.name}") for op in OPS for e in ops.get_spec(op).errors],
)
def test_error(backend: str, op: str, error: Any) -> None:
    with pytest.raises(ArgumentError) as found:
        call(lambda *a, **k: getattr(hal, op)(*a, backend=backend, **k), op, error.make())
    assert found.value.op == op
    assert found.value.argument == error.argument


@pytest.mark.parametrize("op", OPS)
def test_dispatched(op: str) -> None:
    args = ops.get_spec(op).make()
    check(lambda *a, **k: getattr(hal, op)(*a, backend="reference", **k), op, args)


@pytest.mark.parametrize("op", OPS)
def test_index_values_are_checked_when_asked(op: str) -> None:
    hal.configure(checks="full")
    try:
        args = ops.get_spec(op).make(values="edge")
        with pytest.raises(ArgumentError, match="kv_indices"):
            call(lambda *a, **k: getattr(hal, op)(*a, backend="reference", **k), op, args)
        args = ops.get_spec(op).make()
        args["kv_indptr"] = args["kv_indptr"].flip(0)
        with pytest.raises(ArgumentError, match="kv_indptr"):
            call(lambda *a, **k: getattr(hal, op)(*a, backend="reference", **k), op, args)
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
    _, out = call(spec.reference, "decode_attention", short)
    assert not _judge.right_any(out, want).all()
    coarse = want.candidates[0].value.to(torch.float8_e5m2).to(args["q"].dtype)
    assert not _judge.right_any(coarse, want).all()
