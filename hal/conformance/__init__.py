"""The conformance suite: the same tests on every backend, generated from the op contracts.

    hal conformance cpu                       # judge an installed backend
    hal conformance mine --import my_kernels  # one that is not packaged yet
    hal conformance cpu --certify --report out/
    pytest --pyargs hal.conformance --hal-backend cpu   # while developing; never certifies

It ships in the wheel. Importing this package imports the standard library alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal.conformance._run import main, replay, replay_case
    from hal.conformance._writers import Report

__all__ = ["Report", "main", "replay", "replay_case"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hal.conformance' has no attribute {name!r}")
    from hal.conformance import _run

    return getattr(_run, name)
