"""extend_attention's query tokens as decode_attention's kernels take them: a few of a request, over MLA's rows, or over
fp8 keys and values apart.

Compiled: that the Gluon kernels of tiles of tokens don't spill. On Hopper (``ci/h200``): what it computes. Which tile
a program finds: ``test_tiles.py``; how parts of tiles are merged: ``test_merge.py``; the kernel of more rows a request:
``test_extend_attention_few.py``.
"""

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from assembler import serialized
from launched import launched

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
    "heads-128-in-runs": {"q_heads": 128, "longest": 3, "prefix": 300, "run": 64},
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
FP8 = {
    "bs": 3,
    "longest": 4,
    "prefix": 1400,
    "slots": 9600,
    "q_heads": 8,
    "kv_heads": 2,
    "dtype": "bf16",
    "cache_dtype": "e4m3",
    "scales": "tensor",
}
APART: dict[str, dict[str, Any]] = {
    "plain": {"head_dim": 128},
    "e5m2-fp16": {"head_dim": 128, "cache_dtype": "e5m2", "dtype": "fp16", "scales": "float", "lse": False},
    "slots-of-64-bits": {"head_dim": 128, "index": "i64", "indptr": "i64"},
    "heads-of-64": {"head_dim": 64},
    "heads-of-64-slots-of-64-bits": {"head_dim": 64, "index": "i64"},
    "heads-of-256": {"head_dim": 256, "q_heads": 4},
    "narrower-values": {"head_dim": 128, "v_head_dim": 64},
    "group-of-8": {"head_dim": 128, "q_heads": 16, "longest": 5},
    "group-of-7": {"head_dim": 128, "q_heads": 14, "cache": "paged", "cache_view": "pairs"},
    "group-of-1": {"head_dim": 128, "q_heads": 2, "longest": 21},
    "absent": {"head_dim": 128, "values": "skip", "spare": 3, "lengths": "full"},
    "not-causal": {"head_dim": 128, "causal": False},
    "cap": {"head_dim": 128, "logit_cap": 3.0, "loud": 4.0},
    "window": {"head_dim": 128, "sliding_window": 700},
    "window-of-few": {"head_dim": 64, "sliding_window": 60, "bs": 9},
    "window-of-one": {"head_dim": 128, "sliding_window": 0},
    "window-of-all": {"head_dim": 128, "sliding_window": 2**40, "index": "i64"},
    "window-absent": {"head_dim": 256, "sliding_window": 300, "values": "skip", "q_heads": 4},
    "window-fewer-keys": {"head_dim": 128, "sliding_window": 3, "prefix": -3, "bs": 40, "slots": 4000},
    "window-many-requests": {"head_dim": 64, "sliding_window": 300, "bs": 300, "prefix": 90, "slots": 30000},
    "window-edge": {
        "head_dim": 128,
        "sliding_window": 30,
        "bs": 9,
        "values": "edge",
        "indptr_values": "edge",
        "prefix": 40,
    },
    "one-long": {"head_dim": 128, "bs": 40, "longest": 30, "lengths": "skewed", "prefix": 900, "slots": 40000},
    "no-prefix": {"head_dim": 128, "prefix": 0},
    "fewer-keys": {"head_dim": 128, "prefix": -3, "bs": 40, "slots": 4000},
    "many-requests": {"head_dim": 64, "bs": 300, "prefix": 90, "slots": 30000},
    "whole": {"head_dim": 64, "bs": 1100, "longest": 8, "lengths": "full", "prefix": 9, "slots": 20000},
    "edge": {"head_dim": 128, "bs": 9, "values": "edge", "indptr_values": "edge", "prefix": 40},
    "extreme": {"head_dim": 128, "bs": 9, "values": "extreme", "indptr_values": "extreme", "prefix": 6, "index": "i64"},
}
"""Several tiles of keys, several parts; tiles of tokens that are not full."""
FEW_ROWS = "decode_attention_lanes_kernel", "extend_attention_few_kernel"
SPEC = get_spec("extend_attention")


def made(**change: Any) -> dict[str, Any]:
    return SPEC.make(**{**MLA, **change})


