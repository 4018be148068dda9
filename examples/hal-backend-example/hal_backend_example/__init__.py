"""The manifest of `example`: data alone, so that listing backends imports no framework."""

from hal.registry import Backend, Impl, hookimpl


@hookimpl
def hal_backend() -> Backend:
    return Backend(
        name="example",
        api=1,
        lanes={"device": ("cpu",)},
        ops={"get_last_loc": Impl("hal_backend_example.kernels:get_last_loc", deterministic=True)},
        requires=("numpy>=1.26",),
    )
