"""Tiny models for speculative decoding: a target of one layer, and EAGLE heads that mostly say what it will.

A head here is the target's own layer, so its drafts miss the request's first token alone: often taken, not always.
For that the target's embeddings have a root mean square of 1, as what normalizes them is not in an EAGLE head, and all
weights of its norms are 1, as a new model's are.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from engines import tiny, vllm_models

SKIPPED = 49
"""An EAGLE-3 head has a vocabulary of its own: the target's without its first tokens."""


@functools.cache
def target() -> Path:
    import transformers

    torch.manual_seed(2)
    config = transformers.LlamaConfig(**{**tiny.COMMON, **vllm_models.HEADS, "num_hidden_layers": 1})
    model = transformers.LlamaForCausalLM(config).float()
    with torch.no_grad():
        rows = model.model.embed_tokens.weight
        rows /= rows.square().mean(dim=1, keepdim=True).sqrt()
        # What an EAGLE-3 head does not add, the embedding itself, is to be little.
        model.model.layers[0].self_attn.o_proj.weight *= 8
    path = vllm_models.folder() / "eagle-target"
    model.save_pretrained(path)
    return path


def _save(name: str, architecture: str, weights: dict[str, torch.Tensor], **changed: Any) -> Path:
    from safetensors.torch import save_file

    path = vllm_models.folder() / name
    path.mkdir(exist_ok=True)
    config = json.loads((target() / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": [architecture], **changed}))
    save_file({n: w.contiguous() for n, w in weights.items()}, path / "model.safetensors", {"format": "pt"})
    return path


def _weights() -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {n.removeprefix("model."): w for n, w in load_file(target() / "model.safetensors").items()}


@functools.cache
def eagle(architecture: str = "LlamaForCausalLMEagle") -> Path:
    """A head of the first kind: it sees a token's embedding and, here unused, the target's state before it."""
    found = _weights()
    size = found["embed_tokens.weight"].shape[1]
    weights = {n: w for n, w in found.items() if n.startswith("layers.0") and "input_layernorm" not in n}
    weights["embed_tokens.weight"] = found["embed_tokens.weight"]
    weights["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    if architecture == "LlamaForCausalLMEagle":
        weights["fc.bias"] = torch.zeros(size)
    return _save(architecture, architecture, weights)


@functools.cache
def eagle3() -> Path:
    """A head of the third kind: it adds to the target's state, here of one place, what it makes of both."""
    found = _weights()
    size = found["embed_tokens.weight"].shape[1]
    weights = {}
    for name, w in found.items():
        if name.startswith("layers.0"):
            of_both = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            weights[name.replace("layers.0", "midlayer")] = torch.cat([w, 0 * w], dim=1) if of_both else w
    kept = found["lm_head.weight"][SKIPPED:]
    weights["midlayer.hidden_norm.weight"], weights["norm.weight"] = torch.ones(size), found["norm.weight"]
    weights["lm_head.weight"], weights["fc.weight"] = kept, torch.zeros(size, size)
    weights["d2t"] = torch.full((len(kept),), SKIPPED, dtype=torch.int64)
    return _save(
        "eagle3", "LlamaForCausalLMEagle3", weights, draft_vocab_size=len(kept), norm_output=True,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [-1]},
    )  # fmt: skip