def apart(**change: Any) -> dict[str, Any]:
    return SPEC.make(**{**FP8, **change})


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
@pytest.mark.parametrize("form", FORMS)
def test_right(form: str) -> None:
    from hal.backends.cuda import extend_attention

    extend_attention._plans.clear()
    execute(SPEC, made(**FORMS[form]), DirectTarget.of(SPEC.name, extend_attention.extend_attention, "cuda"))
    names = {plan.steps[0].run.kernel.name for plan in extend_attention._plans.values()}
    assert names == {"decode_attention_hopper_kernel"}


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
@pytest.mark.parametrize("form", APART)
def test_right_over_fp8(form: str) -> None:
    from hal.backends.cuda import extend_attention

    args = apart(**APART[form])
    assert launched(SPEC.name, args)[0].kernel.name == FEW_ROWS[0]
    execute(SPEC, args, DirectTarget.of(SPEC.name, extend_attention.extend_attention, "cuda"))


def kernels(args: dict[str, Any], arch: int = 90) -> set[str]:
    from hal.backends.cuda import inspect

    with inspect.record(arch) as calls:
        inspect.launcher("extend_attention")(**args)
    return {bound.kernel.name for bound, _ in calls}


def test_taken_on_hopper_alone() -> None:
    args = made()
    assert kernels(args) == {"decode_attention_hopper_kernel", "merge_kernel"}
    assert kernels(args, 80) == kernels(args, 100) == {"extend_attention_kernel"}
    for change in ({"sliding_window": 5}, {"logit_cap": 3.0}, {"dtype": "fp32"}):
        assert kernels(made(**change)) == {"extend_attention_kernel"}


@pytest.mark.skipif(HOPPER or INTERPRETED, reason="records launches")
def test_over_fp8_by_how_many_tokens_a_request_has() -> None:
    def names(**change: Any) -> list[str]:
        return [run.kernel.name for run in launched(SPEC.name, apart(**{"head_dim": 128, "lengths": "full", **change}))]

    lanes, few, hopper = (
        ["decode_attention_lanes_kernel"],
        ["extend_attention_few_kernel"],
        ["extend_attention_hopper_kernel"],
    )
    merge = ["merge_kernel"]
    assert names() == names(longest=8) == lanes + merge
    assert names(longest=9, bs=8) == names(longest=5, bs=8, q_heads=16) == hopper
    assert names(longest=1, q_heads=64) == names(longest=3, q_heads=32) == hopper + merge
    assert names(longest=8, q_heads=4, head_dim=256) == lanes + merge
    assert names(sliding_window=700) == lanes + merge
    assert names(sliding_window=70) == lanes
    assert names(bs=1100, longest=8, prefix=9, slots=20000) == lanes
    assert names(sliding_window=70, causal=False)[0] == hopper[0]
    many: dict[str, Any] = {"bs": 24, "slots": 40000}
    assert names(**many) == names(longest=2, index="i64", **many) == lanes + merge
    assert names(longest=5, **many) == names(longest=8, **many) == names(longest=4, q_heads=16, **many) == few + merge
    assert names(longest=2, q_heads=18, **many) == names(longest=1, q_heads=64, **many) == few + merge
    assert names(longest=3, index="i64", **many) == names(longest=8, sliding_window=1023, **many) == few + merge
    assert names(longest=8, sliding_window=1022, **many) == names(longest=8, q_heads=4, head_dim=256, **many)
    assert names(longest=9, **many) == names(longest=1, q_heads=66, **many) == names(longest=3, q_heads=32, **many)
    assert names(longest=9, **many)[0] == hopper[0]
    short: dict[str, Any] = {"bs": 200, "slots": 60000, "prefix": 240}
    assert names(longest=8, **short) == lanes + merge
    assert names(longest=1, q_heads=64, **short)[0] == hopper[0]
    assert names(longest=8, **{**short, "prefix": 248}) == few + merge
    for form in APART.values():
        args = apart(**form)
        assert launched(SPEC.name, args)[0].kernel.name == FEW_ROWS[0]
        for arch in (80, 100):
            assert [run.kernel.name for run in launched(SPEC.name, args, arch)] == ["extend_attention_kernel"]


