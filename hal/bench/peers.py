"""Peers to measure against, as far as they are importable. Nothing of theirs is part of hal.

SGLang's kernels import half of its server. Where that isn't installed (its wheel with ``--no-deps``),
stand-ins for the few helpers they use are put in its place, so that the kernels alone load.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any


def available() -> dict[str, str]:
    """Peer -> version, of those that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("sglang", "apache-tvm-ffi", "flashinfer-python", "sglang-kernel", "vllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def sglang(module: str) -> Any:
    """A module of SGLang's kernels, or None where SGLang isn't installed.

    Args:
        module: below ``sglang.kernels``, e.g. ``"ops.attention.rope"``.
    """
    if "sglang" not in sys.modules:
        spec = importlib.util.find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            return None
        _stand_ins(Path(next(iter(spec.submodule_search_locations))))
    return importlib.import_module(f"sglang.kernels.{module}")


def sgl_kernel() -> Any:
    """The compiled operators of SGLang's wheel ``sglang-kernel`` (``torch.ops.sgl_kernel``), or None without it.

    Its package imports SGLang; the operators need but their library.
    """
    import torch

    if not hasattr(torch.ops.sgl_kernel, "transfer_kv_per_layer"):
        spec = importlib.util.find_spec("sgl_kernel")
        for folder in (spec and spec.submodule_search_locations) or ():
            major = torch.cuda.get_device_capability()[0]
            for library in Path(folder, f"sm{major}0").glob("common_ops.*.so"):
                torch.ops.load_library(library)  # type: ignore[no-untyped-call, unused-ignore]
    return torch.ops.sgl_kernel if hasattr(torch.ops.sgl_kernel, "transfer_kv_per_layer") else None


def flashinfer() -> Any:
    """FlashInfer, or None where it can't be imported."""
    try:
        return importlib.import_module("flashinfer")
    except ImportError:
        return None


def fa3() -> Callable[..., Any] | None:
    """FlashAttention 3's ``flash_attn_with_kvcache``, its own or SGLang's, or None where neither can be imported."""
    for name in ("flash_attn_interface", "sgl_kernel.flash_attn"):
        try:
            found: Callable[..., Any] = importlib.import_module(name).flash_attn_with_kvcache
        except (ImportError, AttributeError, OSError):
            continue
        return found
    return None


def vllm_fa3() -> Any:
    """vLLM's build of FlashAttention 3, a module that has ``flash_attn_varlen_func`` and ``get_scheduler_metadata``, or
    None where it can't be imported or the device is none for it."""
    try:
        module = importlib.import_module("vllm.vllm_flash_attn")
        return module if module.is_fa_version_supported(3) else None
    except (ImportError, AttributeError, OSError):
        return None


def flashmla() -> Callable[..., Any] | None:
    """vLLM's build of FlashMLA, its ``dense_decode_fwd``, or None where that isn't installed or the device is none for
    it."""
    return getattr(_of_flashmla("_flashmla_C"), "dense_decode_fwd", None)


def flashmla_fp8() -> Any:
    """The operators of the same over fp8 rows, by queries of fp8, which have ``fwd_kvcache_mla_fp8`` and what plans it,
    or None likewise."""
    found = _of_flashmla("_flashmla_extension_C")
    return found if hasattr(found, "fwd_kvcache_mla_fp8") else None


def _of_flashmla(name: str) -> Any:
    """Operators of a library of vLLM's wheel, which need nothing else of it; None where the device is none for them."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    spec = importlib.util.find_spec("vllm")
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in Path(folder).glob(f"{name}.*.so"):
            torch.ops.load_library(library)  # type: ignore[no-untyped-call, unused-ignore]
    return getattr(torch.ops, name)


def _stand_ins(root: Path) -> None:
    def same(fn: Callable[..., Any] | None = None, **_: Any) -> Any:
        return fn if fn is not None else lambda f: f

    def package(name: str, path: Path | None = None, content: dict[str, Any] | None = None) -> None:
        module = types.ModuleType(name)
        module.__path__ = [str(path)] if path is not None else []
        module.__dict__.update(content or {})
        sys.modules[name] = module

    import torch

    def cuda_version() -> tuple[int, ...]:
        return tuple(int(p) for p in str(torch.version.cuda).split("."))

    def flag(device: str) -> Callable[[], bool]:
        return lambda: device == "cuda"

    flags: dict[str, Any] = {f"is_{d}": flag(d) for d in ("cpu", "cuda", "hip", "musa", "npu", "xpu")}
    helpers: dict[str, Any] = {
        **flags,
        "get_cuda_version": cuda_version,
        "next_power_of_2": lambda n: 1 << (n - 1).bit_length(),
    }
    package("sglang", root)
    for below in ("kernels", "kernels.ops", *(f"kernels.ops.{d.name}" for d in (root / "kernels" / "ops").iterdir())):
        package(f"sglang.{below}", root.joinpath(*below.split(".")))
    package("sglang.srt", root / "srt")
    package("sglang.srt.utils", content=helpers)
    package("sglang.srt.utils.common", content=helpers)
    package("sglang.srt.utils.custom_op", content={"register_custom_op": same})
