"""extend_attention on Hopper where few tokens see many keys, as where drafts are verified: keys are split.

Without a GPU: which calls that are, and that these forms don't have their products serialized. On Hopper (``ci/h200``):
what they compute. Which part a program finds: ``test_tiles.py``; how parts are merged: ``test_merge.py``.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from assembler import serialized
from launched import launched

from hal._remote.target import DirectTarget
from hal.conformance.execute import execute
from hal.ops import get_spec

pytest.importorskip("triton", reason="Triton is not installed here")

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SPEC = get_spec("extend_attention")
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "few-heads": {"q_heads": 1, "kv_heads": 1, "bs": 1, "longest": 9, "prefix": 3000},
    "group-of-7": {"q_heads": 14, "kv_heads": 2, "lse": False},
    "group-of-1": {"q_heads": 2, "kv_heads": 2, "cache": "paged", "cache_view": "pairs", "indptr": "i64"},
    "tiles": {"longest": 90, "bs": 2, "dtype": "fp16"},
    "absent": {"values": "skip", "index": "i64", "cache": "paged", "cache_view": "padded"},
    "not-causal": {"causal": False},
    "cap": {"logit_cap": 3.0, "loud": 4.0},
    "window": {"sliding_window": 1200},
    "window-absent": {"sliding_window": 1100, "values": "skip", "index": "i64", "cache": "paged"},
    "window-tiles": {"sliding_window": 1023, "longest": 90, "bs": 2, "dtype": "fp16", "lse": False},
    "window-of-all": {"sliding_window": 2**40},
    "window-one-long": {"sliding_window": 1000, "bs": 40, "longest": 3, "lengths": "skewed", "slots": 60000},
    "window-edge": {"sliding_window": 1100, "values": "edge", "indptr_values": "edge"},
    "one-long": {"bs": 40, "longest": 3, "lengths": "skewed", "prefix": 900, "slots": 40000, "spare": 3},
    "fewer-keys": {"prefix": -5, "longest": 90, "bs": 40, "slots": 4000},
    "edge": {"values": "edge", "indptr_values": "edge"},
    "extreme": {"values": "extreme", "indptr_values": "extreme", "longest": 3, "index": "i64"},
}
FP8: dict[str, dict[str, Any]] = {
    "e4m3": {"cache_dtype": "e4m3", "scales": "tensor", "longest": 50},
    "e5m2-absent": {
        "cache_dtype": "e5m2",
        "values": "skip",
        "index": "i64",
        "logit_cap": 3.0,
        "loud": 4.0,
        "longest": 50,
    },
}
"""With as many tokens as no tile of few takes (``test_extend_attention_tokens.py``)."""


def made(head_dim: int = 128, v_head_dim: int = 128, **change: Any) -> dict[str, Any]:
    usual = {"bs": 3, "lengths": "full", "longest": 5, "prefix": 1400, "slots": 9600, "q_heads": 8, "kv_heads": 2}
    return SPEC.make(**{**usual, "dtype": "bf16", "head_dim": head_dim, "v_head_dim": v_head_dim, **change})


def started(args: dict[str, Any]) -> list[tuple[str, Any]]:
    """(kernel, SPLIT) of the launches of a call."""
    return [(run.kernel.name, run.static.get("SPLIT")) for run in launched("extend_attention", args)]


@pytest.mark.skipif(HOPPER or INTERPRETED, reason="records launches")
def test_what_is_split() -> None:
    whole = [("extend_attention_hopper_kernel", False)]
    split = [("extend_attention_hopper_kernel", True), ("merge_kernel", None)]
    assert started(made()) == split
    assert started(made(longest=90)) == whole  # half as many tiles as run at once, on a device of 16
    assert started(made(bs=8, prefix=500)) == whole  # as many requests
    assert started(made(prefix=600)) == whole
    assert started(made(sliding_window=100)) == started(made(sliding_window=1200, causal=False)) == whole
    assert started(made(sliding_window=1200)) == split
    assert started(made(q_heads=32, kv_heads=16)) == whole


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("form", "dims"), [
    *((form, (128, 128)) for form in FORMS),
    *((form, dims) for form in ("plain", "absent", "cap", "window") for dims in DIMS if dims != (128, 128)),
    *((form, (dim, dim)) for form in ("plain", "window") for dim in (80, 96, 112)),
    *((form, dims) for form in FP8 for dims in DIMS[:2]),
], ids=str)  # fmt: skip
def test_right(form: str, dims: tuple[int, int]) -> None:
    from hal.backends.cuda import extend_attention

    execute(
        SPEC, made(*dims, **(FORMS | FP8)[form]), DirectTarget.of(SPEC.name, extend_attention.extend_attention, "cuda")
    )
    (plan,) = list(extend_attention._plans.values())[-1:]
    assert {step.run.static.get("SPLIT") for step in plan.steps} == {False, True, None}


@pytest.mark.skipif(INTERPRETED, reason="Triton's compiler is not to be had in the interpreter lane")
@pytest.mark.parametrize("dims", DIMS if os.environ.get("CI_ALL") else DIMS[1:2], ids=str)
def test_products_are_not_serialized(dims: tuple[int, int], tmp_path: Path) -> None:
    from hal.backends.cuda import inspect

    with inspect.record() as calls:
        inspect.launcher("extend_attention")(**made(*dims))
    (found,) = [call for call in calls if call[0].static.get("SPLIT")]
    compiled = inspect.compile_call(found, 90)
    _, spills, _ = inspect.resources(compiled.asm["cubin"])
    assert spills <= 8  # bytes, outside of loops, of heads of 192, as where keys are not split
    assert compiled.metadata.shared <= 232_448
    assert not serialized(compiled.asm["ptx"], tmp_path)
