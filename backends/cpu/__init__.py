"""The manifest of `cpu`: numba kernels, on a small pool of threads. Data alone; nothing here imports torch or numba."""

from hal.backends import kernels
from hal.registry import Backend, hookimpl


@hookimpl
def hal_backend() -> Backend:
    return Backend(
        name="cpu",
        lanes={"device": ("cpu",)},
        ops=kernels(__name__, deterministic=("write_req_to_token", "extend_attention")),
        requires=("numba>=0.62.1",),
        extra="cpu",
        probe=f"{__name__}.warmup:probe",
        warmup=f"{__name__}.warmup:warmup",
    )
