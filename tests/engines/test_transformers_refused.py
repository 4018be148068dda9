"""transformers on hal: what is refused, and how it is switched on and off."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.on_transformers import NEW, OPS, batched, counting, counts, generate, padded, prompts, stock  # noqa: F401

# isort: split
import transformers
from engines import tiny

import hal
import hal.engines.transformers as on_hal
from hal.engines import EngineError, _engine
from hal.engines.transformers import paged, step

ROOT = Path(hal.__file__).parents[1]


# --- refused ----------------------------------------------------------------------------------------


def test_gradients_and_training() -> None:
    model, _ = stock("llama-gqa")
    with pytest.raises(EngineError, match=r"gradients were asked for.*no_grad.*sdpa"):
        model(**padded(prompts()))
    training = tiny.model("llama-gqa", attention_dropout=0.1).train()
    training.set_attn_implementation("hal")
    with torch.no_grad(), pytest.raises(EngineError, match=r"dropout=0.1 was asked for.*model.eval"):
        training(**padded(prompts()))


def test_masks_of_ones_own() -> None:
    model, _ = stock("llama-gqa")
    ids = torch.tensor(prompts((9,)))
    own = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    with torch.no_grad(), pytest.raises(EngineError, match=r"got a tensor \[1, 1, 9, 9\].*Masks of your own"):
        model(input_ids=ids, attention_mask=own)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with torch.no_grad(), pytest.raises(EngineError, match=r"not causal or a sliding window alone \(packed_sequence"):
        model(input_ids=ids, position_ids=packed, use_cache=False)


def test_attention_that_is_not_causal() -> None:
    model = tiny.model("llama-gqa", is_causal=False)
    model.set_attn_implementation("hal")
    with torch.no_grad(), pytest.raises(EngineError, match="attention that is not causal was asked for"):
        model(**padded(prompts()))


def test_attention_weights() -> None:
    llama, _ = stock("llama-gqa")
    # transformers refuses these by itself where it knows the implementation, and ours must not pass over them.
    with torch.no_grad(), pytest.raises((EngineError, ValueError), match="output_attentions"):
        on_hal.attention_forward(
            llama.model.layers[0].self_attn, *torch.zeros(3, 1, 4, 2, 16), None, output_attentions=True
        )


def test_paged_cache_of_another_head_dim() -> None:
    model, _ = stock("deepseek-v2")
    with pytest.raises(
        AssertionError, match=r"its paged cache has heads of 8; this model's keys have 24 and its values 12"
    ):
        batched(model, prompts())


def test_models_with_attention_of_their_own() -> None:
    """GPT-J does not ask AttentionInterface: it must not go on as if nothing had been said."""
    config = transformers.GPTJConfig(
        vocab_size=199, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    with pytest.raises((EngineError, KeyError, ValueError), match="hal"):
        transformers.GPTJForCausalLM._from_config(config, attn_implementation="hal")
    with pytest.raises(EngineError, match=r"works on its attention mask itself"):
        on_hal.step_mask(1, 4, 4) + torch.zeros(1, 1, 4, 4)


def test_patterns_of_masks() -> None:
    from transformers import masking_utils as m

    assert step.pattern(m.causal_mask_function) == (-1, "")
    assert step.pattern(m.sliding_window_causal_mask_function(6)) == (5, ""), (
        "transformers' window counts the token itself"
    )
    assert "not causal" in step.pattern(m.sliding_window_overlay(6))[1]
    chunked = m.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    for odd in (chunked, m.or_masks(m.causal_mask_function, m.bidirectional_mask_function), lambda b, h, q, k: True):
        assert "not causal or a sliding window alone" in step.pattern(odd)[1]


# --- switched on and off ----------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["5.22.2", "5.24.0", "6.0.0"])
def test_version_outside_the_tested_range(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(_engine.metadata, "version", lambda name: version)
    with pytest.raises(EngineError, match=rf"transformers {version} is installed; hal's adapter is tested with"):
        importlib.reload(on_hal)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"path": "ContinuousBatchingManager.gone"}, "there is no .*gone"),
        ({"signature": ("self", "model")}, "has the parameters self, model, auto_switch_to_flash; in 5.23.0"),
    ],
)
def test_patch_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], says: str) -> None:
    """Nothing is applied, not even what fits."""
    manager = transformers.generation.continuous_batching.ContinuousBatchingManager
    before = manager.switch_to_cb_friendly_attn
    fits = paged.PATCHES[0]
    monkeypatch.setattr(paged, "PATCHES", (fits, replace(fits, **change)))
    with pytest.raises(EngineError, match=says):
        paged.apply_patches()
    assert manager.switch_to_cb_friendly_attn is before


def test_old_name_of_continuous_batching() -> None:
    model, tokens = stock("llama-gqa")
    model.set_attn_implementation("eager")
    with pytest.warns(FutureWarning, match="paged"):
        model.set_attn_implementation("paged|hal")
    assert batched(model, prompts()) == tokens
    assert counts()["kv_write"] > 0


UNTOUCHED = """
import sys, hal, transformers
from transformers.generation.continuous_batching import ContinuousBatchingManager
assert "hal" not in transformers.AttentionInterface._global_mapping
assert "hal" not in transformers.AttentionMaskInterface._global_mapping
assert not hasattr(ContinuousBatchingManager.switch_to_cb_friendly_attn, "_hal_original")
assert not [m for m in sys.modules if m.startswith(("hal.engines", "hal.backends", "hal.registry"))]
import hal.engines.transformers
assert transformers.AttentionInterface._global_mapping["hal"] is hal.engines.transformers.attention_forward
"""


def test_untouched_until_imported() -> None:
    env = {**os.environ, "HAL_TRACE": "", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", UNTOUCHED], check=True, env=env, timeout=600)


def test_explain_names_the_layer() -> None:
    model, _ = stock("llama-gqa")
    told: list[str] = []

    def listen(*args: Any, **kwargs: Any) -> Any:
        told.append(str(hal.explain("decode_attention", *args, **kwargs)))
        return real(*args, **kwargs)

    real = hal.decode_attention
    with pytest.MonkeyPatch.context() as m:
        m.setattr(hal, "decode_attention", listen)
        generate(model, prompts(), 2)
    assert [t.splitlines()[-1] for t in told] == [
        "  asked by transformers: layer 0 (LlamaAttention)",
        "  asked by transformers: layer 1 (LlamaAttention)",
    ]
