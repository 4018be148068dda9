"""What the launchers of kernels on a paged cache share: plans by metadata, scales, the limits of fp8."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

from torch import Tensor
from torch.cuda import get_device_capability

from hal.ops.spec import FP8
from hal.triton import launch

Plan = TypeVar("Plan")
NONE, FLOAT, POINTER = 0, 1, 2
"""What a kernel gets for a scale."""


class Plans(dict[tuple[Any, ...], Plan]):
    """Launches by what they depend on, forgotten all at once when there are `limit`."""

    def __init__(self, limit: int = 4096) -> None:
        self.limit = limit
        launch.keeps(self)

    def hold(self, key: tuple[Any, ...], plan: Plan, *owners: object) -> Plan:
        """Keeps `plan` as long as its owners live, whose identities are in the key."""
        self[key] = plan
        for owner in owners:
            weakref.finalize(owner, self.pop, key, None).atexit = False
        return plan

    def __setitem__(self, key: tuple[Any, ...], plan: Plan) -> None:
        if len(self) >= self.limit:
            self.clear()
        super().__setitem__(key, plan)


def scale_kind(scale: object) -> int:
    return NONE if scale is None else POINTER if isinstance(scale, Tensor) else FLOAT


def refuse_fp8(sig: Any, *caches: str) -> str | None:
    """What a device says that can't convert to fp8, where one of `caches` is fp8."""
    if sig.device == "cuda" and any(sig[c] is not None and sig[c].dtype in FP8 for c in caches):
        major, minor = get_device_capability()
        if (major, minor) < (8, 9):
            return f"fp8: no conversion to fp8 on compute capability {major}.{minor}; 8.9 has it"
    return None
