"""SGLang on an NPU with hal's ops in place of sgl-kernel-npu's: the platform `hal_npu`, twin of `hal_cpu`.

torch_npu makes SGLang take its own path for NPUs wherever it asks `is_npu()`; what a platform decides is decided here.
Proven on the emulated torch_npu alone: no NPU has run this.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.npu import NPUDeviceMixin

from hal.engines.sglang import NPU, limits
from hal.engines.sglang.platform import OnHal


class HalNPU(NPUDeviceMixin, OnHal):
    """As `HalCPU`, in torch_npu's memory and streams."""

    device_name = NPU
    device_type = "npu"
    _enum = PlatformEnum.OOT

    def reasons(self, server_args: Any) -> list[str]:
        return super().reasons(server_args) + limits.of_npu(server_args)

    def get_group_coordinator_device(self, local_rank: int) -> torch.device:
        return torch.device("npu", local_rank)
