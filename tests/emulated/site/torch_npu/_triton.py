"""Triton-Ascend's launch, without a device: a kernel that would start is put, lowered, into the stream."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from torch_npu import npu
from torch_npu._runtime import launch

VECTOR_CORES = 40


class _Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        if not 0 <= device < npu.device_count():
            raise RuntimeError(f"npu: no device {device}")
        return {"max_shared_mem": 1, "num_aicore": VECTOR_CORES // 2, "num_vectorcore": VECTOR_CORES}


class _Driver:
    """What `triton.runtime.driver.active` offers to hal."""

    utils = _Utils()

    def get_current_device(self) -> int:
        return npu.current_device()

    def get_current_stream(self, device: int) -> int:
        return npu.current_stream(device).npu_stream

    def get_benchmarker(self) -> Callable[..., NoReturn]:
        """Asked for as soon as a kernel is declared to be tuned."""

        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            raise NotImplementedError("not emulated: time")

        return refuse


def _run(jit: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """In place of `JITFunction.run`: on the current device's current stream, as triton-ascend does.

    Raises:
        ValueError: a tensor that is not on an NPU.
        RuntimeError: a tensor on another NPU than the current one, whose memory the kernel's cores can't address.
    """
    names = [p.name for p in jit.params]
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    static = {p.name: given[p.name] for p in jit.params if p.is_constexpr}
    values: list[Any] = []
    for p in jit.params:
        if p.is_constexpr:
            continue
        value = given[p.name]
        if isinstance(value, torch.Tensor):
            if value.device.type != "npu":
                raise ValueError(f"npu: {jit.__name__}: {p.name} is on {value.device}: no kernel can reach it")
            if value.device.index != npu.current_device():
                here = npu.current_device()
                raise RuntimeError(
                    f"npu: {jit.__name__}: {p.name} is on {value.device}, the kernel starts on npu:{here}"
                )
            value = torch.ops.npu_emulated.host(value)
        values.append(value)
    options = {k: v for k, v in kwargs.items() if k not in names}
    if warmup:
        return
    lowered = importlib.import_module("hal.lowered")
    launch(npu.current_device(), lambda: lowered.run(jit, grid, values, static, options))


def install() -> None:
    """Takes the place of triton-ascend's driver and launch."""
    runtime = importlib.import_module("triton.runtime")
    runtime.driver.set_active(_Driver())
    runtime.jit.JITFunction.run = _run
