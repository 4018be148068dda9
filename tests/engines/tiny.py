"""Tiny random models of transformers, a config for each shape that hal's adapter claims."""

from __future__ import annotations

from typing import Any

import torch

COMMON = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
WINDOW = 6
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("Llama", {"head_dim": 16}),
    "llama-mqa": ("Llama", {"head_dim": 16, "num_key_value_heads": 1}),
    "qwen3-qk-norm": ("Qwen3", {"head_dim": 16}),
    "mistral-window": ("Mistral", {"head_dim": 16, "sliding_window": WINDOW}),
    "gemma2-window-cap": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3-window": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi-partial-rotary": ("Phi", {"partial_rotary_factor": 0.5}),
    "glm-interleaved-partial-rotary": ("Glm", {"head_dim": 16}),
    "cohere-interleaved-rotary": ("Cohere", {}),
    "deepseek-v2": (
        "DeepseekV2",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "moe_layer_freq": 1,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "gpt-oss-sinks": (
        "GptOss",
        {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": WINDOW},
    ),
}


def config(shape: str) -> Any:
    """The configuration of a shape."""
    import transformers

    family, changed = SHAPES[shape]
    name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    return getattr(transformers, name)(**{**COMMON, **changed})


def model(shape: str, **changed: Any) -> Any:
    """The model, seeded, in float32."""
    import transformers

    torch.manual_seed(1)
    made = config(shape)
    for name, value in changed.items():
        setattr(made, name, value)
    return getattr(transformers, f"{SHAPES[shape][0]}ForCausalLM")(made).eval()
