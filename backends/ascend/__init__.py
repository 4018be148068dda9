"""The manifest of `ascend`: Triton-Ascend kernels. Data alone; nothing here imports torch or triton."""

from hal.registry import Backend, Impl, hookimpl

_HERE = "hal.backends.ascend"


def _by_torch_npu(op: str) -> Impl:
    """torch_npu's fused attention, taken where it is named."""
    module = f"{_HERE}.{op}_fused"
    return Impl(
        f"{module}:{op}", f"{module}:supports", name="fused", priority=-1, named=True, lanes=("device",),
        note="adapter: not run on a device",
    )  # fmt: skip


@hookimpl
def hal_backend() -> Backend:
    return Backend(
        name="ascend",
        lanes={"device": ("npu",), "lowered": ("cpu",)},
        ops={
            "get_last_loc": Impl(
                f"{_HERE}.get_last_loc:get_last_loc",
                supports=f"{_HERE}.get_last_loc:supports",
                deterministic=True,
            ),
            "assign_extend_cache_locs": Impl(
                f"{_HERE}.assign_extend_cache_locs:assign_extend_cache_locs",
                supports=f"{_HERE}.assign_extend_cache_locs:supports",
                deterministic=True,
            ),
            "rope_kv_write": Impl(
                f"{_HERE}.rope_kv_write:rope_kv_write", supports=f"{_HERE}.rope_kv_write:supports"
            ),
            "kv_transfer": Impl(f"{_HERE}.kv_transfer:kv_transfer", supports=f"{_HERE}.kv_transfer:supports"),
            "write_req_to_token": Impl(
                f"{_HERE}.write_req_to_token:write_req_to_token",
                supports=f"{_HERE}.write_req_to_token:supports",
            ),
            "compute_positions": Impl(
                f"{_HERE}.compute_positions:compute_positions",
                supports=f"{_HERE}.compute_positions:supports",
                deterministic=True,
            ),
            "build_kv_indices": Impl(
                f"{_HERE}.build_kv_indices:build_kv_indices",
                supports=f"{_HERE}.build_kv_indices:supports",
                deterministic=True,
            ),
            "build_kv_indices_from_blocks": Impl(
                f"{_HERE}.build_kv_indices_from_blocks:build_kv_indices_from_blocks",
                supports=f"{_HERE}.build_kv_indices_from_blocks:supports",
                deterministic=True,
            ),
            "build_page_table": Impl(
                f"{_HERE}.build_page_table:build_page_table",
                supports=f"{_HERE}.build_page_table:supports",
                deterministic=True,
            ),
            "alloc_extend": Impl(
                f"{_HERE}.alloc_extend:alloc_extend",
                supports=f"{_HERE}.alloc_extend:supports",
                deterministic=True,
            ),
            "alloc_decode": Impl(
                f"{_HERE}.alloc_decode:alloc_decode",
                supports=f"{_HERE}.alloc_decode:supports",
                deterministic=True,
            ),
            "kv_write": Impl(
                f"{_HERE}.kv_write:kv_write",
                supports=f"{_HERE}.kv_write:supports",
            ),
            "kv_move": Impl(
                f"{_HERE}.kv_move:kv_move",
                supports=f"{_HERE}.kv_move:supports",
            ),
            "mla_kv_write": Impl(
                f"{_HERE}.mla_kv_write:mla_kv_write",
                supports=f"{_HERE}.mla_kv_write:supports",
            ),
            "mla_rope_kv_write": Impl(
                f"{_HERE}.mla_rope_kv_write:mla_rope_kv_write",
                supports=f"{_HERE}.mla_rope_kv_write:supports",
            ),
            "qk_norm_rope_kv_write": Impl(
                f"{_HERE}.qk_norm_rope_kv_write:qk_norm_rope_kv_write",
                supports=f"{_HERE}.qk_norm_rope_kv_write:supports",
            ),
            "decode_attention": (
                Impl(
                    f"{_HERE}.decode_attention:decode_attention",
                    supports=f"{_HERE}.decode_attention:supports",
                    name="triton",
                    deterministic=True,
                ),
                _by_torch_npu("decode_attention"),
            ),
            "extend_attention": (
                Impl(
                    f"{_HERE}.extend_attention:extend_attention",
                    supports=f"{_HERE}.extend_attention:supports",
                ),
                _by_torch_npu("extend_attention"),
            ),
        },
        requires={
            "device": ("torch-npu>=2.6", "triton-ascend>=3.2,<3.3"),
            "lowered": ("triton-ascend>=3.2,<3.3", "ascendnpu-ir>=1.2", "llvmlite>=0.43"),
        },
        probe={"device": f"{_HERE}._probe:device", "lowered": f"{_HERE}._probe:lowered"},
        limits={
            "adapter": "an adapter hands on what its library takes as it is",
            "fp8": "triton-ascend 3.2.0 has no fp8 tensors",
            "head_dim": "a head must fit one tile of the unified buffer: at most 2048 elements",
            "device_slots": "a kernel can't reach host memory: between device and host, slots are on the CPU",
        },
        inspect=f"{_HERE}.inspect:inspect",
    )
