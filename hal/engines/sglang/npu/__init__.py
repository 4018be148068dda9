"""The names that SGLang's Ascend path calls, on hal's ops: sgl-kernel-npu's, and torch_npu's writes to a cache.

Needs neither of them, nor SGLang. What hal's contract does not take raises `Unsupported`; docs/engines.md has the
table. Importing this registers nothing: `register` defines ``torch.ops.npu.*``, `replace` takes the place of an
installed sgl-kernel-npu's Python functions. Both are all or nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
from typing import Any

import torch

from hal.engines import EngineError
from hal.engines.sglang.kernels import Unsupported, assign_extend_cache_locs_func, get_last_loc
from hal.engines.sglang.npu import refused, transfer
from hal.engines.sglang.npu.cache import (
    _npu_reshape_and_cache,
    npu_scatter_nd_update_,
    npu_scatter_pa_kv_cache,
    store_kv_cache_prefix_valid_npu_triton,
)
from hal.engines.sglang.npu.rope import (
    fused_rope_qk_mqa,
    split_qkv_rmsnorm_rope,
    split_qkv_rmsnorm_rope_pos_cache_half_npu,
    split_qkvgate_gemma_rmsnorm_rope,
)
from hal.engines.sglang.npu.slots import alloc_extend, alloc_extend_kernel, cache_loc_assign, cache_loc_update
from hal.engines.sglang.npu.transfer import TransferDirection, TransferFlag, transfer_kv_dim_exchange

__all__ = [
    "MODULES", "OPS", "TransferDirection", "TransferFlag", "Unsupported", "_npu_reshape_and_cache", "alloc_extend",
    "alloc_extend_kernel", "assign_extend_cache_locs_func", "cache_loc_assign", "cache_loc_update",
    "fused_rope_qk_mqa", "get_last_loc", "npu_scatter_nd_update_", "npu_scatter_pa_kv_cache", "register", "replace",
    "split_qkv_rmsnorm_rope", "split_qkv_rmsnorm_rope_pos_cache_half_npu", "split_qkvgate_gemma_rmsnorm_rope",
    "store_kv_cache_prefix_valid_npu_triton", "transfer_kv_dim_exchange", "unregister",
]  # fmt: skip

OPS: dict[str, tuple[str, Any]] = {
    "cache_loc_assign": (
        "(Tensor req_indices, Tensor(a!) token_pool, Tensor start_offset, Tensor end_offset, Tensor out_cache_loc) "
        "-> Tensor(a!)",
        cache_loc_assign,
    ),
    "cache_loc_update": (
        "(Tensor req_indices, Tensor token_pool, Tensor start_offset, Tensor end_offset, Tensor(a!) out_cache_loc) "
        "-> Tensor(a!)",
        cache_loc_update,
    ),
    "alloc_extend": (
        "(Tensor pre_lens, Tensor seq_lens, Tensor last_loc, Tensor free_pages, int page_size, "
        "Tensor(a!) out_indices, Tensor(b!) values) -> ()",
        alloc_extend,
    ),
    "transfer_kv_dim_exchange": (
        "(Tensor(a!) device_k, Tensor(b!) host_k, Tensor(c!) device_v, Tensor(d!) host_v, Tensor device_indices, "
        "Tensor host_indices, int page_size, int direct, int flags) -> ()",
        transfer.op,
    ),
}
"""``torch.ops.npu``'s name -> schema (sgl-kernel-npu's, and which arguments it writes), and what runs."""

MODULES: dict[str, tuple[str, ...]] = {
    "kvcacheio": ("transfer_kv_dim_exchange",),
    "mem_cache.allocator": ("alloc_extend_kernel",),
    "mem_cache.kv_cache_store": ("store_kv_cache_prefix_valid_npu_triton",),
    "norm.fused_rope_qk_mqa": ("fused_rope_qk_mqa",),
    "norm.split_qkv_rmsnorm_rope": ("split_qkv_rmsnorm_rope", "split_qkvgate_gemma_rmsnorm_rope"),
    "norm.split_qkv_rmsnorm_rope_pos_cache_half_npu": ("split_qkv_rmsnorm_rope_pos_cache_half_npu",),
}
"""sgl_kernel_npu's module -> its functions that `replace` puts hal's in the place of."""

IMPORTED: dict[str, tuple[str, ...]] = {
    "kvcacheio": ("transfer_kv_dim_exchange", "TransferDirection"),
    "norm.fused_split_qk_norm": ("fused_split_qk_norm",),
    "norm.split_qkv_rmsnorm_mrope": ("triton_split_qkv_rmsnorm_mrope",),
    "norm.split_qkv_tp_rmsnorm_rope": ("split_qkv_tp_rmsnorm_rope",),
}
"""What SGLang imports beside them, most for models that then run without; `refused.REASONS` has those that raise."""

_library: Any = None


def __getattr__(name: str) -> Any:
    if name in refused.REASONS:
        return refused.refusal(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Defines `OPS` as ``torch.ops.npu.*``, for tensors of any device. A second call does nothing.

    Raises:
        EngineError: one of the names is defined already, by sgl-kernel-npu. None of them is taken then.
    """
    global _library
    if _library is not None:
        return
    taken = [name for name in OPS if hasattr(torch.ops.npu, name)]
    if taken:
        raise EngineError(
            f"hal: torch.ops.npu has {', '.join(taken)} already, of sgl_kernel_npu: hal takes nobody's name — "
            "leave sgl_kernel_npu out of this process, or call hal.engines.sglang.npu's functions"
        )
    library: Any = torch.library.Library
    _library = library("npu", "FRAGMENT")
    for name, (schema, function) in OPS.items():
        _library.define(name + schema)
        _library.impl(name, function, "CompositeExplicitAutograd")


