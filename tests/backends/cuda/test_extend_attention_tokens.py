"""extend_attention's query tokens as decode_attention's kernel takes them: a few of a request, over MLA's rows.

Under TRITON_INTERPRET=1: how tokens are found and grouped, and attention over them by the kernel for other GPUs.
Compiled: that the Gluon kernel of tiles of tokens doesn't spill. On Hopper (``ci/h200``): what it computes.
"""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from assembler import serialized

from hal._remote.target import DirectTarget
from hal.conformance.execute import execute
from hal.ops import get_spec

pytest.importorskip("triton", reason="Triton is not installed here")

CUDA = torch.cuda.is_available()
HOPPER = CUDA and torch.cuda.get_device_capability()[0] == 9
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MLA = {
    "head_dim": 576,
    "v_head_dim": 512,
    "kv_heads": 1,
    "q_heads": 16,
    "cache_view": "shared",
    "dtype": "bf16",
    "bs": 3,
    "longest": 4,
    "prefix": 700,
    "slots": 4800,
}
FORMS: dict[str, dict[str, Any]] = {
    "heads-16": {},
    "heads-128": {"q_heads": 128, "longest": 2, "prefix": 300},
    "heads-20": {"q_heads": 20, "cache": "paged", "dtype": "fp16", "lse": False},
    "heads-1": {"q_heads": 1, "longest": 150, "indptr": "i64"},
    "not-causal": {"causal": False},
    "absent": {"values": "skip", "longest": 9, "spare": 3},
    "no-prefix": {"prefix": 0, "longest": 70},
    "fewer-keys": {"prefix": -5, "longest": 12, "bs": 5},
    "whole": {"bs": 140, "lengths": "full", "longest": 4, "prefix": 20},
    "edge": {"bs": 9, "values": "edge", "indptr_values": "edge", "longest": 5, "prefix": 40},
    "e4m3": {"cache_dtype": "e4m3", "scales": "tensor", "longest": 6},
    "e5m2-heads-128-absent": {"cache_dtype": "e5m2", "q_heads": 128, "prefix": 300, "longest": 2, "values": "skip"},
    "extreme": {"bs": 9, "values": "extreme", "indptr_values": "extreme", "longest": 3, "prefix": 6, "index": "i64"},
}
SPEC = get_spec("extend_attention")


def made(**change: Any) -> dict[str, Any]:
    return SPEC.make(**{**MLA, **change})


def ranges(qo_indptr: list[int], n: int) -> list[tuple[int, int]]:
    qo = [min(max(x, 0), n) for x in qo_indptr]
    return list(pairwise(qo))


