"""The options of ``pytest --pyargs hal.conformance --hal-backend BACKEND``. Imports neither torch nor hal.ops."""

from __future__ import annotations

from typing import Any


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("hal", "the conformance suite of hal-kernels")
    group.addoption("--hal-backend", metavar="BACKEND", help="the backend to judge")
    group.addoption("--hal-lane", default="device", metavar="LANE", help="device, interpreter or lowered")
    group.addoption(
        "--hal-op", action="append", default=[], metavar="OP", help="only this op (may be repeated)"
    )