def unregister() -> None:
    """Takes back what `register` defined."""
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


def replace() -> list[str]:
    """Puts hal's functions in the place of sgl-kernel-npu's (`MODULES`). Before SGLang imports its models.

    Returns:
        What was replaced, e.g. ``sgl_kernel_npu.kvcacheio.transfer_kv_dim_exchange``.

    Raises:
        EngineError: sgl_kernel_npu does not load, or a function of it has a parameter that hal does not know. Nothing
            is replaced then.
    """
    found = []
    for path, names in MODULES.items():
        try:
            module = importlib.import_module(f"sgl_kernel_npu.{path}")
        except Exception as e:
            raise EngineError(
                f"hal: sgl_kernel_npu.{path} does not load ({e}) — without it nothing of SGLang's Ascend path does"
            ) from e
        for name in names:
            theirs, ours = _parameters(getattr(module, name, None)), _parameters(globals()[name])
            if theirs is None or ours is None or not set(theirs) <= set(ours):
                raise EngineError(f"hal: sgl_kernel_npu.{path}.{name} takes {theirs}, where hal knows {ours}")
            found.append((module, name))
    for module, name in found:
        setattr(module, name, globals()[name])
    return [f"{module.__name__}.{name}" for module, name in found]


def supply() -> None:
    """hal's functions by sgl-kernel-npu's names: in its place where it is not installed, else as `replace` puts them.

    Raises:
        EngineError: what `replace` raises.
    """
    if "sgl_kernel_npu" not in sys.modules and importlib.util.find_spec("sgl_kernel_npu") is None:
        for path, names in {**MODULES, **IMPORTED}.items():
            module = _stand_in(f"sgl_kernel_npu.{path}")
            for name in names:
                setattr(module, name, globals().get(name) or refused.refusal(name))
    replace()


def _stand_in(path: str) -> types.ModuleType:
    """The module of this name, made with those around it; what they are not given is an ImportError as ever."""
    if path not in sys.modules:
        module = sys.modules[path] = types.ModuleType(path, "hal's, by sgl-kernel-npu's names")
        module.__path__ = []
        parent, _, name = path.rpartition(".")
        if parent:
            setattr(_stand_in(parent), name, module)
    return sys.modules[path]


def _parameters(function: Any) -> list[str] | None:
    """Names of a function's, or of a Triton kernel's, which lists them as ``arg_names``."""
    given = getattr(function, "arg_names", None)
    if given is not None:
        return list(given)
    function = getattr(function, "run", function)
    return list(inspect.signature(function).parameters) if callable(function) else None
