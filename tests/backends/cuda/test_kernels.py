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
