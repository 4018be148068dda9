"""A plugin written for another version of the plugin interface: incompatible."""

from hal.registry import API, Backend, hookimpl


@hookimpl
def hal_backend() -> Backend:
    return Backend(name="other-api", lanes={"device": ("cpu",)}, ops={}, api=API + 1)
