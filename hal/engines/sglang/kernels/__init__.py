"""SGLang's kernels by SGLang's names and signatures, on hal's ops. Needs no SGLang.

What hal's contract does not take raises `Unsupported`; docs/engines.md has the table. The name ``sgl_kernel`` is taken
only where ``python -m hal.engines.sglang.kernels`` is told to. `register` puts them into SGLang's own registry, as
backend ``plugin``.
"""

from __future__ import annotations

from hal.engines import EngineError
from hal.engines.sglang.kernels._common import Unsupported
from hal.engines.sglang.kernels.attention import (
    context_attention_fwd,
    decode_attention_fwd,
    decode_attention_fwd_grouped,
    decode_attention_fwd_normal,
    extend_attention_fwd,
    extend_attention_fwd_unified,
    merge_state,
    merge_state_triton,
    merge_state_v2,
)
from hal.engines.sglang.kernels.cache import (
    FusedSetKVBufferArg,
    apply_rope_inplace,
    apply_rope_inplace_with_kvcache,
    apply_rope_with_cos_sin_cache_inplace,
    set_mla_kv_buffer,
    set_mla_kv_buffer_triton,
    store_cache,
)
from hal.engines.sglang.kernels.slots import (
    alloc_decode_kernel,
    alloc_extend_kernel,
    assign_extend_cache_locs,
    assign_extend_cache_locs_func,
    create_flashinfer_kv_indices_triton,
    get_last_loc,
    write_req_to_token_pool_triton,
)
from hal.engines.sglang.kernels.transfer import (
    transfer_hicache_all_layer,
    transfer_hicache_all_layer_mla,
    transfer_hicache_one_layer,
    transfer_hicache_one_layer_mla,
    transfer_kv_all_layer,
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_all_layer_lf_pf,
    transfer_kv_all_layer_lf_ph,
    transfer_kv_all_layer_mla,
    transfer_kv_all_layer_mla_lf_pf,
    transfer_kv_direct,
    transfer_kv_per_layer,
    transfer_kv_per_layer_direct_pf_lf,
    transfer_kv_per_layer_mla,
    transfer_kv_per_layer_mla_pf_lf,
    transfer_kv_per_layer_pf_lf,
    transfer_kv_per_layer_ph_lf,
)

create_flashinfer_kv_indices = create_flashinfer_kv_indices_triton

__all__ = [
    "OPS", "FusedSetKVBufferArg", "Unsupported", "alloc_decode_kernel", "alloc_extend_kernel", "apply_rope_inplace",
    "apply_rope_inplace_with_kvcache", "apply_rope_with_cos_sin_cache_inplace", "assign_extend_cache_locs",
    "assign_extend_cache_locs_func", "context_attention_fwd", "create_flashinfer_kv_indices",
    "create_flashinfer_kv_indices_triton", "decode_attention_fwd", "decode_attention_fwd_grouped",
    "decode_attention_fwd_normal", "extend_attention_fwd", "extend_attention_fwd_unified", "get_last_loc",
    "merge_state", "merge_state_triton", "merge_state_v2", "register", "set_mla_kv_buffer",
    "set_mla_kv_buffer_triton", "store_cache", "transfer_hicache_all_layer", "transfer_hicache_all_layer_mla",
    "transfer_hicache_one_layer", "transfer_hicache_one_layer_mla", "transfer_kv_all_layer",
    "transfer_kv_all_layer_direct_lf_pf",
    "transfer_kv_all_layer_lf_pf", "transfer_kv_all_layer_lf_ph", "transfer_kv_all_layer_mla",
    "transfer_kv_all_layer_mla_lf_pf", "transfer_kv_direct", "transfer_kv_per_layer",
    "transfer_kv_per_layer_direct_pf_lf", "transfer_kv_per_layer_mla", "transfer_kv_per_layer_mla_pf_lf",
    "transfer_kv_per_layer_pf_lf", "transfer_kv_per_layer_ph_lf", "write_req_to_token_pool_triton",
]  # fmt: skip

OPS: dict[str, str] = {
    "attention.decode_attention_fwd": "decode_attention_fwd",
    "attention.extend_attention_fwd": "extend_attention_fwd",
    "attention.merge_state_triton": "merge_state_triton",
    "attention.create_flashinfer_kv_indices_triton": "create_flashinfer_kv_indices_triton",
    "attention.apply_rope_with_cos_sin_cache_inplace": "apply_rope_with_cos_sin_cache_inplace",
    "kvcache.store_cache": "store_cache",
    "kvcache.set_mla_kv_buffer": "set_mla_kv_buffer",
    "kvcache.set_mla_kv_buffer_triton": "set_mla_kv_buffer_triton",
    "memory.alloc_extend_kernel": "alloc_extend_kernel",
    "memory.alloc_decode_kernel": "alloc_decode_kernel",
    "memory.get_last_loc_triton": "get_last_loc",
    "memory.get_last_loc_triton_safe": "get_last_loc",
    "speculative.assign_extend_cache_locs_func": "assign_extend_cache_locs_func",
    **{f"kvcache.{name}": name for name in __all__ if name.startswith("transfer_kv_")},
}
"""Name in SGLang's registry -> name here."""


def register() -> None:
    """Adds `OPS` to SGLang's registry: ``select_kernel(name, KernelBackend.PLUGIN).load()`` is a function of these.

    Where SGLang has an implementation too, its callers name theirs; what SGLang runs does not change.

    Raises:
        EngineError: an SGLang whose registry knows its own backends alone, as 0.5.17's.
    """
    from sglang.kernels.registry import register_kernel
    from sglang.kernels.spec import KernelBackend, KernelSpec

    if not hasattr(KernelBackend, "PLUGIN"):
        raise EngineError(
            "hal: sglang: its registry has no place for others' kernels; 0.5.23's has — import these from here"
        )
    for op, name in OPS.items():
        register_kernel(KernelSpec(op=op, backend=KernelBackend.PLUGIN, target=f"{__name__}:{name}"))
