"""M-RoPE of SGLang's classes on hal, against their own plain torch: in a process with hal on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 32, 7
GIVEN: tuple[dict[str, Any], ...] = (
    {"mrope_section": [4, 6, 6]},
    {"mrope_section": [6, 5, 5], "mrope_interleaved": True},
    {"mrope_section": [4, 6, 6], "is_neox_style": False},
)


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here")
def test_rotates_as_stock() -> None:
    env = {**os.environ, "HAL_ENGINES": "sglang", "HAL_BACKEND": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.count("as stock") == 2 * len(GIVEN), done.stdout + done.stderr


def main() -> None:
    from hal.engines.sglang import vision

    vision.declare_operators()
    from sglang.srt.layers.rotary_embedding import base, mrope

    # 0.5.17 asks its published settings for one of them.
    base.get_exec = mrope.get_exec = lambda: SimpleNamespace(deterministic=SimpleNamespace(rl_on_policy_target=None))
    from hal.engines.sglang import rotary

    assert rotary._plain(mrope.YaRNScalingMRotaryEmbedding)
    common = {
        "head_size": DIM,
        "rotary_dim": DIM,
        "max_position_embeddings": 64,
        "base": 10000,
        "is_neox_style": True,
        "dtype": torch.float32,
    }
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(TOKENS, n * DIM, generator=g) for n in (HEADS, KV_HEADS))
    for given in GIVEN:
        made = mrope.MRotaryEmbedding(**{**common, **given})
        assert rotary._plain(type(made))
        positions = torch.randint(0, 64, (3, TOKENS), generator=g)
        for at in (positions, positions[0]):
            want = made.forward_native(at, q.clone(), k.clone())
            torch.testing.assert_close(rotary.forward(made, at, q.clone(), k.clone()), want)
            print("as stock")
        swapped = rotary.forward(made, positions.flip(0), q.clone(), k.clone())
        assert not torch.allclose(swapped[0], made.forward_native(positions, q, k)[0])


if __name__ == "__main__":
    main()
