"""The class that a name stands for, decided when vLLM asks: `Custom`, `CPU_ATTN`, `CPU_MLA`, `HalOffloadingSpec`.

vLLM resolves a registered path by ``getattr(module, name)`` while its configuration is set.
"""

from __future__ import annotations

from typing import Any

from hal.engines import EngineError, require

OFFLOADING = (">=0.26,<0.27", ">=0.32,<0.33")
"""The versions that KV offloading is tested with: vLLM calls its seam experimental."""


def __getattr__(name: str) -> Any:
    if name == "HalOffloadingSpec":
        return _offloading()
    if name not in ("Custom", "CPU_ATTN", "CPU_MLA"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    config = get_current_vllm_config()
    if name != "Custom" and config.attention_config.backend is not AttentionBackendEnum.CUSTOM:
        return resolve_obj_by_qualname(AttentionBackendEnum[name].value)
    require("vllm")
    model = config.model_config
    if model is not None and model.use_mla:
        from hal.engines.vllm.mla import HalMLABackend

        return HalMLABackend
    from hal.engines.vllm.attention import HalAttentionBackend

    return HalAttentionBackend


def _offloading() -> Any:
    """Raises:
    EngineError: a vLLM whose offloading hal was not tested with.
    """
    from hal.registry._requirements import satisfies

    version = require("vllm")
    if not any(satisfies(version, tested) for tested in OFFLOADING):
        raise EngineError(
            f"hal: vllm's KV offloading on hal is tested with vllm{' and '.join(OFFLOADING)}; this is {version} — take "
            "spec_name HalOffloadingSpec out of kv_connector_extra_config"
        )
    from hal.engines.vllm.offload import HalOffloadingSpec

    return HalOffloadingSpec
