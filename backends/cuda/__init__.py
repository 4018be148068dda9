"""The manifest of `cuda`: Triton kernels. Data alone; nothing here imports torch or triton."""

from hal.registry import Backend, hookimpl


@hookimpl
def hal_backend() -> Backend:
    return Backend(
        name="cuda",
        lanes={"device": ("cuda",), "interpreter": ("cpu",)},
        ops={},
        requires=("triton>=3.6,<3.7",),
        extra="cuda",
    )
