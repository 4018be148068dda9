"""What a call can stand in: torch's defaults as an engine sets them while it builds a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def _set_device(device: torch.device) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def _set_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def around(what: tuple[str, Any] | None) -> AbstractContextManager[Any]:
    """``("set-device", device)``, ``("with-device", device)``, ``("dtype", dtype)``; None: nothing."""
    if what is None:
        return nullcontext()
    kind, value = what
    if kind == "dtype":
        return _set_dtype(value)
    return _set_device(value) if kind == "set-device" else torch.device(value)
