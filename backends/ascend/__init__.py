"""The manifest of `ascend`: Triton-Ascend kernels. Data alone; nothing here imports torch or triton."""

from hal.backends import OTHERS, kernels
from hal.registry import Backend, hookimpl

_TRITON = "triton-ascend>=3.2,<3.3"
_ALL_TAKEN = ("write_req_to_token", "kv_move")


@hookimpl
def hal_backend() -> Backend:
    return Backend(
        name="ascend",
        lanes={"device": ("npu",), "lowered": ("cpu",)},
        ops=kernels(
            __name__, refusing=("decode_attention", *(op for op in OTHERS if op not in _ALL_TAKEN)), graph_safe=True
        ),
        requires={"device": ("torch-npu>=2.6", _TRITON), "lowered": (_TRITON, "ascendnpu-ir>=1.2", "llvmlite>=0.43")},
        probe={"device": f"{__name__}._probe:device", "lowered": f"{__name__}._probe:lowered"},
        status=f"{__name__}._probe:status",
        limits={
            "fp8": "triton-ascend 3.2.0 has no fp8 tensors",
            "head_dim": "a head must fit one tile of the unified buffer: at most 2048 elements",
            "device_slots": "a kernel can't reach host memory: between device and host, slots are on the CPU",
        },
        inspect=f"{__name__}.inspect:inspect",
    )
