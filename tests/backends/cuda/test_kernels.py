"""Sizes at which this backend's launches change, which no sample has. Under TRITON_INTERPRET=1 or on a CUDA device."""

import os
import re
from typing import Any

import pytest
import torch

from hal import ops
from hal._remote.target import DirectTarget
from hal.conformance.execute import execute

CUDA = torch.cuda.is_available()
SIZES = [32, 33, 256, 257, 512, 513, 1024, 1025, 2000]


@pytest.mark.skipif(
    not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA device or TRITON_INTERPRET=1"
)
@pytest.mark.parametrize("bs", SIZES if CUDA or os.environ.get("CI_ALL") else [33, 513, 1025])
def test_assign_at_the_sizes_where_its_launch_changes(bs: int) -> None:
    from hal.backends.cuda.assign_extend_cache_locs import assign_extend_cache_locs as fn

    spec = ops.get_spec("assign_extend_cache_locs")
    target = DirectTarget.of(spec.name, fn, "cuda" if CUDA else "cpu")
    execute(spec, spec.make(bs=bs, longest=9, seed=bs), target)


@pytest.mark.skipif(
    not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA device or TRITON_INTERPRET=1"
)
def test_a_list_that_begins_far_below_what_it_is_written_to_takes_no_turns_there() -> None:
    """Two million chunks of it would go nowhere, which takes the interpreter an hour."""
    from hal.backends.cuda.build_kv_indices import build_kv_indices as fn

    device = "cuda" if CUDA else "cpu"
    table = torch.arange(8, dtype=torch.int32, device=device)[None]
    requests = torch.zeros(1, dtype=torch.int64, device=device)
    lens = torch.full((1,), 2**31 - 1, device=device)
    start = torch.tensor([-(2**31) + 5], device=device)
    indptr = torch.tensor([-(2**31) + 4, 5], device=device)
    out = torch.full((5,), -7, dtype=torch.int32, device=device)
    fn(table, requests, lens, None, out, start, given_indptr=indptr)
    # Token 2^31 - 4 is the first that has a place, and lies in column 1; token 2^31 - 2 is the last.
    assert out.tolist() == [1, 2, 3, -7, -7]


@pytest.mark.skipif(
    not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA device or TRITON_INTERPRET=1"
)
@pytest.mark.parametrize("page_size", [28, 56])
def test_alloc_extend_counts_pages_of_any_size(page_size: int) -> None:
    from hal.backends.cuda.alloc_extend import alloc_extend as fn

    spec = ops.get_spec("alloc_extend")
    params = {"bs": 49, "prefix": 264, "longest": 11, "slack": 3104, "spare": -27, "values": "negative"}
    target = DirectTarget.of(spec.name, fn, "cuda" if CUDA else "cpu")
    execute(spec, spec.make(**params, page_size=page_size, seed=321421311), target)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="needs Triton's compiler")
@pytest.mark.parametrize("page_size", [28, 56, 112])
def test_no_difference_of_page_counts_is_a_product_with_an_addend(page_size: int) -> None:
    """ptxas 12.8 makes ``a * b >> 32, less c`` an ``IMAD.HI`` whose addend is -c: its carry is lost where c is 0."""
    from hal.backends.cuda import inspect

    with inspect.record() as calls:
        inspect.launcher("alloc_extend")(**ops.get_spec("alloc_extend").make(bs=49, page_size=page_size))
    for call in calls:
        code = inspect.sass(inspect.compile_call(call, 90).asm["cubin"])
        assert "IMAD.HI.U32" in code
        assert not re.search(r"IMAD\.HI\.U32 R\d+, P", code)


HOPPER = CUDA and torch.cuda.get_device_capability()[0] == 9 and os.environ.get("TRITON_INTERPRET") != "1"
HEADS = {"head_dim": 128, "kv_heads": 4, "q_heads": 32, "longest": 900, "slots": 38400, "dtype": "bf16", "bs": 3}


@pytest.mark.parametrize(
    ("change", "deep"),
    [
        ({}, (4, 4)),
        ({"head_dim": 64, "q_heads": 4, "dtype": "fp16"}, (2, 2)),
        ({"head_dim": 256}, (4, 3)),
        ({"q_heads": 68}, None),
        ({"head_dim": 192}, None),
        ({"dtype": "fp32"}, None),
        ({"cache_dtype": "e4m3", "q_heads": 64}, None),
    ],
    ids=str,
)
def test_decode_attention_s_tile_on_hopper(change: dict[str, Any], deep: tuple[int, int] | None) -> None:
    """With it, of so many warps and stages, one launch, else two; elsewhere always two."""
    from hal.backends.cuda import decode_attention, inspect

    for arch in (90, 80):
        decode_attention._plans.clear()
        with inspect.record(arch) as calls:
            inspect.launcher("decode_attention")(**ops.get_spec("decode_attention").make(**{**HEADS, **change}))
        names = [bound.kernel.name for bound, _ in calls]
        form = calls[0][0].static
        assert form["AHEAD"] == (deep is not None and arch == 90)
        if form["AHEAD"]:
            assert (form["num_warps"], form["STAGES"]) == deep
        assert ("merge_kernel" not in names) == form["AHEAD"]


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("bs", [1, 3, 40])
def test_decode_attention_is_right_with_that_tile(bs: int) -> None:
    from hal.bench.judge import verdict

    assert verdict("decode_attention", ops.get_spec("decode_attention").make(**{**HEADS, "bs": bs})) <= 1.0
