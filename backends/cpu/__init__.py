"""The manifest of `cpu`: numba kernels, on a small pool of threads. Data alone; nothing here imports torch or numba."""

from hal.registry import Backend, Impl, hookimpl

_EXACT = (
    "get_last_loc", "assign_extend_cache_locs", "write_req_to_token", "compute_positions", "build_kv_indices",
    "build_kv_indices_from_blocks", "build_page_table", "alloc_extend", "alloc_decode", "decode_attention",
    "extend_attention",
)  # fmt: skip
"""The same bits every time. In the others, which of several equal slots is written last depends on the threads."""


@hookimpl
def hal_backend() -> Backend:
    return Backend(
        name="cpu",
        lanes={"device": ("cpu",)},
        ops={
            op: Impl(
                f"hal.backends.cpu.{op}:{op}", f"hal.backends.cpu.{op}:supports", deterministic=op in _EXACT
            )
            for op in (
                *_EXACT, "rope_kv_write", "kv_transfer", "kv_write", "mla_kv_write", "mla_rope_kv_write",
                "qk_norm_rope_kv_write", "kv_move",
            )
        },
        requires=("numba>=0.62.1",),
        extra="cpu",
        probe="hal.backends.cpu.warmup:probe",
        limits={"device": "tensors are in host memory"},
        warmup="hal.backends.cpu.warmup:warmup",
    )  # fmt: skip
