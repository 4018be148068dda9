"""Devices as people write them: ``cpu``, ``cuda:1``."""

from __future__ import annotations

import torch

from hal._errors import ArgumentError

_ALIASES = {"gpu": "cuda", "nvidia": "cuda", "ascend": "npu"}


EMULATED = "emulated"
"""What a report calls the lane ``device`` where the device's module says that there is none behind it."""


def lane_on(lane: str, device: torch.device) -> str:
    """The lane as reports name it: a run on an emulated device is no run on one."""
    if lane != "device" or device.type == "cpu":
        return lane
    return EMULATED if getattr(getattr(torch, device.type, None), EMULATED, False) else lane


def parse_device(op: str, argument: str, device: str | torch.device) -> torch.device:
    """A device of torch's, from its name.

    Raises:
        ArgumentError: torch knows none of that name.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        word = str(device).partition(":")[0]
        near = _ALIASES.get(word.lower(), word.lower())
        meant = f" (did you mean {near}?)" if near != word and near in ("cpu", "cuda", "npu") else ""
        raise ArgumentError(
            op, argument, "a device of torch's: cpu, cuda, cuda:1, npu, ...", f"{device!r}{meant}"
        ) from None
