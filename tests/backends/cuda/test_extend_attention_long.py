"""extend_attention on Hopper where few of many requests have far more keys than others: theirs are split.

Without a GPU: which calls that are, and that these forms put nothing aside in loops. On Hopper (``ci/h200``): what they
compute. Which part an item is: ``test_turns.py``.
"""

import os
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from assembler import behind_the_wait, one_by_one, put_aside, serialized
from launched import launched, same_in_graphs

from hal._remote.target import DirectTarget
from hal.conformance.execute import execute
from hal.ops import get_spec

pytest.importorskip("triton", reason="Triton is not installed here")

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SPEC = get_spec("extend_attention")
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
FP8: dict[str, Any] = {"cache_dtype": "e4m3", "scales": "tensor"}
KEYS = {
    "first": (9000, *[60] * 39),
    "last": (*[60] * 39, 9000),
    "some": tuple(3000 if i % 7 == 3 else 20 + i for i in range(40)),
    "more-than-half": tuple(900 if i % 3 else 1 for i in range(90)),
    "hundreds": (0, *[40] * 300, 5000, *[40] * 150, 3000),
    "very-many": (0, *[40] * 300, 5000, *[40] * 300, 3000),
    "few": (5, 4000, 5, 5, 5, 5),
}
"""Of each request. Where more than half have as many, and of very many requests, none is split."""
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{keys: (keys, {}) for keys in KEYS if keys != "few"},
    "few": ("few", {"longest": 60}),
    "tokens": ("first", {"longest": 40}),
    "group-of-7": ("last", {"q_heads": 56, "lse": False}),
    "group-of-3": ("first", {"q_heads": 24, "longest": 60}),
    "group-of-1": ("some", {"q_heads": 8, "cache": "paged", "cache_view": "pairs", "indptr": "i64"}),
    "group-of-130": ("some", {"q_heads": 260, "kv_heads": 2, "longest": 1}),
    "absent": ("first", {"values": "skip", "index": "i64", "cache": "paged", "cache_view": "padded"}),
    "not-causal": ("last", {"causal": False, "dtype": "fp16"}),
    "cap": ("some", {"logit_cap": 3.0, "loud": 4.0}),
    "e4m3": ("first", {**FP8, "longest": 40}),
    "e5m2-absent": ("some", {"cache_dtype": "e5m2", "values": "skip", "index": "i64", "longest": 50}),
}


def made(form: str = "first", head_dim: int = 128, v_head_dim: int = 128, **change: Any) -> dict[str, Any]:
    which, more = FORMS[form]
    keys = KEYS[which]
    usual = {"bs": len(keys), "lengths": "full", "longest": 3, "q_heads": 32, "kv_heads": 8, "dtype": "bf16"}
    usual |= {"head_dim": head_dim, "v_head_dim": v_head_dim, **more, **change}
    each = -(-sum(keys) // len(keys))
    args = SPEC.make(**usual, prefix=each - usual["longest"], slots=2 * each * len(keys))
    args["kv_indptr"] = torch.tensor([0, *accumulate(keys)], dtype=args["kv_indptr"].dtype)
    return args


def started(args: dict[str, Any]) -> list[bool]:
    """LONG_FIRST of the launches of a call."""
    return [run.static.get("LONG_FIRST", False) for run in launched("extend_attention", args)]


@pytest.mark.skipif(HOPPER or INTERPRETED, reason="records launches")
def test_what_is_split() -> None:
    assert {form: started(made(form)) for form in FORMS} == {form: [True] for form in FORMS}
    assert started(made(longest=90)) == [True]
    assert started(made(sliding_window=100)) == [False]
    assert started(made(q_heads=32, kv_heads=16)) == [False]  # of so many key heads each tile is of one program
    assert started(made(head_dim=256, v_head_dim=256, longest=40, **FP8)) == [False]
    assert started(SPEC.make(bs=4, lengths="full", longest=90, prefix=1400, slots=9600, q_heads=8, kv_heads=2)) == [
        False
    ]


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("form", "dims"), [
    *((form, (128, 128)) for form in FORMS),
    *((form, dims) for form in ("first", "absent") for dims in DIMS if dims != (128, 128)),
    ("e4m3", (64, 64)),
], ids=str)  # fmt: skip
def test_right(form: str, dims: tuple[int, int]) -> None:
    """In graphs, and the same each time, too; and counters are left as they were."""
    from hal.backends.cuda import extend_attention
    from hal.triton.plans import COUNTERS

    args = made(form, *dims)
    execute(SPEC, args, DirectTarget.of(SPEC.name, extend_attention.extend_attention, "cuda"))
    same_in_graphs(extend_attention.extend_attention, args)
    assert not any(x[:COUNTERS].any() for x in extend_attention._plans._scratch.values())


@pytest.mark.skipif(INTERPRETED, reason="Triton's compiler is not to be had in the interpreter lane")
@pytest.mark.parametrize(
    ("form", "dims"),
    [
        *(("first", dims) for dims in (DIMS if os.environ.get("CI_ALL") else DIMS[1:2])),
        *(("e4m3", dims) for dims in (DIMS[:2] if os.environ.get("CI_ALL") else DIMS[1:2])),
    ],
    ids=str,
)
def test_loops_are_those_of_the_kernel_that_splits_none(form: str, dims: tuple[int, int], tmp_path: Path) -> None:
    from hal.backends.cuda import inspect

    with inspect.record() as calls:
        inspect.launcher("extend_attention")(**made(form, *dims))
    compiled, whole = (
        inspect.compile_call(next(call for call in calls if call[0].static.get("LONG_FIRST") == long), 90)
        for long in (True, False)
    )
    same = [one_by_one(x.asm["cubin"], tmp_path) for x in (compiled, whole)]
    assert same[0] <= same[1]
    # With a word more put aside, if not in the loop, the assembler may wait sooner for a product: 4 % more time.
    assert behind_the_wait(compiled.asm["cubin"], tmp_path) <= behind_the_wait(whole.asm["cubin"], tmp_path) + 1
    assert not put_aside(compiled.asm["cubin"], tmp_path)
    assert inspect.resources(compiled.asm["cubin"])[2] <= 232_448
    assert not serialized(compiled.asm["ptx"], tmp_path)