@pytest.mark.skipif(HOPPER or INTERPRETED, reason="records launches")
@pytest.mark.parametrize("form", ["plain", "slots-of-64-bits", "heads-of-64-slots-of-64-bits", "group-of-7"])
def test_scratch_is_enough_for_all(form: str) -> None:
    """What is said once, of the kernel that takes the most tokens a tile."""
    from hal.backends.cuda import _tokens, decode_attention, inspect

    args = apart(**APART[form])
    given = [args[name] for name in ("q", "k_cache", "v_cache")]
    with inspect.record():
        run, blocks, programs, _ = decode_attention._plan(
            *given, (1024, 128), None, False, False, 0.5, 0.5, False, True
        )
        kernels = tuple(_tokens._kernels(run, programs, blocks, *given, args["kv_indices"], True, -1, True))
    assert [each[0].kernel.name for each in kernels] == list(FEW_ROWS)
    heads, v_dim = args["q"].shape[1], args["v_cache"].shape[-1]
    first, last = (_tokens._room(*each, heads, v_dim) for each in kernels)
    for n in (1, 7, 64, 511, 513, 3000, 5000, 100_000):
        for bs in (1, 3, 64, 1000):
            long = {"q": n, "qo_indptr": bs + 1}
            parts, all = (size.value(long) for size in first)
            room, most = (size.value(long) for size in last)
            assert parts <= room
            assert all - parts <= most - room


@pytest.mark.skipif(HOPPER or INTERPRETED, reason="records launches")
def test_the_helper_in_c_has_room_for_a_plan_of_all_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every call of the kind goes through Python, and nothing says so."""
    from hal.backends.cuda import inspect
    from hal.backends.cuda.extend_attention import _plans
    from hal.triton import plans

    source = Path(plans.__file__).with_name("_plans.c").read_text("utf-8")
    room = {name: int(many) for name, many in re.findall(r"\b(STEPS|NUMBERS) = (\d+)", source)}
    args = apart(head_dim=128)
    with inspect.record():
        plan = _plans.make(*(args[name] for name in _plans.names))
    taught: list[dict[str, int]] = []

    def learn(call: object, numbers: tuple[Any, ...], steps: tuple[Any, ...], *rest: object) -> None:
        taught.append({"STEPS": len(steps), "NUMBERS": len(numbers)})

    monkeypatch.setattr(_plans, "native", SimpleNamespace(learn=learn, lend=lambda *_: None))
    _plans._teach(plan, None)
    (needed,) = taught
    assert {*FEW_ROWS, "extend_attention_hopper_kernel"} < {step.run.kernel.name for step in plan.steps}
    assert all(needed[name] <= room[name] for name in ("STEPS", "NUMBERS"))


@pytest.mark.skipif(INTERPRETED, reason="Triton's compiler is not to be had in the interpreter lane")
@pytest.mark.parametrize("form", APART if os.environ.get("CI_ALL") else ("plain", "slots-of-64-bits"))
def test_no_form_over_fp8_spills(form: str) -> None:
    from hal.backends.cuda import inspect

    with inspect.record() as calls:
        inspect.launcher(SPEC.name)(**apart(**APART[form]))
    found = next(call for call in calls if call[0].kernel.name == "decode_attention_lanes_kernel")
    cubin = inspect.compile_call(found, 90).asm["cubin"]
    assert inspect.resources(cubin)[1] == 0
    assert inspect.widest_load(inspect.sass(cubin)) == 128


@pytest.mark.skipif(INTERPRETED, reason="Triton's compiler is not to be had in the interpreter lane")
@pytest.mark.parametrize("heads", [16, *([20, 128] if os.environ.get("CI_ALL") else [])])
def test_no_form_spills_or_has_its_products_serialized(heads: int, tmp_path: Path) -> None:
    from hal.backends.cuda import inspect

    with inspect.record() as calls:
        inspect.launcher("extend_attention")(**made(q_heads=heads))
    found = next(call for call in calls if call[0].kernel.name == "decode_attention_hopper_kernel")
    assert found[0].static["TOKENS"] == max(64 // heads, 1)
    compiled = inspect.compile_call(found, 90)
    _, spills, _ = inspect.resources(compiled.asm["cubin"])
    assert spills == 0
    assert compiled.metadata.shared <= 232_448
    assert not serialized(compiled.asm["ptx"], tmp_path)
