"""SGLang on any CPU, without its own kernels: the platform `hal_cpu`, and what `hal_npu` has as it has."""

from __future__ import annotations

from collections.abc import Callable
from platform import machine
from typing import Any

from sglang.srt.platforms import interface
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum

from hal.engines.sglang import PLATFORM, limits, seams

ATTENTION = "attention_backend", "prefill_attention_backend", "decode_attention_backend"


class OnHal(interface.SRTPlatform):
    """Attention, KV pools, paged allocation and rotary embedding are hal's; all else is SGLang's, in torch."""

    _enum = PlatformEnum.OOT
    if hasattr(interface, "PlatformCapabilities"):
        capabilities = interface.PlatformCapabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Raises:
        EngineError: the settings ask for what hal lacks, or a seam of the adapter is not in place.
        """
        seams.check()
        reasons = self.reasons(server_args)
        # On a CPU SGLang has put a name of its own there before it asks here; 0.5.17 keeps nothing of what was given.
        given = getattr(server_args, "_raw_input", None)
        own = () if given else ("torch_native" if machine() in ("aarch64", "arm64") else "intel_amx",)
        given = given or vars(server_args)
        for field in ATTENTION:
            if given[field] not in (None, "hal", *own):
                reasons.append(f"--{field.replace('_', '-')} {given[field]}: all attention is hal's")
        if reasons:
            raise limits.refusal(reasons)
        for field in ATTENTION:
            if getattr(server_args, field) is not None or field == ATTENTION[0]:
                setattr(server_args, field, "hal")
        if server_args.disaggregation_mode == "prefill":
            # With it, what was cached is sent after an event of CUDA's.
            server_args.disable_overlap_schedule = True

    def reasons(self, server_args: Any) -> list[str]:
        """Against the settings."""
        return limits.of_settings(server_args)

    def get_default_attention_backend(self) -> str:
        return "hal"

    def get_dispatch_key_name(self) -> str:
        return seams.KEY

    def get_compile_backend(self, mode: str | None = None) -> str:
        # What SGLang compiles are helpers of a line or two: a compiler's start costs more than they ever would.
        return "eager"

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """hal's pool, or None for a kind that hal has none of: SGLang asks for all, attention refuses what it made."""
        from hal.engines.sglang import pools

        return {"mha": pools.HalMHAPool, "mla": pools.HalMLAPool}.get(kind)

    # 0.5.17 asks for each kind by a name of its own.

    def get_mha_kv_pool_cls(self) -> type | None:
        return self.get_kv_pool_cls(kind="mha")

    def get_mla_kv_pool_cls(self) -> type | None:
        return self.get_kv_pool_cls(kind="mla")

    def get_paged_allocator_cls(self) -> type:
        from hal.engines.sglang.allocation import HalPagedAllocator

        return HalPagedAllocator

    def get_speculative_cache_locs_fn(self) -> Callable[..., Any]:
        from hal.engines.sglang.kernels import assign_extend_cache_locs_func

        return assign_extend_cache_locs_func

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in limits.ALGORITHMS


class HalCPU(CpuDeviceMixin, OnHal):
    device_name = PLATFORM
    device_type = "cpu"
    _enum = PlatformEnum.OOT
