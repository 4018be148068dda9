"""hal: one contract per kernel for LLM serving engines, and the backends that keep it.

Importing this package imports nothing but the standard library; everything else comes when it is used.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hal._errors import ArgumentError, BackendError, FallbackWarning, HalError, NoBackendError, SelectionError
from hal._subinterpreter import refuse as _refuse_subinterpreter
from hal._version import __version__

_refuse_subinterpreter()
# What torch says on being imported where numpy is absent, which hal's base install does without.
warnings.filterwarnings("ignore", "Failed to initialize NumPy: No module named 'numpy'", UserWarning)

if TYPE_CHECKING:
    from hal._api import (
        alloc_decode,
        alloc_extend,
        assign_extend_cache_locs,
        build_kv_indices,
        build_kv_indices_from_blocks,
        build_page_table,
        compute_positions,
        decode_attention,
        extend_attention,
        get_last_loc,
        kv_move,
        kv_transfer,
        kv_write,
        mla_kv_write,
        mla_rope_kv_write,
        qk_norm_rope_kv_write,
        rope_kv_write,
        write_req_to_token,
    )
    from hal._torch_ops import torch_ops
    from hal._trace import trace
    from hal.kv.allocator import SlotAllocator
    from hal.kv.paging import num_new_pages
    from hal.kv.pool import KVPool
    from hal.registry._dispatch import bind, explain, warmup
    from hal.registry._info import info
    from hal.registry._table import configure, register, reload, unregister, use

__all__ = [
    "ArgumentError",
    "BackendError",
    "FallbackWarning",
    "HalError",
    "KVPool",
    "NoBackendError",
    "SelectionError",
    "SlotAllocator",
    "__version__",
    "alloc_decode",
    "alloc_extend",
    "assign_extend_cache_locs",
    "bind",
    "build_kv_indices",
    "build_kv_indices_from_blocks",
    "build_page_table",
    "compute_positions",
    "configure",
    "decode_attention",
    "explain",
    "extend_attention",
    "get_last_loc",
    "info",
    "kv_move",
    "kv_transfer",
    "kv_write",
    "mla_kv_write",
    "mla_rope_kv_write",
    "num_new_pages",
    "qk_norm_rope_kv_write",
    "register",
    "reload",
    "rope_kv_write",
    "torch_ops",
    "trace",
    "unregister",
    "use",
    "warmup",
    "write_req_to_token",
]

_LAZY = {
    "KVPool": "hal.kv.pool",
    "SlotAllocator": "hal.kv.allocator",
    "num_new_pages": "hal.kv.paging",
    "torch_ops": "hal._torch_ops",
    "trace": "hal._trace",
    "bind": "hal.registry._dispatch",
    "explain": "hal.registry._dispatch",
    "info": "hal.registry._info",
    "warmup": "hal.registry._dispatch",
    "configure": "hal.registry._table",
    "register": "hal.registry._table",
    "reload": "hal.registry._table",
    "unregister": "hal.registry._table",
    "use": "hal.registry._table",
}


if not TYPE_CHECKING:  # type checkers know every name: `hal.nosuch` is an error there too

    def __getattr__(name: str) -> Any:
        from hal.ops import BUILTIN

        if name in BUILTIN:
            value = import_module("hal.registry._dispatch").dispatcher(name)
        elif name in _LAZY:
            value = getattr(import_module(_LAZY[name]), name)
        else:
            raise AttributeError(f"module 'hal' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
