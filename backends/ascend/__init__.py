"""The manifest of `ascend`: Triton-Ascend kernels. Data alone; nothing here imports torch or triton."""

from hal.registry import Backend, hookimpl


@hookimpl
def hal_backend() -> Backend:
    return Backend(
        name="ascend",
        lanes={"device": ("npu",), "lowered": ("cpu",)},
        ops={},
        requires={
            "device": ("torch-npu>=2.6", "triton-ascend>=3.2,<3.3"),
            "lowered": ("triton-ascend>=3.2,<3.3", "ascendnpu-ir>=1.2", "llvmlite>=0.43"),
        },
    )
