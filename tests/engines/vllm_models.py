"""The models of vLLM's tests, as folders: SmolLM2 and tiny random ones; and what transformers says of them."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from engines import tiny

import hal
from hal import _env

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

# vLLM's own CPU attention, which some are compared with, takes heads of 32 and more.
HEADS = {"head_dim": 32, "hidden_size": 128}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("Llama", HEADS),
    "qwen3-qk-norm": ("Qwen3", HEADS),
    "gemma2-window-cap": (
        "Gemma2",
        {
            **HEADS,
            "sliding_window": tiny.WINDOW,
            "attn_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "stablelm-partial-rotary": ("StableLm", {"hidden_size": 128, "partial_rotary_factor": 0.25}),
    "gptj-interleaved-rotary": (
        "GPTJ",
        {"n_embd": 128, "n_layer": 2, "n_head": 4, "rotary_dim": 16, "n_positions": 256, "n_inner": 96},
    ),
    "gpt-oss-sinks": (
        "GptOss",
        {**HEADS, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": tiny.WINDOW},
    ),
    "deepseek-v2-mla": tiny.SHAPES["deepseek-v2"],
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom-alibi": ("Bloom", {"n_head": 4, "hidden_size": 128, "n_layer": 2})
}
STOCK = [s for s in SHAPES if "mla" not in s]
"""Those that stock vLLM runs on a CPU: its latent attention is for rows of 576 alone."""


@functools.cache
def folder() -> Path:
    path = tempfile.mkdtemp(prefix="hal-vllm-tests-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


@functools.cache
def tiny_model(shape: str) -> Path:
    import transformers

    family, changed = {**tiny.SHAPES, **SHAPES, **REFUSED}[shape]
    given = {**tiny.COMMON, **changed}
    if family == "GPTJ":
        names = ("vocab_size", "initializer_range", "eos_token_id", "tie_word_embeddings")
        given = {**{n: tiny.COMMON[n] for n in names}, **changed}
    torch.manual_seed(1)
    made = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**given))
    path = folder() / shape
    made.float().save_pretrained(path)
    return path


def cut_smollm2(layers: int) -> Path:
    """The first layers of it. Kept too."""
    import transformers

    whole = smollm2()
    path = whole.with_name(f"{whole.name}-{layers}-layers")
    if not (path / "config.json").exists():
        made = path.with_name(f"{path.name}.{os.getpid()}")
        transformers.LlamaForCausalLM.from_pretrained(
            whole, num_hidden_layers=layers, dtype=torch.float32
        ).save_pretrained(made)
        os.replace(made, path)
    return path


def smollm2() -> Path:
    """SmolLM2-135M in float32, as transformers saves a model. Kept between runs: it takes a minute."""
    path = Path(_env.cache_dir()) / "models" / f"smollm2-{hal.__version__}"
    if (path / "config.json").exists():
        return path
    import transformers

    from hal.demo import weights

    loaded = weights.load(False, torch.float32, torch.device("cpu"))
    # Fresh: one that came from a GGUF file is taken for quantized, and not saved.
    config = loaded.model.config.to_dict()
    config.pop("quantization_config", None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).float()
    model.load_state_dict(loaded.model.state_dict())
    made = path.with_name(f"{path.name}.{os.getpid()}")
    model.save_pretrained(made)
    file = weights._file()
    assert file is not None
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(made)
    (made / "chats.json").write_text(json.dumps([loaded.encode(text) for text in CHATS]))
    try:
        made.rename(path)
    except OSError:  # another process was quicker
        shutil.rmtree(made)
        assert (path / "config.json").exists()
    return path


CHATS = (
    "What is the capital of France?",
    "Count from one to ten.",
    "Why is the sky blue?",
    "Name three primary colours.",
    "Write one sentence about a cat that sleeps on a warm windowsill all afternoon.",
    "Two plus two is",
    "Hello!",
    "Explain in simple words what a key-value cache is and why a language model needs one when it writes.",
)


def chats() -> list[list[int]]:
    """Eight prompts of SmolLM2, as tokens."""
    return json.loads((smollm2() / "chats.json").read_text())


@functools.cache
def _model(path: str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def generate(path: str, prompts: list[list[int]], new: int) -> list[list[int]]:
    """transformers' own greedy tokens, each prompt alone."""
    model = _model(path)
    torch.set_num_threads(1)  # engines run beside it
    return [
        model.generate(
            torch.tensor([p]),
            attention_mask=torch.ones(1, len(p), dtype=torch.long),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )[0, len(p) :].tolist()
        for p in prompts
    ]
