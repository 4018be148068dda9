"""What hal's ops lack, said at start by an `EngineError`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hal.engines import ENGINES, EngineError
from hal.engines.sglang import apart

SETTINGS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("speculative_algorithm", (None,), "speculative decoding"),
    ("hicache_storage_backend", (None,), "storage behind HiCache"),
    ("enable_hisparse", (False,), "HiSparse"),
    ("enable_pdmux", (False,), "PD multiplexing"),
    ("dllm_algorithm", (None,), "diffusion language models"),
    ("enable_page_major_kv_layout", (False,), "page-major caches"),
    ("enable_unified_memory", (False,), "unified memory"),
    ("dcp_size", (1,), "decode context parallelism"),
    ("attn_cp_size", (1,), "context parallelism"),
    ("enable_two_batch_overlap", (False,), "two-batch overlap"),
    ("kv_cache_dtype", ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"), "the KV cache's dtype"),
)
"""A field of SGLang's `ServerArgs`, the values that hal takes, and what another one asks for."""


def refusal(reasons: Sequence[str]) -> EngineError:
    return EngineError(
        f"hal: sglang can't run this on hal: {'; '.join(reasons)} — or run it without hal: {ENGINES['sglang'].off()}"
    )


def check_machine() -> None:
    """Raises:
    EngineError: this is no machine for the platform `hal_cpu`.
    """
    if torch.cuda.is_available() or torch.xpu.is_available() or hasattr(torch, "npu"):
        raise refusal(["a machine with an accelerator: the adapter was run on CPUs alone so far"])


def of_settings(args: Any) -> list[str]:
    """Reasons against SGLang's settings, whatever the model."""
    reasons = []
    for field, taken, what in SETTINGS:
        value = getattr(args, field)
        if value not in taken:
            reasons.append(f"{what} (--{field.replace('_', '-')} {value})")
    return reasons + apart.of_settings(args)


def of_model(model: torch.nn.Module) -> list[str]:
    """Reasons against a model: what its layers of attention ask for."""
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    reasons: dict[str, None] = {}
    for layer in model.modules():
        if not isinstance(layer, RadixAttention):
            continue
        for found, why in (
            (layer.attn_type is not AttentionType.DECODER, f"attention of the kind {layer.attn_type.value}"),
            (layer.is_cross_attention, "cross-attention"),
            (layer.use_irope, "chunked attention (iRoPE)"),
            (layer.xai_temperature_len > 0, "attention temperatures"),
            (bool(layer.logit_cap) and layer.logit_capping_method != "tanh", "a logit cap that is not tanh"),
            (layer.pos_encoding_mode != "NONE", f"position encoding {layer.pos_encoding_mode} in attention"),
        ):
            if found:
                reasons[why] = None
    if any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters()):
        reasons["attention sinks"] = None
    return list(reasons)
