"""The Gluon kernel of extend_attention where its contract's samples are short: over many tiles.

Without a GPU: which calls it takes, and that these forms don't spill. On Hopper (``ci/h200``): what it computes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from assembler import put_aside, serialized
from launched import launched, same_in_graphs

from hal.ops import get_spec

pytest.importorskip("triton", reason="Triton is not installed here")

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
BETWEEN = ((80, 80), (96, 96), (112, 112))
"""Heads that are taken as of 128: their keys in two tiles, or one that is not full."""


def made(head_dim: int = 128, v_head_dim: int = 128, **change: Any) -> dict[str, Any]:
    """Two requests of some tiles of new tokens and of keys."""
    usual = {"bs": 2, "lengths": "full", "longest": 150, "prefix": 260, "slots": 960, "q_heads": 2, "kv_heads": 1}
    return get_spec("extend_attention").make(**{**usual, "head_dim": head_dim, "v_head_dim": v_head_dim, **change})


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "absent": {"values": "skip", "index": "i64"},
    "absent-window": {"values": "skip", "sliding_window": 140, "cache": "paged", "cache_view": "padded"},
    "window": {"sliding_window": 70, "lse": False, "dtype": "fp16"},
    "cap": {"logit_cap": 3.0, "loud": 4.0},
    "cap-window-paged": {"logit_cap": 3.0, "sliding_window": 100, "cache": "paged", "cache_view": "padded"},
    "cap-far": {"logit_cap": 0.2, "loud": 4.0},
    "cap-near": {"logit_cap": 50.0, "loud": 0.1},
    "narrow-window": {"sliding_window": 20, "index": "i64"},
    "window-of-one": {"sliding_window": 0},
    "not-causal": {"causal": False},
    "group-of-7": {"q_heads": 14, "kv_heads": 2, "longest": 40},
    "group-of-3": {"q_heads": 6, "kv_heads": 2},
    "group-of-5-ragged": {"q_heads": 5, "bs": 40, "longest": 70, "prefix": 40, "lengths": "skewed", "spare": 3},
    "group-of-12-window": {"q_heads": 24, "kv_heads": 2, "longest": 50, "sliding_window": 70, "slots": 800},
    "group-of-130": {"q_heads": 260, "kv_heads": 2, "longest": 3, "prefix": 300},
    "group-of-1": {"q_heads": 2, "kv_heads": 2, "cache": "paged", "cache_view": "pairs", "indptr": "i64"},
    "ragged": {"bs": 40, "longest": 30, "prefix": 40, "lengths": "skewed", "spare": 3},
    "ragged-few": {"bs": 20, "longest": 90, "prefix": 40, "lengths": "skewed", "spare": 3},
    "ragged-many": {"bs": 300, "longest": 40, "prefix": 2, "lengths": "skewed", "spare": 3, "slots": 16384},
    "fewer-keys": {"prefix": -120},
    "more-than-programs": {"bs": 20, "longest": 5, "prefix": 200, "q_heads": 8, "kv_heads": 8, "slots": 4800},
}
FP8: dict[str, dict[str, Any]] = {
    "e4m3": {"cache_dtype": "e4m3", "scales": "tensor"},
    "e5m2-absent": {"cache_dtype": "e5m2", "values": "skip", "index": "i64"},
    "e4m3-absent-window-paged": {
        "cache_dtype": "e4m3",
        "values": "skip",
        "sliding_window": 140,
        "cache": "paged",
        "cache_view": "pairs",
    },
    "e5m2-cap-window-fp16": {
        "cache_dtype": "e5m2",
        "dtype": "fp16",
        "logit_cap": 3.0,
        "loud": 4.0,
        "sliding_window": 100,
        "scales": "float",
        "lse": False,
    },
    "e4m3-group-of-7": {"cache_dtype": "e4m3", "q_heads": 14, "kv_heads": 2, "longest": 40},
    "e5m2-group-of-3-window": {"cache_dtype": "e5m2", "q_heads": 3, "sliding_window": 70},
    "e4m3-wide-window": {"cache_dtype": "e4m3", "sliding_window": 600, "prefix": 500, "slots": 1400},
}
FORMS |= FP8
HALF_EMPTY = {"q_heads": 64, "kv_heads": 8, "bs": 40, "lengths": "skewed", "longest": 205, "slots": 16384}
"""Programs have several tiles, of some of which one group of warps has no rows."""
FORMS |= {"half-empty": HALF_EMPTY, "e4m3-half-empty": {**HALF_EMPTY, "cache_dtype": "e4m3"}}
LOUD = ((3e38, 1e-38), (1e-38, 1e38), (1e-40, 1e38), (3e4, 1e-4), (1.0, 0.1))
"""A magnitude of queries, and a scale by which logits are of none."""
LITTLE = ("absent-window", "cap", "cap-window-paged", "narrow-window", "group-of-7", "group-of-3")
RUNS: dict[str, dict[str, Any]] = {
    "in-runs": {"run": 128, "slots": 1024},
    "in-runs-strided": {"run": 256, "slots": 1024, "cache_view": "padded", "dtype": "fp16"},
    "in-runs-absent": {"run": 128, "slots": 1024, "values": "skip", "index": "i64"},
    "in-runs-window": {"run": 128, "slots": 1024, "sliding_window": 140, "q_heads": 3, "kv_heads": 3},
    "in-runs-ragged": {"run": 128, "slots": 16384, "bs": 20, "longest": 90, "prefix": 300, "lengths": "skewed"},
}
"""Of heads of 192 / 128 some tiles come by boxes."""
FORMS |= RUNS
CI_ALL = os.environ.get("CI_ALL")
"""Else one form of each size of heads, that of the most registers."""


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "form"),
    [
        *((128, 128, form) for form in FORMS if form not in RUNS),
        *((192, 128, form) for form in RUNS),
        *((dim, dim, form) for dim in (64, 256) for form in (*FP8, "half-empty", "e4m3-half-empty")),
        *((*dims, form) for dims in DIMS if dims != (128, 128) for form in LITTLE),
        *((*dims, form) for dims in BETWEEN for form in ("plain", "ragged-few", "not-causal", *LITTLE, *FP8)),
    ],
)
def test_right_over_many_tiles(head_dim: int, v_head_dim: int, form: str) -> None:
    judged(made(head_dim, v_head_dim, **FORMS[form]))


def judged(args: dict[str, Any]) -> None:
    """Within the contract's bound, by the Gluon kernel."""
    from hal.backends.cuda import extend_attention
    from hal.bench.judge import verdict

    extend_attention._plans.clear()
    assert verdict("extend_attention", args) <= 1.0
    assert launched("extend_attention", args)[0].kernel.name == "extend_attention_hopper_kernel"


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("cache_dtype", ["e4m3", "e5m2"])
def test_queries_that_fp16_does_not_hold(head_dim: int, cache_dtype: str) -> None:
    """Rows of zeros, of one element, of two and little ones, and a scale of a cache below 0."""
    for size, scale in LOUD:
        args = made(head_dim, head_dim, cache_dtype=cache_dtype, scales="tensor")
        q = torch.rand(args["q"].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.5
        q[:, 0] = 0
        q[::2, 1, 1:] = 0
        q[1::3, 1, 2:] *= 2.0**-30
        judged(args | {"q": (q * size).to(args["q"].dtype), "scale": scale})
    judged(args | {"k_scale": torch.tensor([-0.37])})


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
def test_rows_of_many_requests_are_done_in_turns() -> None:
    """Ten requests of the same rows: more tiles than the grid was made for."""
    from hal.bench.judge import verdict

    args = made()
    n, nnz = args["q"].shape[0], args["kv_indices"].shape[0]
    args["qo_indptr"] = torch.tensor([0, n] * 10, dtype=torch.int32)
    args["kv_indptr"] = torch.tensor([0, nnz] * 10, dtype=torch.int32)
    assert verdict("extend_attention", args) <= 1.0


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
@pytest.mark.parametrize("cache_dtype", [None, "e4m3"])
def test_the_counter_is_left_as_it_was_found(cache_dtype: str | None) -> None:
    """Calls of more tiles than programs, and of fewer, one after the other; and again in a graph."""
    from hal.backends.cuda import extend_attention
    from hal.triton.plans import COUNTERS

    fp8 = {} if cache_dtype is None else {"cache_dtype": cache_dtype, "scales": "tensor"}
    many = {**FORMS["more-than-programs"], "longest": 40, **fp8}
    calls = [made(**form) for form in (many, fp8, {**many, "bs": 40, "prefix": 40})]
    for args in (*calls, *calls):
        judged(args)
        kept = [x[:COUNTERS] for x in extend_attention._plans._scratch.values()]
        assert kept
        assert not any(x.any() for x in kept)
    same_in_graphs(extend_attention.extend_attention, calls[0])


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
def test_heads_are_done_some_at_a_time() -> None:
    """Heads whose keys are more than the L2 holds, in groups of 33 and 32."""
    heads = {"q_heads": 65, "kv_heads": 65, "bs": 1, "prefix": 700, "slots": 864}
    judged(made(192, 128, **heads))


def kernels(args: dict[str, Any], arch: int = 90) -> set[str]:
    from hal.backends.cuda import inspect

    with inspect.record(arch) as calls:
        inspect.launcher("extend_attention")(**args)
    return {bound.kernel.name for bound, _ in calls} - {"merge_kernel"}  # of what is split


@pytest.mark.parametrize(("head_dim", "v_head_dim"), DIMS + BETWEEN)
def test_taken_on_hopper_alone(head_dim: int, v_head_dim: int) -> None:
    args = made(head_dim, v_head_dim)
    assert kernels(args) == {"extend_attention_hopper_kernel"}
    fp8 = made(head_dim, v_head_dim, **FP8["e4m3"])
    assert launched("extend_attention", fp8)[0].kernel.name == (
        "extend_attention_kernel" if head_dim == 192 else "extend_attention_hopper_kernel"
    )
    assert kernels(args, 80) == kernels(args, 100) == {"extend_attention_kernel"}


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "fp32"},
        {"cache_dtype": "e4m3", "dtype": "fp32"},
        {"cache_dtype": "e4m3", "head_dim": 192, "v_head_dim": 128},
        {"cache_dtype": "e4m3", "cache": "paged", "cache_view": "padded"},
        {"head_dim": 104, "v_head_dim": 104},
        {"head_dim": 96, "v_head_dim": 80},
        {"head_dim": 48, "v_head_dim": 48},
        {"q_view": "misaligned"},
        {"scale": -0.1},
        {"k_cache": torch.zeros(960, 1, 129, dtype=torch.bfloat16)[..., :128]},
    ],
    ids=lambda change: "-".join(change),
)
def test_other_calls_go_to_triton(change: dict[str, Any]) -> None:
    given = {name: change[name] for name in ("scale", "k_cache") if name in change}
    args = made(**{name: value for name, value in change.items() if name not in given}) | given
    assert kernels(args) == {"extend_attention_kernel"}


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "change", "boxes"),
    [
        (192, 128, {}, True),
        (192, 128, {"cache_view": "pairs"}, True),
        (192, 128, {"cache_view": "padded"}, True),
        (192, 128, {"cache": "paged"}, True),
        (192, 128, {"cache": "paged", "cache_view": "pairs"}, False),
        (192, 128, {"logit_cap": 3.0}, False),
        (128, 128, {}, False),
        (256, 256, {}, False),
        (128, 128, FP8["e4m3"], False),
    ],
    ids=str,
)
def test_rows_of_prompts_alone_come_by_boxes(
    head_dim: int, v_head_dim: int, change: dict[str, Any], boxes: bool
) -> None:
    from hal.backends.cuda import inspect

    with inspect.record() as calls:
        inspect.launcher("extend_attention")(**made(head_dim, v_head_dim, **change))
    assert {bound.static["MAP"] for bound, _ in calls if "MAP" in bound.static} == {boxes}


