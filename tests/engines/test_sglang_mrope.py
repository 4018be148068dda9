"""M-RoPE of SGLang's classes on hal, against their own plain torch, and what graphs read: in a process with hal on."""

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
    assert "graphs read what was written" in done.stdout, done.stderr


def main() -> None:
    from hal.engines.sglang import vision

    vision.declare_operators()
    from sglang.srt.layers.rotary_embedding import base, mrope

    # 0.5.17 asks its published settings for one of them.
    base.get_exec = mrope.get_exec = lambda: SimpleNamespace(deterministic=SimpleNamespace(rl_on_policy_target=None))
    from hal.engines.sglang import rotary

    assert rotary._plain(mrope.YaRNScalingMRotaryEmbedding)
    common = {
        "head_size": DIM, "rotary_dim": DIM, "max_position_embeddings": 64, "base": 10000, "is_neox_style": True,
        "dtype": torch.float32,
    }  # fmt: skip
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


def graphs() -> None:
    """A capture's tensors, with the lists of each later step in them: no new ones, as a replay could not see them."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    import hal
    from hal.engines import EngineError
    from hal.engines.sglang.attention import HalAttention

    made = HalAttention.__new__(HalAttention)
    made.device, made.index = torch.device("cpu"), torch.int32
    made.req_to_token = torch.arange(6 * 40, dtype=torch.int32).view(6, 40)
    made.kv_indices = torch.empty(0, dtype=torch.int32)
    made.init_cuda_graph_state(4, 4)

    def batch(rows: list[int], lens: list[int]) -> Any:
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE, batch_size=len(rows), req_pool_indices=torch.tensor(rows),
            seq_lens=torch.tensor(lens), seq_lens_cpu=torch.tensor(lens),
        )  # fmt: skip

    made.init_forward_metadata_out_graph(batch([0, 0, 0], [1, 1, 1]), in_capture=True)
    captured = made.forward_metadata
    assert captured.qo_indptr is None
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 2, 8, generator=g) for n in (3, 240, 240))
    for rows, lens in (([5, 1, 0], [40, 3, 1]), ([2, 4, 3], [7, 40, 40]), ([1, 1, 0], [1, 1, 1])):
        given = batch(rows, lens)
        made.init_forward_metadata_out_graph(given)
        assert made.forward_metadata.kv_indptr.data_ptr() == captured.kv_indptr.data_ptr()
        replayed, eager = torch.empty_like(q), torch.empty_like(q)
        hal.decode_attention(q, k, v, captured.kv_indptr, captured.kv_indices, replayed, scale=0.3)
        made.init_forward_metadata(given)
        step = made.forward_metadata
        hal.decode_attention(q, k, v, step.kv_indptr, step.kv_indices, eager, scale=0.3)
        assert torch.equal(replayed, eager)
    given.forward_mode = ForwardMode.EXTEND
    with pytest.raises(EngineError, match="graphs of prompts"):
        made.init_forward_metadata_out_graph(given, in_capture=True)
    print("graphs read what was written")


if __name__ == "__main__":
    main()
    graphs()
