"""Tiny models for speculative decoding: targets, and drafts that mostly say what these will.

An EAGLE head, or DeepSeek's layer for it, is the target's own and only layer, so it misses the request's first token
alone: its drafts are often taken, not always. For that the target's embeddings have a root mean square of 1, as what
normalizes them is not in an EAGLE head, and all weights of its norms are 1, as a new model's are.
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
    found = {n.removeprefix("model."): w for n, w in _weights(target()).items()}
    size = found["embed_tokens.weight"].shape[1]
    weights = {n: w for n, w in found.items() if n.startswith("layers.0") and "input_layernorm" not in n}
    weights["embed_tokens.weight"] = found["embed_tokens.weight"]
    weights["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    weights["fc.bias"] = torch.zeros(size)
    return _save("eagle", target(), weights, {"architectures": ["LlamaForCausalLMEagle"]})


@functools.cache
def deepseek() -> Path:
    """A target with latent attention and experts."""
    changed = {
        **tiny.SHAPES["deepseek-v2"][1],
        "first_k_dense_replace": 0,
        "q_lora_rank": 24,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 1,
    }
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
    save_file(
        {n: w.clone(memory_format=torch.contiguous_format) for n, w in weights.items()},
        path / "model.safetensors",
        {"format": "pt"},
    )
    return path


LAYERS, WIDTH, CYCLES, NOISE = 4, 64, 4, 0.09


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
    rows = torch.stack([row.roll(n) for row in torch.randn(CYCLES, WIDTH) for n in range(WIDTH)])
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(rows)
        following = torch.arange(CYCLES * WIDTH).view(CYCLES, WIDTH).roll(-1, dims=1).flatten()
        model.lm_head.weight[following] = rows
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= NOISE
            layer.mlp.down_proj.weight *= NOISE
    path = vllm_models.folder() / "cyclic-target"
    model.save_pretrained(path)
    return path


@functools.cache
def eagle3() -> Path:
    """Of `cyclic`: its state is rolled by one place each step. What a token was, it has of the target's states alone.

    A query and a key are their token's embedding, so that each token attends to itself; a value is the state, which
    the output rolls. The draft's vocabulary lacks every eighth token. Of another eighth one that is wrong is likelier.
    """
    one, none = torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH)
    tokens = torch.arange(CYCLES * WIDTH)
    known = tokens[tokens % 8 != 7]
    head = _weights(cyclic())["lm_head.weight"].clone()
    head[2::8] += 1.2 * head[4::8]
    layer = {
        "self_attn.q_proj": torch.cat([8 * one, none], dim=1),
        "self_attn.k_proj": torch.cat([8 * one, none], dim=1),
        "self_attn.v_proj": torch.cat([none, one], dim=1),
        "self_attn.o_proj": 20 * one.roll(1, dims=0),
        "mlp.gate_proj": none[:8],
        "mlp.up_proj": none[:8],
        "mlp.down_proj": none[:, :8],
        **{name: torch.ones(WIDTH) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
    }
    weights = {
        **{f"midlayer.{name}.weight": w for name, w in layer.items()},
        "fc.weight": torch.cat([one, one, one], dim=1),
        "norm.weight": torch.ones(WIDTH),
        "lm_head.weight": head[known],
        "d2t": known - torch.arange(len(known)),
    }
    changed = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "intermediate_size": 8,
        "draft_vocab_size": len(known),
        "norm_output": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    return _save("eagle3", cyclic(), weights, changed)
