"""The manifest of `cpu`: numba kernels. Data alone; nothing here imports torch or numba."""

from hal.registry import Backend, hookimpl


@hookimpl
def hal_backend() -> Backend:
    return Backend(name="cpu", lanes={"device": ("cpu",)}, ops={}, requires=("numba>=0.61",), extra="cpu")
