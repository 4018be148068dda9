"""SGLang's disaggregation by NIXL on a CPU: its pools are host memory, which SGLang takes for a GPU's."""

from __future__ import annotations

from typing import Any


def normalize_kv_mem_kinds(kinds: list[str] | None, expected_len: int) -> list[str]:
    """The kind of memory of each of `expected_len` buffers, by NIXL's names: on the platform `hal_cpu` all are DRAM,
    here and at the peer, whatever SGLang says.

    Raises:
        ValueError: kinds of another number of buffers.
    """
    if kinds is not None and len(kinds) != expected_len:
        raise ValueError(f"kv_data_mem_kinds: expected {expected_len}; got {kinds}")
    return ["DRAM"] * expected_len


def of_settings(args: Any) -> list[str]:
    """Reasons against the settings of a disaggregated engine."""
    if args.disaggregation_mode == "null":
        return []
    reasons = []
    if args.disaggregation_transfer_backend != "nixl":
        reasons.append(
            f"disaggregated prefill and decode by {args.disaggregation_transfer_backend}: "
            "--disaggregation-transfer-backend nixl"
        )
    for field in ("disaggregation_enable_kv_checksum", "enable_pd_role_switch"):
        if getattr(args, field, False):
            reasons.append(f"--{field.replace('_', '-')} in disaggregated prefill and decode")
    return reasons
