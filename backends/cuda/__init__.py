"""The manifest of `cuda`: Triton kernels. Data alone; nothing here imports torch or triton."""

from hal.registry import Backend, Impl, hookimpl

_HERE = "hal.backends.cuda"


def _adapter(op: str, name: str, requires: str, run: str) -> Impl:
    """Another library's kernel, taken where it is named."""
    module = f"{_HERE}.{op}_{name}"
    return Impl(
        f"{module}:{op}", f"{module}:supports", name, priority=-1, named=True, lanes=("device",), requires=(requires,),
        note=f"adapter: {run}",
    )  # fmt: skip


_ADAPTERS = {
    op: (_adapter(op, "flashinfer", "flashinfer-python>=0.6", "run on an H200, FlashInfer 0.6.3"),)
    for op in ("decode_attention", "extend_attention")
}


@hookimpl
def hal_backend() -> Backend:
    return Backend(
        name="cuda",
        lanes={"device": ("cuda",), "interpreter": ("cpu",)},
        ops={
            op: (
                Impl(f"{_HERE}.{op}:{op}", supports=f"{_HERE}.{op}:supports", graph_safe=True, deterministic=exact),
                *_ADAPTERS.get(op, ()),
            )
            for op, exact in (
                ("get_last_loc", True),
                ("assign_extend_cache_locs", True),
                ("rope_kv_write", False),
                ("kv_transfer", False),
                ("decode_attention", True),
                ("extend_attention", False),
                ("write_req_to_token", False),
                ("compute_positions", True),
                ("build_kv_indices", True),
                ("build_kv_indices_from_blocks", True),
                ("build_page_table", True),
                ("alloc_extend", True),
                ("alloc_decode", True),
                ("kv_write", False),
                ("mla_kv_write", False),
                ("mla_rope_kv_write", False),
                ("qk_norm_rope_kv_write", False),
                ("kv_move", False),
            )
        },
        requires=("triton>=3.6,<3.7",),
        extra="cuda",
        probe={"device": f"{_HERE}.warmup:device", "interpreter": f"{_HERE}.warmup:interpreter"},
        limits={
            "adapter": "an adapter hands on what its library takes as it is",
            "fp8": "fp8 caches need compute capability 8.9 or later",
            "head_dim": "attention has heads of at most 576 elements",
            "pinned": "a kernel reaches host memory only where it is pinned",
        },
        warmup=f"{_HERE}.warmup:warmup",
        inspect=f"{_HERE}.inspect:inspect",
        tune=f"{_HERE}.warmup:tune",
        status=f"{_HERE}.warmup:status",
    )  # fmt: skip
