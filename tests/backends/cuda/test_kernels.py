"""Sizes at which this backend's launches change, which no sample has. Under TRITON_INTERPRET=1 or on a CUDA device."""

import os

import pytest
import torch

from hal import ops
from hal._remote.target import DirectTarget
from hal.conformance.execute import execute

CUDA = torch.cuda.is_available()


@pytest.mark.skipif(
    not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA device or TRITON_INTERPRET=1"
)
@pytest.mark.parametrize("bs", [256, 257, 512, 513, 2000] if CUDA or os.environ.get("CI_ALL") else [257, 513])
def test_assign_at_the_sizes_where_its_launch_changes(bs: int) -> None:
    from hal.backends.cuda.assign_extend_cache_locs import assign_extend_cache_locs as fn

    spec = ops.get_spec("assign_extend_cache_locs")
    target = DirectTarget.of(spec.name, fn, "cuda" if CUDA else "cpu")
    execute(spec, spec.make(bs=bs, longest=9, seed=bs), target)


HOPPER = CUDA and torch.cuda.get_device_capability()[0] == 9 and os.environ.get("TRITON_INTERPRET") != "1"
HEADS = {"head_dim": 128, "kv_heads": 4, "q_heads": 32, "longest": 900, "slots": 4800, "dtype": "bf16"}


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({"bs": 2}, 128),
        ({"bs": 3}, 64),
        ({"bs": 2, "kv_heads": 8}, 64),
        ({"bs": 8, "kv_heads": 1, "q_heads": 16}, 128),
        ({"bs": 1, "kv_heads": 1}, 64),
        ({"bs": 1, "head_dim": 64}, 64),
        ({"bs": 1, "kv_heads": 16}, 64),
    ],
    ids=str,
)
def test_decode_attention_s_tile_for_small_batches_on_hopper(change: dict[str, int], keys: int) -> None:
    from hal.backends.cuda import decode_attention, inspect

    for arch in (90, 80):
        decode_attention._plans.clear()
        with inspect.record(arch) as calls:
            inspect.launcher("decode_attention")(**ops.get_spec("decode_attention").make(**{**HEADS, **change}))
        # What another batch would start is compiled too; first, at a first call.
        assert calls[-2][0].static["N"] == (keys if arch == 90 else 64)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("bs", [1, 2, 3])
def test_decode_attention_is_right_on_both_sides_of_that_size(bs: int) -> None:
    from hal.bench.judge import verdict

    assert verdict("decode_attention", ops.get_spec("decode_attention").make(**{**HEADS, "bs": bs})) <= 1.0
