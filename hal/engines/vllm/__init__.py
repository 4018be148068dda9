"""vLLM on hal: what its plugin loader calls in every process. Names classes by path; imports none of hal's kernels."""

from __future__ import annotations

from hal.engines import asked

HERE = "hal.engines.vllm"
SPEC = "HalOffloadingSpec"
"""hal's name among vLLM's specs of KV offloading."""

ATTENTION = (
    "CPU_ATTN",
    "FLASH_ATTN",
    "FLASHINFER",
    "TRITON_ATTN",
    "TRITON_FLASH_ATTN",
    "TRITON_FLASHINFER",
    "FLEX_ATTENTION",
    "FLASH_ATTN_DIFFKV",
    "TRITON_ATTN_DIFFKV",
    "TURBOQUANT",
    "ULTRAQUANT",
    "B12X",
)
"""vLLM's names that hal stands in for where `HAL_ENGINES` asks: every one that a platform may choose by itself."""

MLA = (
    "CPU_MLA",
    "AMX_MLA",
    "FLASH_ATTN_MLA",
    "FLASHMLA",
    "FLASHINFER_MLA",
    "TRITON_MLA",
    "CUTLASS_MLA",
    "TOKENSPEED_MLA",
    "FLASH_ATTN_MLA_SPARSE",
    "FLASHMLA_SPARSE",
    "FLASHINFER_MLA_SPARSE",
    "FLASHINFER_MLA_SPARSE_SM90",
    "FLASHINFER_MLA_SPARSE_SM120",
)
"""Likewise for latent attention. hal's is not sparse: a model that needs that kind is refused, with that reason."""


def register() -> None:
    """The entry point of `vllm.general_plugins`. vLLM may call it more than once in a process.

    Raises:
        EngineError: ``HAL_ENGINES`` names vllm, and this version is not one that was tested.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    # Chosen by vLLM's own flag, --attention-backend CUSTOM. A path: nothing is imported until then.
    register_backend(AttentionBackendEnum.CUSTOM, f"{HERE}.choose.Custom")
    # Chosen by spec_name in --kv-transfer-config.
    if SPEC not in OffloadingSpecFactory._registry:
        OffloadingSpecFactory.register_spec(SPEC, f"{HERE}.choose", SPEC)
    if asked("vllm"):
        from hal.engines.vllm import switch

        switch.on()
    elif current_platform.is_cpu():
        # CpuPlatform hears no flag: these two look at it, and are vLLM's own classes unless it names us.
        for name in ("CPU_ATTN", "CPU_MLA"):
            member = AttentionBackendEnum.__members__.get(name)
            if member is not None:
                register_backend(member, f"{HERE}.choose.{name}")
