"""Tiny models for speculative decoding: a target of one layer, and an EAGLE head that mostly says what it will.

The head is the target's own layer, so its drafts miss the request's first token alone: often taken, not always. For
that the target's embeddings have a root mean square of 1, as what normalizes them is not in an EAGLE head, and all
weights of its norms are 1, as a new model's are.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from engines import tiny, vllm_models


@functools.cache
def target() -> Path:
    return _of_one_layer("Llama", vllm_models.HEADS, "eagle-target")


def _of_one_layer(family: str, changed: dict[str, Any], name: str) -> Path:
    import transformers

    torch.manual_seed(2)
    config = getattr(transformers, f"{family}Config")(**{**tiny.COMMON, **changed, "num_hidden_layers": 1})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    with torch.no_grad():
        rows = model.model.embed_tokens.weight
        rows /= rows.square().mean(dim=1, keepdim=True).sqrt().clamp(min=1e-3)  # padding's are zeros
    path = vllm_models.folder() / name
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


@functools.cache
def deepseek() -> Path:
    """A target with latent attention and experts."""
    changed = {
        **tiny.SHAPES["deepseek-v2"][1], "first_k_dense_replace": 0, "q_lora_rank": 24, "topk_method": "noaux_tc",
        "norm_topk_prob": True, "scoring_func": "sigmoid", "num_nextn_predict_layers": 1,
    }  # fmt: skip
    return _of_one_layer("DeepseekV3", changed, "mtp-target")


@functools.cache
def mtp() -> Path:
    """The layer that drafts for it: again its own, which here sees a token's embedding alone."""
    found = _weights(deepseek())
    size = found["model.embed_tokens.weight"].shape[1]
    weights = {n: w for n, w in found.items() if ".layers.0." in n}
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"model.layers.0.{name}.weight"] = torch.ones(size)
    weights["model.layers.0.eh_proj.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    return _save("mtp", deepseek(), weights, {})


def _weights(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def _save(name: str, target: Path, weights: dict[str, torch.Tensor], changed: dict[str, Any]) -> Path:
    """A draft model with its target's configuration, but for what is changed."""
    from safetensors.torch import save_file

    path = vllm_models.folder() / name
    path.mkdir(exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changed}))
    save_file({n: w.contiguous() for n, w in weights.items()}, path / "model.safetensors", {"format": "pt"})
    return path


LAYERS, WIDTH, CYCLES = 4, 64, 4


@functools.cache
def cyclic() -> Path:
    """A target whose tokens mostly follow a cycle: a token's embedding is that of the one before, rolled by one place.

    So what follows is linear in its states, and an EAGLE-3 head can say it. Its layers add noise enough to leave the
    cycle now and then, by a prompt's own tokens.
    """
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        **{**tiny.COMMON, "head_dim": 16, "num_hidden_layers": LAYERS, "vocab_size": CYCLES * WIDTH}
    )
    model = transformers.LlamaForCausalLM(config).float()
    first = torch.randn(CYCLES, WIDTH, dtype=torch.float32, device="cpu")
    rows = torch.stack([row.roll(n) for row in first for n in range(WIDTH)])
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(rows)
        following = torch.arange(CYCLES * WIDTH, device="cpu").view(CYCLES, WIDTH).roll(-1, dims=1).flatten()
        model.lm_head.weight[following] = rows
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= NOISE
            layer.mlp.down_proj.weight *= NOISE
    path = vllm_models.folder() / "cyclic-target"
    model.save_pretrained(path)
    return path


NOISE = 0.09


@functools.cache
def eagle3() -> Path:
    """Of `cyclic`: its state is rolled by one place each step. It learns a token by the target's states alone.

    A query and a key are their token's embedding, so that each token attends to itself; a value is the state, which
    the output rolls. No draft is one of every eighth token: the draft's vocabulary lacks them.
    """
    from safetensors.torch import load_file, save_file

    found = load_file(cyclic() / "model.safetensors")
    config = json.loads((cyclic() / "config.json").read_text())
    one = torch.eye(WIDTH, dtype=torch.float32, device="cpu")
    none = torch.zeros_like(one)
    known = torch.tensor([t for t in range(CYCLES * WIDTH) if t % 8 != 7], device="cpu")
    layer = {
        "self_attn.q_proj": torch.cat([8 * one, none], dim=1), "self_attn.k_proj": torch.cat([8 * one, none], dim=1),
        "self_attn.v_proj": torch.cat([none, one], dim=1), "self_attn.o_proj": 20 * one.roll(1, dims=0),
        "mlp.gate_proj": torch.zeros(8, WIDTH), "mlp.up_proj": torch.zeros(8, WIDTH), "mlp.down_proj": torch.zeros(WIDTH, 8),
        **{name: torch.ones(WIDTH) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
    }  # fmt: skip
    weights = {f"midlayer.{name}.weight": w for name, w in layer.items()}
    weights["fc.weight"] = torch.cat([one, one, one], dim=1)
    weights["norm.weight"] = torch.ones(WIDTH)
    weights["lm_head.weight"] = found["lm_head.weight"][known]
    weights["d2t"] = known - torch.arange(len(known), device="cpu")
    path = vllm_models.folder() / "eagle3"
    path.mkdir(exist_ok=True)
    changed = {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "num_key_value_heads": 4,
        "intermediate_size": 8, "draft_vocab_size": len(known), "norm_output": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps({**config, **changed}))
    save_file({n: w.contiguous() for n, w in weights.items()}, path / "model.safetensors", {"format": "pt"})
    return path
