"""A plugin whose requirement is not installed: absent, with the command that would bring it."""

from hal.registry import Backend, Impl, hookimpl


@hookimpl
def hal_backend() -> Backend:
    return Backend(
        name="missing-requirement",
        api=1,
        lanes={"device": ("cpu",)},
        ops={"get_last_loc": Impl("hal_backend_missing_requirement.kernels:get_last_loc")},
        requires=("hal-vendor-runtime>=2",),
    )