@pytest.mark.skipif(not INTERPRETED or CUDA, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("tokens", [1, 3, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "qo_indptr", [[0, 4, 4, 9, 11, 3, 8, 30], [0, 2, 0, 12, 5, 7], [2, 13, -4, 6, 2**40], [0], [20, 3]], ids=str
)
def test_each_token_is_in_a_tile_of_a_request_that_has_it(qo_indptr: list[int], causal: bool, tokens: int) -> None:
    """Whatever the requests' ranges, gaps and overlaps: by who leads it, and sees what that request's token sees."""
    from hal.backends.cuda._tokens import query_tokens_kernel

    n, nnz, each = 17, 40, 16
    bs = len(qo_indptr) - 1
    kv_indptr = torch.tensor([(7 * i * i) % 50 - 3 for i in range(bs + 1)], dtype=torch.int32, device="cpu")
    qo = torch.tensor(qo_indptr, dtype=torch.int64, device="cpu")
    found = torch.full((n + 1, 4), torch.nan, dtype=torch.float32, device="cpu")
    noted = torch.full((n + 1, 2), torch.nan, dtype=torch.float32, device="cpu")
    run = query_tokens_kernel.bind(CAUSAL=causal, TOKENS=tokens, EACH=each, BLOCK=4, PDL=False)
    run.start((-(-n // each), 1, 1), qo, kv_indptr, noted, found, n, nnz, bs)
    assert bool(found[n:].isnan().all())
    assert noted.isnan().logical_not()[:, 0].tolist() == [True] * n + [False]
    kv = [min(max(x, 0), nnz) for x in kv_indptr.tolist()]
    begins, keys, tiles, firsts = found[:n].view(torch.int32).unbind(1)
    for t in range(n):
        leader = t + min(int(tiles[t]), 0)
        owners = [i for i, (a, b) in enumerate(ranges(qo_indptr, n)) if a <= t < b]
        if not owners:
            assert (leader, int(keys[t])) == (t, -1)
            continue
        rows = int(tiles[leader])
        assert int(keys[leader]) >= 0
        assert leader <= t < leader + rows <= leader + tokens
        seen = int(firsts[leader]) + causal * (t - leader)
        wanted = []
        for i in owners:
            a, b = ranges(qo_indptr, n)[i]
            every = max(kv[i + 1] - kv[i], 0)
            last = a <= leader and leader + rows <= b
            if last and int(begins[leader]) == kv[i] and int(keys[leader]) <= every:
                wanted.append(every - (b - t) + 1 if causal else every)
        assert seen in wanted
        assert int(keys[leader]) == max(int(firsts[leader]) + causal * (rows - 1), 0)


@pytest.mark.skipif(not INTERPRETED or CUDA, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("form", ["absent", "extreme", "fewer-keys", "split"])
def test_right_with_each_token_a_request(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.backends.cuda import _tokens, decode_attention, extend_attention

    monkeypatch.setattr(_tokens, "taken", lambda run: True)
    monkeypatch.setattr(decode_attention, "PER_SM", 1)
    extend_attention._plans.clear()
    few = {"prefix": 20, "slots": 900, "q_heads": 2, "head_dim": 40, "v_head_dim": 32}
    args = made(**{**few, **FORMS.get(form, {"bs": 2, "prefix": 400})})
    execute(SPEC, args, DirectTarget.of(SPEC.name, extend_attention.extend_attention, "cpu"))
    for plan in extend_attention._plans.values():
        names = [step.run.kernel.name for step in plan.steps]
        assert names == ["query_tokens_kernel", *2 * ["decode_attention_kernel"], *2 * ["merge_kernel"]]
    extend_attention._plans.clear()


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
@pytest.mark.parametrize("form", FORMS)
def test_right(form: str) -> None:
    from hal.backends.cuda import extend_attention

    extend_attention._plans.clear()
    execute(SPEC, made(**FORMS[form]), DirectTarget.of(SPEC.name, extend_attention.extend_attention, "cuda"))
    names = {plan.steps[1].run.kernel.name for plan in extend_attention._plans.values()}
    assert names == {"decode_attention_hopper_kernel"}


def kernels(args: dict[str, Any], arch: int = 90) -> set[str]:
    from hal.backends.cuda import inspect

    with inspect.record(arch) as calls:
        inspect.launcher("extend_attention")(**args)
    return {bound.kernel.name for bound, _ in calls}


def test_taken_on_hopper_alone() -> None:
    args = made()
    assert kernels(args) == {"query_tokens_kernel", "decode_attention_hopper_kernel", "merge_kernel"}
    assert kernels(args, 80) == kernels(args, 100) == {"extend_attention_kernel"}
    for change in ({"sliding_window": 5}, {"logit_cap": 3.0}, {"dtype": "fp32"}):
        assert kernels(made(**change)) == {"extend_attention_kernel"}


@pytest.mark.skipif(INTERPRETED, reason="Triton's compiler is not to be had in the interpreter lane")
@pytest.mark.parametrize("heads", [16, *([20, 128] if os.environ.get("CI_ALL") else [])])
def test_no_form_spills_or_has_its_products_serialized(heads: int, tmp_path: Path) -> None:
    from hal.backends.cuda import inspect

    with inspect.record() as calls:
        inspect.launcher("extend_attention")(**made(q_heads=heads))
    found = next(call for call in calls if call[0].kernel.name == "decode_attention_hopper_kernel")
    assert found[0].static["TOKENS"] == max(64 // heads, 1)
    compiled = inspect.compile_call(found, 90)
    _, spills, shared = inspect.resources(compiled.asm["cubin"])
    assert spills == 0
    assert shared <= 232_448
    assert not serialized(compiled.asm["ptx"], tmp_path)
