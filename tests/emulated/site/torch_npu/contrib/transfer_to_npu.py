"""Once imported, ``torch.cuda`` and "cuda" mean the NPU, for programs that were written for CUDA."""

import functools
from typing import Any

import torch
from torch.utils._device import _device_constructors

from torch_npu import npu

MAKERS = tuple(
    """
    arange as_tensor empty empty_like full full_like ones ones_like rand randint randn tensor zeros zeros_like
    """.split()
)
METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "pin_memory", "to")


def _here(device: Any) -> Any:
    if isinstance(device, str):
        return device.replace("cuda", "npu")
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("npu", device.index) if device.index is not None else torch.device("npu")
    return device


def _wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def moved(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _here(kwargs["device"])
        return function(*map(_here, args), **kwargs)

    return moved


# What `with torch.device(...)` knows torch's makers by, before they are others.
_device_constructors()
for name in dir(npu):
    if not name.startswith("_"):
        setattr(torch.cuda, name, getattr(npu, name))
torch.cuda.is_available = lambda: True
for owner, names in ((torch, MAKERS), (torch.Tensor, METHODS), (torch.nn.Module, ("to",))):
    for name in names:
        setattr(owner, name, _wrapped(getattr(owner, name)))
torch.Tensor.cuda, torch.nn.Module.cuda = torch.Tensor.npu, torch.nn.Module.npu
torch.Tensor.is_cuda = torch.Tensor.is_npu
