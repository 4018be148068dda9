"""The Gluon kernel of decode_attention for MLA's rows, which the contract's samples reach by few forms.

Without a GPU: which calls it takes, and that its forms don't spill. On Hopper (``ci/h200``): what it computes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from assembler import serialized

from hal.ops import get_spec

pytest.importorskip("triton", reason="Triton is not installed here")

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
USUAL = {
    "bs": 5,
    "longest": 900,
    "slots": 4800,
    "head_dim": 576,
    "v_head_dim": 512,
    "kv_heads": 1,
    "q_heads": 128,
    "cache_view": "shared",
    "dtype": "bf16",
}

FORMS: tuple[dict[str, Any], ...] = (
    {"q_heads": 128},
    {"q_heads": 16, "longest": 700, "indptr": "i64"},
    {"q_heads": 64, "bs": 40, "longest": 90},
    {"q_heads": 128, "values": "skip", "index": "i64", "longest": 300},
    {"q_heads": 24},
    {"q_heads": 20, "cache": "paged", "dtype": "fp16"},
    {"q_heads": 128, "lse": False, "bs": 3, "longest": 2500, "slots": 8000},
    {"q_heads": 128, "run": 64, "cache": "paged", "page_size": 64},
    {"q_heads": 128, "run": 64, "bs": 9, "values": "skip", "index": "i64"},
    {"q_heads": 72, "run": 64, "dtype": "fp16", "bs": 2, "longest": 2500, "slots": 8000},
    {"q_heads": 128, "bs": 70, "longest": 1500, "lengths": "skewed", "slots": 20000},
    {"q_heads": 16, "bs": 120, "longest": 4000, "lengths": "skewed", "slots": 20000},
    {"q_heads": 16, "bs": 130, "longest": 1500, "lengths": "skewed", "slots": 20000, "lse": False},
)


def made(**change: Any) -> dict[str, Any]:
    return get_spec("decode_attention").make(**{**USUAL, **change})


def kernels(args: dict[str, Any], arch: int = 90) -> list[str]:
    from hal.backends.cuda import inspect

    with inspect.record(arch) as calls:
        inspect.launcher("decode_attention")(**args)
    return list(dict.fromkeys(bound.kernel.name for bound, _ in calls))


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(f"{k}={v}" for k, v in form.items()))
def test_right(form: dict[str, Any]) -> None:
    from hal.backends.cuda import decode_attention
    from hal.bench.judge import prove

    decode_attention._plans.clear()
    prove("decode_attention", {**USUAL, **form}, "cuda")
    assert {plan.steps[0].run.kernel.name for plan in decode_attention._plans.values()} == {
        "decode_attention_hopper_kernel"
    }


def test_taken_on_hopper_alone() -> None:
    args = made()
    assert kernels(args) == ["decode_attention_hopper_kernel", "merge_kernel"]
    for arch in (80, 100):
        assert kernels(args, arch) == ["decode_attention_kernel", "merge_kernel"]


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "fp32"},
        {"cache_dtype": "e4m3", "logit_cap": 3.0},
        {"cache_dtype": "e4m3", "dtype": "fp32"},
        {"head_dim": 288, "v_head_dim": 256},
        {"cache_view": "contiguous"},
        {"scale": -0.1},
        {"logit_cap": 3.0},
        {"sliding_window": 70},
        {"cache": "paged", "cache_view": "padded"},
    ],
    ids=lambda change: "-".join(change),
)
def test_other_calls_go_to_triton(change: dict[str, Any]) -> None:
    scale = {"scale": change["scale"]} if "scale" in change else {}
    args = made(**{k: v for k, v in change.items() if k != "scale"}) | scale
    assert kernels(args)[0] == "decode_attention_kernel"


@pytest.mark.parametrize(
    ("change", "boxes"),
    [
        ({}, True),
        ({"dtype": "fp16", "q_heads": 65, "cache": "paged"}, True),
        ({"q_heads": 64}, False),
        ({"kv_heads": 2}, False),
        ({"q_heads": 256, "kv_heads": 2}, False),
        ({"cache_dtype": "e4m3"}, False),
    ],
    ids=str,
)
def test_rows_come_by_boxes_where_more_than_one_program_reads_them(change: dict[str, Any], boxes: bool) -> None:
    from hal.backends.cuda import inspect

    args = made(**change)
    with inspect.record() as calls:
        inspect.launcher("decode_attention")(**args)
    assert calls[0][0].kernel.name == "decode_attention_hopper_kernel"
    assert calls[0][0].static["MAP"] == boxes


def test_rows_that_a_map_can_not_tell_of_come_one_by_one() -> None:
    from hal.backends.cuda.decode_attention import by_boxes

    cache = made()["k_cache"]
    assert [by_boxes(cache, row, 128) for row in (576, 584, 2**38 - 8, 568, 0, 2**38)] == [True] * 3 + [False] * 3


@pytest.mark.skipif(HOPPER or INTERPRETED, reason="records launches")
@pytest.mark.parametrize("cache", [None, "e4m3"])
@pytest.mark.parametrize("heads", [128, 16])
def test_parts_are_left_in_halves(heads: int, cache: str | None) -> None:
    """And programs are those that run at once, with no more beside them than requests: shares are theirs. Who merges is
    told whether there is anything where who splits says so: of about as many requests as programs, or twice."""
    from hal.backends.cuda import inspect
    from hal.backends.cuda.decode_attention import _plans

    args = made(q_heads=heads, cache_dtype=cache)
    with inspect.record():
        plan = _plans.make(*(args[name] for name in _plans.names))
    _, *steps = plan.steps
    assert {step.run.kernel.name for step in steps} == {"decode_attention_hopper_kernel", "merge_kernel"}
    splits = [step for step in steps if step.run.kernel.name != "merge_kernel"]
    for step in steps:
        assert step.run.static["HALVES"]
        assert step.run.static["PAIRED"] == (cache is None or heads > 32)
    assert splits[-1].grid.value({"q": 10**6}) == 2 * splits[0].grid.value({"q": 0})
    programs = splits[0].args[[p.name for p in splits[0].run.args].index("programs")]
    late = set()
    for bs in range(1, 3 * programs):
        split, merge = (s for s in steps if all(a != "q" or low < bs <= high for a, low, high in s.where))
        assert merge.run.static["TOLD"] == bool(split.args[-1])
        late |= {bs} if split.args[-1] else set()
    assert late == {
        *range(programs - programs // 8, programs + 1),
        *range(2 * programs - programs // 8, 2 * programs + 1),
    }


@pytest.mark.skipif(INTERPRETED, reason="Triton's compiler is not to be had in the interpreter lane")
@pytest.mark.parametrize(
    "form",
    [
        {"cache": "paged"},
        {"q_heads": 16},
        *([{}, {"dtype": "fp16", "q_heads": 20, "lse": False}] if os.environ.get("CI_ALL") else []),
    ],
)
def test_no_form_spills_or_has_its_products_serialized(form: dict[str, Any], tmp_path: Path) -> None:
    from hal.backends.cuda import inspect

    with inspect.record() as calls:
        inspect.launcher("decode_attention")(**made(**form))
    assert calls[0][0].kernel.name == "decode_attention_hopper_kernel"
    compiled = inspect.compile_call(calls[0], 90)
    _, spills, _ = inspect.resources(compiled.asm["cubin"])
    assert spills == 0
    assert compiled.metadata.shared <= 232_448
    assert not serialized(compiled.asm["ptx"], tmp_path)


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="runs on Hopper")
@pytest.mark.parametrize("heads", [128, 16])
def test_batches_with_and_without_parts_in_turns(heads: int) -> None:
    """Whether there is something to merge is said for each call anew, in memory that the one before had, and before
    that which is to be merged is there. Calls follow each other with nothing in between, in a graph and not."""
    from hal.backends.cuda import inspect

    def on_device(bs: int, lengths: str) -> dict[str, Any]:
        args = made(q_heads=heads, bs=bs, lengths=lengths, longest=700, slots=4800)
        args = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in args.items()}
        return {**args, "v_cache": args["k_cache"][..., :512]}

    call, turns = inspect.launcher("decode_attention"), 40
    programs = torch.cuda.get_device_properties(0).multi_processor_count // (2 if heads == 128 else 1)
    # Of about as many requests as programs, none split, and one; of more; of few.
    kinds = ((programs - 4, "full"), (programs + 4, "full"), (programs - 4, "skewed"), (programs // 8, "full"))
    batches = [on_device(*kind) for kind in kinds]
    first = [get_spec("decode_attention").reference(**{**args, "out": None}).clone() for args in batches]
    outs = [torch.full_like(one, torch.nan) for _ in range(turns) for one in first]

    def all_turns() -> None:
        for i, out in enumerate(outs):
            call(**{**batches[i % 4], "out": out})

    all_turns()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_turns()
    for _ in range(2):
        for i, out in enumerate(outs):
            torch.testing.assert_close(out, first[i % 4], rtol=2e-2, atol=2e-2)
            assert torch.equal(out, outs[i % 4])
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
