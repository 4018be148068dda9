"""An emulated torch_npu: two devices in the memory of this machine, over torch's seam for devices of others.

Put the folder around this package on the path, and `import torch` loads it, as it loads the real one. What it proves of
hal's host code, and what not, stands in docs/ascend.md.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from torch_npu import _C, npu, profiler

__all__ = ["_C", "npu", "profiler"]
__version__ = "2.13.0+emulated"


def _autoload() -> None:
    """Called by `import torch`."""


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """torch_npu's own operators, which whoever imports them may have, and nobody can call."""
    if not name.startswith("npu_"):
        raise AttributeError(f"module {__name__} has no attribute {name}")

    def absent(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"not emulated: torch_npu.{name}")

    return absent


def _apply_patches(patches: list[tuple[str, Any]]) -> None:
    """Puts each value where its path below `torch` says."""
    for path, value in patches:
        *parents, name = path.split(".")
        owner: Any = torch
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value)


def _install() -> None:
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", npu)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if torch.distributed.is_available():
        torch.distributed.Backend.register_backend("hccl", _C._distributed_c10d.hccl, devices=["npu"])
    if importlib.util.find_spec("triton") is not None and os.environ.get("HAL_LANE", "device") in ("", "device"):
        from torch_npu import _triton

        _triton.install()


_install()
