"""What hal's ops lack, said at start by an `EngineError`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hal.engines import ENGINES, EngineError
from hal.engines.sglang import apart, switched_on

SETTINGS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
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

ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
"""SGLang's algorithms of speculative decoding that hal takes."""

SPECULATIVE: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("enable_hierarchical_cache", (False,), "HiCache"),
    ("disaggregation_mode", ("null",), "disaggregated prefill and decode"),
    ("enable_multi_layer_eagle", (False,), "EAGLE of several layers"),
    ("speculative_adaptive", (False,), "adaptive speculation"),
    ("speculative_use_rejection_sampling", (False,), "rejection sampling by the draft's probabilities"),
    ("speculative_use_block_verification", (False,), "block verification"),
    ("speculative_draft_attention_backend", (None, "hal"), "the draft's own attention"),
    ("speculative_draft_window_size", (None,), "a window of the draft's own"),
    ("speculative_ngram_match_type", ("BFS",), "n-grams by frequency"),
    ("speculative_ngram_external_corpus_path", (None,), "n-grams from outside"),
    ("speculative_ngram_external_sam_budget", (0,), "n-grams from outside"),
)
"""The same of settings beside speculative decoding."""


NPU: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("tp_size", (1,), "tensor parallelism"),
    ("pp_size", (1,), "pipeline parallelism"),
    ("dp_size", (1,), "data parallelism"),
    ("ep_size", (1,), "expert parallelism"),
    ("speculative_algorithm", (None,), "speculative decoding"),
    ("enable_hierarchical_cache", (False,), "HiCache"),
    ("disaggregation_mode", ("null",), "disaggregated prefill and decode"),
    ("quantization", (None,), "quantized weights"),
    ("kv_cache_dtype", ("auto",), "the KV cache's dtype"),
    ("enable_lora", (None, False), "LoRA"),
    ("lora_paths", (None,), "LoRA"),
    ("enable_mixed_chunk", (False,), "mixed steps"),
    ("enable_torch_compile", (False,), "torch.compile"),
    ("enable_memory_saver", (False,), "the memory saver"),
    ("cpu_offload_gb", (0,), "weights in host memory"),
    ("model_impl", ("auto", "sglang"), "another implementation of the model"),
)
"""What else the platform `hal_npu` does not take: nothing of it has run, on the emulated NPU neither."""

NPU_MODELS = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""SGLang's models that have run there."""


def refusal(reasons: Sequence[str]) -> EngineError:
    return EngineError(
        f"hal: sglang can't run this on hal: {'; '.join(reasons)} — or run it without hal: {ENGINES['sglang'].off()}"
    )


def has_chains() -> bool:
    """Can this SGLang speculate out of tree? 0.5.17 keeps to its own kernels there."""
    from sglang.srt.platforms.interface import SRTPlatform

    return hasattr(SRTPlatform, "get_speculative_cache_locs_fn")


def has_npu() -> bool:
    """Is torch_npu loaded? SGLang takes its own path for NPUs then, whatever platform it has."""
    return hasattr(torch, "npu")


def check_machine(npu: bool) -> None:
    """Raises:
    EngineError: this is no machine for the platform `hal_cpu`, or `hal_npu`.
    """
    if npu:
        if not has_npu():
            raise refusal(["the platform hal_npu: torch_npu is not loaded"])
        if not has_chains():
            raise refusal(["the platform hal_npu: this SGLang has no platform for NPUs to build on, 0.5.23 has"])
        return
    if torch.cuda.is_available() or torch.xpu.is_available() or has_npu():
        raise refusal(
            [
                "the platform hal_cpu beside an accelerator: on CUDA HAL_ENGINES has slots, rotation and HiCache, and "
                "--attention-backend hal attention"
            ]
        )


def of_settings(args: Any) -> list[str]:
    """Reasons against SGLang's settings, whatever the model."""
    reasons = _unlike(SETTINGS, args) + apart.of_settings(args)
    algorithm = args.speculative_algorithm
    if algorithm is None:
        return reasons
    asked = f"speculative decoding (--speculative-algorithm {algorithm})"
    if switched_on() and not has_chains():
        return [*reasons, f"{asked}: on a CPU this SGLang has it by its own kernels alone, 0.5.23 on hal too"]
    if algorithm.upper() not in ALGORITHMS:
        return [*reasons, asked]
    reasons += [f"{asked} with {why}" for why in _unlike(SPECULATIVE, args)]
    return reasons if switched_on() else reasons + _of_own_platform(asked, args)


def _of_own_platform(asked: str, args: Any) -> list[str]:
    """Of drafts, where hal has the attention alone."""
    if args.device != "cuda":
        return [f"{asked} by hal's attention alone, but on CUDA (HAL_ENGINES=sglang has it on a CPU)"]
    reasons = [f"{asked} beside the attention {name}" for name in {*args.get_attention_backends()} - {"hal"}]
    if has_trees(args):
        from sglang.srt.environ import envs

        if envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get():
            reasons.append(f"{asked} in trees with SGLANG_ENABLE_OVERLAP_PLAN_STREAM")
    return reasons


def of_hicache(args: Any) -> list[str]:
    """Reasons against HiCache's settings beside SGLang's own platform for CUDA."""
    if not args.enable_hierarchical_cache and not getattr(args, "enable_hisparse", False):
        return []
    unlike = ("enable_hisparse", "enable_page_major_kv_layout", "enable_unified_memory", "kv_cache_dtype")
    return _unlike([s for s in SETTINGS if s[0] in unlike], args)


def of_npu(args: Any) -> list[str]:
    """Reasons against SGLang's settings on the platform `hal_npu`, beside those of `of_settings`."""
    return [f"on an NPU {why}" for why in _unlike(NPU, args)]


def of_npu_model(model: torch.nn.Module) -> list[str]:
    name = type(model).__name__
    return [] if name in NPU_MODELS else [f"on an NPU the model {name}: {', '.join(NPU_MODELS)} have run there"]


def has_trees(args: Any) -> bool:
    """Do drafts have alternatives?"""
    if args.speculative_algorithm is None:
        return False
    ngram = args.speculative_algorithm.upper() == "NGRAM"
    breadth = args.speculative_ngram_max_bfs_breadth if ngram else args.speculative_eagle_topk
    return breadth is not None and breadth > 1


def _unlike(settings: Sequence[tuple[str, tuple[Any, ...], str]], args: Any) -> list[str]:
    return [
        f"{what} (--{field.replace('_', '-')} {getattr(args, field)})"
        for field, taken, what in settings  # 0.5.17 has not all of them
        if getattr(args, field, taken[0]) not in taken
    ]


def of_model(model: torch.nn.Module, trees: bool = False) -> list[str]:
    """Reasons against a model: what its layers of attention ask for, verifying trees of drafts or not."""
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    reasons: dict[str, None] = {}
    for layer in model.modules():
        if not isinstance(layer, RadixAttention):
            continue
        for found, why in (
            (layer.attn_type is not AttentionType.DECODER, f"attention of the kind {layer.attn_type.value}"),
            (layer.is_cross_attention, "cross-attention"),
            (trees and layer.sliding_window_size >= 0, "a sliding window beside trees of drafts"),
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
