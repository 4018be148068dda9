"""SGLang on hal: what its plugin loader calls in every process. Imports none of hal's kernels.

SGLang logs what a plugin raises and goes on without it. So nothing is raised here: an obstacle becomes a platform that
can't be made, or is told by the platform and the attention backend (`seams.check`), whose errors do end the start.
"""

from __future__ import annotations

import os
import pkgutil
from importlib.util import find_spec

from hal._errors import HalError
from hal.engines import asked, require

HERE = "hal.engines.sglang"
PLATFORM, NPU = PLATFORMS = "hal_cpu", "hal_npu"

obstacle: HalError | None = None
"""What is in the way of the platform; its class, `refused.Refused`, raises it."""


def switched_on() -> bool:
    """Is the whole adapter asked for: by ``HAL_ENGINES``, or by one of `PLATFORMS` in SGLang's ``SGLANG_PLATFORM``?"""
    return os.environ.get("SGLANG_PLATFORM") in PLATFORMS or (asked("sglang") and not beside_cuda())


def beside_cuda() -> bool:
    """Does ``HAL_ENGINES`` ask for what goes with SGLang's own platform for CUDA: `seams.BESIDE_CUDA`?"""
    if not asked("sglang"):
        return False
    import torch

    return torch.cuda.is_available() and os.environ.get("SGLANG_PLATFORM") not in PLATFORMS


def platform() -> str | None:
    """The entry point `hal_cpu` of `sglang.srt.platforms`: the path of its class, or None where it is not asked for."""
    return _platform(PLATFORM, "platform:HalCPU")


def platform_npu() -> str | None:
    """The entry point `hal_npu`, likewise. On a machine without torch_npu it is asked for by SGLANG_PLATFORM alone."""
    return _platform(NPU, "platform_npu:HalNPU")


def _platform(name: str, path: str) -> str | None:
    from hal.engines.sglang import limits, vision

    global obstacle
    try:
        named = os.environ.get("SGLANG_PLATFORM")
        # HAL_ENGINES leaves it to the machine.
        if named != name and (named or not switched_on() or limits.has_npu() != (name == NPU)):
            return None
        require("sglang")
        limits.check_machine(name == NPU)
        if name == NPU:
            from hal.engines.sglang.npu import supply

            supply()
    except HalError as e:
        obstacle = e
        return f"{HERE}.refused:Refused"
    vision.declare_operators()
    return f"{HERE}.{path}"


def register() -> None:
    """The entry point of `sglang.srt.plugins`: the name ``hal`` for its flag; what ``HAL_ENGINES`` asks for."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    choices = "arg_groups.choices" if find_spec("sglang.srt.arg_groups.choices") else "server_args"
    pkgutil.resolve_name(f"sglang.srt.{choices}:add_attention_backend_choices")(["hal"])
    register_attention_backend("hal")(attention)
    if switched_on():
        from hal.engines.sglang import seams

        seams.install()
    elif beside_cuda():
        from hal.engines.sglang import seams

        seams.install_beside_cuda()


def attention(runner: object) -> object:
    """Makes the attention backend that ``--attention-backend hal`` names.

    Raises:
        EngineError: an SGLang that was not tested, or a model that needs what the ops lack.
    """
    require("sglang")
    from hal.engines.sglang.attention import HalAttention

    return HalAttention(runner)
