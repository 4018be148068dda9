"""Tiny models for speculative decoding: a target of one layer, and an EAGLE head that mostly says what it will.

The head is the target's own layer, so its drafts miss the request's first token alone: often taken, not always. For
that the target's embeddings have a root mean square of 1, as what normalizes them is not in an EAGLE head, and all
weights of its norms are 1, as a new model's are.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
from engines import tiny, vllm_models


@functools.cache
def target() -> Path:
    import transformers

    torch.manual_seed(2)
    config = transformers.LlamaConfig(**{**tiny.COMMON, **vllm_models.HEADS, "num_hidden_layers": 1})
    model = transformers.LlamaForCausalLM(config).float()
    with torch.no_grad():
        rows = model.model.embed_tokens.weight
        rows /= rows.square().mean(dim=1, keepdim=True).sqrt()
    path = vllm_models.folder() / "eagle-target"
    model.save_pretrained(path)
    return path


@functools.cache
def eagle() -> Path:
    """It sees a token's embedding and, here unused, the target's state before it."""
    from safetensors.torch import load_file, save_file

    found = {n.removeprefix("model."): w for n, w in load_file(target() / "model.safetensors").items()}
    size = found["embed_tokens.weight"].shape[1]
    weights = {n: w for n, w in found.items() if n.startswith("layers.0") and "input_layernorm" not in n}
    weights["embed_tokens.weight"] = found["embed_tokens.weight"]
    weights["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    weights["fc.bias"] = torch.zeros(size)
    path = vllm_models.folder() / "eagle"
    path.mkdir(exist_ok=True)
    config = json.loads((target() / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLMEagle"]}))
    save_file({n: w.contiguous() for n, w in weights.items()}, path / "model.safetensors", {"format": "pt"})
    return path
