"""What hal's ops lack, said at start: as reasons to vLLM's selector, as an `EngineError` where vLLM has no selector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hal.engines import ENGINES, EngineError, asked

KV_DTYPES = ["auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]


def refusal(reasons: Sequence[str]) -> EngineError:
    return EngineError(
        f"hal: vllm can't run this model on hal: {'; '.join(reasons)} — or run it without hal: {ENGINES['vllm'].off()}"
    )


def of_layer(
    *, kv_cache_dtype: str, attn_type: str, alibi_slopes: Any = None, sinks: Any = None, **others: Any
) -> list[str]:
    """Reasons against a layer, by the arguments that its implementation is made with.

    `others`: arguments that only other implementations know; one that is set is one more reason.
    """
    from vllm.v1.attention.backend import AttentionType

    reasons = [f"{name} is set, which hal's attention does not take" for name, value in others.items() if value]
    if attn_type != AttentionType.DECODER:
        reasons.append(f"attention of the kind {getattr(attn_type, 'value', attn_type)}: hal has decoders' alone")
    if alibi_slopes is not None:
        reasons.append("ALiBi")
    if sinks is not None:
        reasons.append("attention sinks")
    if kv_cache_dtype not in KV_DTYPES:
        reasons.append(f"a KV cache of dtype {kv_cache_dtype}: hal has {', '.join(KV_DTYPES)}")
    return reasons


def of_config(config: Any) -> list[str]:
    """Reasons against a configuration, whatever the model."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    parallel, chosen = config.parallel_config, config.attention_config.backend
    reasons = []
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        reasons.append("decode context parallelism")
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        reasons.append("prefill context parallelism")
    if asked("vllm") and chosen not in (None, AttentionBackendEnum.CUSTOM, AttentionBackendEnum.CPU_ATTN):
        reasons.append(f"--attention-backend {chosen.name} asks for another attention than HAL_ENGINES does")
    return reasons


def check_config(config: Any, reasons: Sequence[str] = ()) -> None:
    """Raises:
    EngineError: hal lacks what the configuration asks for; or there are `reasons` already.
    """
    reasons = [*reasons, *of_config(config)]
    if reasons:
        raise refusal(reasons)


def check_layers(context: dict[str, Any]) -> None:
    """Where the whole adapter is on, no layer may have another attention: a model may name one by itself.

    Raises:
        EngineError: one has.
    """
    if not asked("vllm"):
        return
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    for name, found in context.items():
        if isinstance(found, Attention | MLAAttention) and not hasattr(found.impl, "bind"):
            kind = type(found.impl).__name__
            raise refusal([f"the model gives its layer {name} an attention of its own choice, {kind}"])
