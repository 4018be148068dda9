"""hal's own backends, without privileges over a third party's; what their manifests share. Imports no framework."""

from __future__ import annotations

from collections.abc import Sequence

from hal.registry import Impl

DETERMINISTIC = (
    "get_last_loc",
    "assign_extend_cache_locs",
    "compute_positions",
    "build_kv_indices",
    "build_kv_indices_from_blocks",
    "build_page_table",
    "alloc_extend",
    "alloc_decode",
    "decode_attention",
)
"""The same bits every time, on every backend."""
OTHERS = (
    "rope_kv_write",
    "kv_transfer",
    "write_req_to_token",
    "kv_write",
    "mla_kv_write",
    "mla_rope_kv_write",
    "qk_norm_rope_kv_write",
    "kv_move",
    "extend_attention",
)
"""Which of several equal slots is written last depends on threads or programs, but where a backend says otherwise."""


def kernels(
    package: str, *, refusing: Sequence[str] = (), deterministic: Sequence[str] = (), graph_safe: bool = False
) -> dict[str, Impl]:
    """Every op as ``package.<op>:<op>``.

    Args:
        refusing: the ops that have a ``supports`` beside them; the others take all that the contract allows.
        deterministic: ops that are so beside `DETERMINISTIC`.
        graph_safe: of all ops.
    """
    return {
        op: Impl(
            f"{package}.{op}:{op}",
            supports=f"{package}.{op}:supports" if op in refusing else None,
            graph_safe=graph_safe,
            deterministic=op in DETERMINISTIC or op in deterministic,
        )
        for op in (*DETERMINISTIC, *OTHERS)
    }
