"""`HAL_ENGINES=vllm`: the whole adapter. Every attention that vLLM may choose is hal's, and so is rotary embedding."""

from __future__ import annotations

from hal.engines import require
from hal.engines.vllm import ATTENTION, HERE, MLA


def on() -> None:
    """Registers all of it, or nothing.

    Raises:
        EngineError: the installed vLLM is not one that was tested, or a seam is not as it was.
    """
    require("vllm")
    from hal.engines.vllm import apart, platform, rotary

    classes = rotary.classes()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    members = AttentionBackendEnum.__members__
    for names, path in ((ATTENTION, "attention.HalAttentionBackend"), (MLA, "mla.HalMLABackend")):
        for name in names:
            if name in members:
                register_backend(members[name], f"{HERE}.{path}")
    rotary.register(classes)
    apart.on()
    platform.on()
