"""The manifest of `cuda`: Triton kernels. Data alone; nothing here imports torch or triton."""

from hal.backends import OTHERS, kernels
from hal.registry import Backend, Impl, hookimpl

_ALL_TAKEN = ("write_req_to_token", "kv_move")


def _impl_by_flashinfer(op: str) -> Impl:
    module = f"{__name__}.{op}_flashinfer"
    return Impl(
        f"{module}:{op}",
        supports=f"{module}:supports",
        name="flashinfer",
        priority=-1,
        named=True,
        lanes=("device",),
        requires=("flashinfer-python>=0.6",),
        note="adapter: run on an H200, FlashInfer 0.6.3",
    )


@hookimpl
def hal_backend() -> Backend:
    own = kernels(
        __name__, refusing=("decode_attention", *(op for op in OTHERS if op not in _ALL_TAKEN)), graph_safe=True
    )
    return Backend(
        name="cuda",
        lanes={"device": ("cuda",), "interpreter": ("cpu",)},
        ops={**own, **{op: (own[op], _impl_by_flashinfer(op)) for op in ("decode_attention", "extend_attention")}},
        requires=("triton>=3.6,<3.7",),
        extra="cuda",
        probe={"device": f"{__name__}.warmup:device", "interpreter": f"{__name__}.warmup:interpreter"},
        limits={
            "adapter": "an adapter hands on what its library takes as it is",
            "fp8": "fp8 caches need compute capability 8.9 or later",
            "head_dim": "attention has heads of at most 576 elements",
            "pinned": "a kernel reaches host memory only where it is pinned",
        },
        warmup=f"{__name__}.warmup:warmup",
        inspect=f"{__name__}.inspect:inspect",
        tune=f"{__name__}.warmup:tune",
        status=f"{__name__}.warmup:status",
    )
