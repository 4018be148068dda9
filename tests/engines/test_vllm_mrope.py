"""M-RoPE of vLLM's classes on hal, against the same classes without it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("vllm", reason="vLLM is not installed here")

from vllm.config import VllmConfig, set_current_vllm_config

from hal.engines.vllm import rotary

HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 32, 7
COMMON: dict[str, Any] = {"head_size": DIM, "max_position_embeddings": 64, "base": 10000.0, "dtype": torch.float32}


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("MRotaryEmbedding", {"rotary_dim": DIM, "mrope_section": [4, 6, 6]}),
        ("MRotaryEmbedding", {"rotary_dim": DIM, "mrope_section": [6, 5, 5], "mrope_interleaved": True}),
        ("MRotaryEmbedding", {"rotary_dim": 16, "mrope_section": [4, 2, 2], "is_neox_style": False}),
        ("MRotaryEmbedding", {"rotary_dim": DIM, "mrope_section": [4, 6, 6], "scaling_factor": 2.0}),
        ("MRotaryEmbeddingInterleaved", {"rotary_dim": DIM, "mrope_section": [6, 5, 5]}),
    ],
)
@pytest.mark.parametrize("axes", [3, 1])
def test_rotates_as_stock(kind: str, given: dict[str, Any], axes: int) -> None:
    if kind == "MRotaryEmbeddingInterleaved" and axes == 1:
        pytest.skip("stock has no positions without axes")
    (stock,) = (c for c in rotary.BY_AXES if c.__name__ == kind)
    with set_current_vllm_config(VllmConfig()):
        # A class that is registered stands in for stock; this one is made apart.
        ours = type("Ours", (rotary.HalMRotary, stock), {})(**{"is_neox_style": True, **COMMON, **given})
        theirs = stock(**{"is_neox_style": True, **COMMON, **given})
    g = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 64, (axes, TOKENS), generator=g)
    q, k = (torch.randn(TOKENS, n * DIM, generator=g) for n in (HEADS, KV_HEADS))
    if axes == 1:
        positions = positions[0]
    stocks_forward = theirs.forward if kind == "MRotaryEmbeddingInterleaved" else theirs.forward_native
    want = stocks_forward(positions, q.clone(), k.clone())
    assert not torch.equal(want[0], q)
    torch.testing.assert_close(ours(positions, q.clone(), k.clone()), want)
    if axes == 3:
        swapped = ours(positions.flip(0), q.clone(), k.clone())
        assert not torch.allclose(swapped[0], want[0])


def test_it_stands_in_for_stock() -> None:
    found = rotary.classes()
    assert {c.__name__ for c in rotary.BY_AXES} <= found.keys()
    assert all(issubclass(found[c.__name__], (rotary.HalMRotary, c)) for c in rotary.BY_AXES)