def test_rows_that_a_map_can_not_tell_of_come_one_by_one() -> None:
    """Of 3 heads of 192, by what lies between tokens and between heads."""
    from hal.backends.cuda.extend_attention import by_boxes

    cache = torch.empty(8, 3, 192, dtype=torch.bfloat16)
    apart = ((576, 192), (640, 208), (575, 192), (576, 193), (192, 1536), (0, 0), (2**31, 192))
    assert [by_boxes(cache, cache, (row, 0, head), (576, 0, 192)) for row, head in apart] == [True] * 2 + [False] * 5
    assert not by_boxes(cache, cache, (576, 0, 192), (575, 0, 192))


@pytest.mark.skipif(INTERPRETED, reason="Triton's compiler is not to be had in the interpreter lane")
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "form"),
    [
        *((*dims, form) for dims in DIMS for form in (["plain", *LITTLE] if CI_ALL else LITTLE[2:3])),
        *((*dims, form) for dims in BETWEEN for form in (["plain", *LITTLE, "e4m3"] if CI_ALL else [])),
        *((dim, dim, form) for dim in (64, 128, 256) for form in (FP8 if CI_ALL else ("e4m3",))),
    ],
)
def test_no_form_spills_or_has_its_products_serialized(
    head_dim: int, v_head_dim: int, form: str, tmp_path: Path
) -> None:
    from hal.backends.cuda import inspect

    with inspect.record() as calls:
        inspect.launcher("extend_attention")(**made(head_dim, v_head_dim, **FORMS[form]))
    # What is started is behind what is compiled for other lengths.
    call = [call for call in calls if call[0].kernel.name != "merge_kernel"][-1]
    assert call[0].kernel.name == "extend_attention_hopper_kernel"
    compiled = inspect.compile_call(call, 90)
    registers, spills, _ = inspect.resources(compiled.asm["cubin"])
    assert registers == 168
    # A word or two of these forms are put aside once a tile of queries, outside the loops that multiply; of rows of 256
    # over fp8 up to 60, of one form 64, mostly where queries are scaled and outputs leave. Who widens such rows has a
    # few in its loop. Whole tiles over fp8 under a window, of heads of 128: eight.
    wide = 256 if form == "e5m2-absent" else 240
    few = 32 if form == "e4m3-wide-window" else 16
    assert spills <= (wide if head_dim == 256 and form in FP8 else few if head_dim > 128 or form in FP8 else 0)
    assert not put_aside(compiled.asm["cubin"], tmp_path)
    assert not serialized(compiled.asm["ptx"], tmp_path)
