"""Names that SGLang reads when it is imported. Nothing is profiled."""

import enum
from typing import Any, NoReturn


class ProfilerActivity(enum.Enum):
    CPU = 0
    NPU = 1


def profile(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("not emulated: torch_npu.profiler")
