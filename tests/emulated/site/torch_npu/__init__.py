"""An emulated torch_npu: two devices in the memory of this machine, over torch's seam for devices of others.

Put the folder around this package on the path, and `import torch` loads it, as it loads the real one. What it proves of
hal's host code, and what not, stands in docs/ascend.md.
"""

import importlib.util
import os

import torch

from torch_npu import _C, npu

__all__ = ["_C", "npu"]
__version__ = "2.13.0+emulated"


def _autoload() -> None:
    """Called by `import torch`."""


def _install() -> None:
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", npu)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if importlib.util.find_spec("triton") is not None and os.environ.get("HAL_LANE", "device") in ("", "device"):
        from torch_npu import _triton

        _triton.install()


_install()
