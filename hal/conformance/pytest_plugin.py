"""The options of ``pytest --pyargs hal.conformance --hal-backend BACKEND``. Without them neither torch nor hal.ops is
imported."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("hal", "the conformance suite of hal-kernels")
    group.addoption("--hal-backend", metavar="BACKEND", help="the backend to judge")
    group.addoption("--hal-lane", default="device", metavar="LANE", help="device, interpreter or lowered")
    group.addoption("--hal-op", action="append", default=[], metavar="OP", help="only this op (may be repeated)")


@pytest.hookimpl(trylast=True)  # a conftest may register the backend
def pytest_configure(config: Any) -> None:
    """A name that does not exist is one line, not a failure of every case."""
    backend, lane = config.getoption("--hal-backend"), config.getoption("--hal-lane")
    if not backend:
        return
    from hal._errors import HalError
    from hal._remote.target import RegistryTarget
    from hal.registry import current

    try:
        RegistryTarget.of(backend, lane)
        for op in config.getoption("--hal-op"):
            current().spec(op)
    except HalError as e:
        raise pytest.UsageError(str(e).removeprefix("hal: ")) from None
