"""Measured tables for the machine at hand: made by `hal tune` or warm-up, read by the backends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hal._env import cache_dir


def folder() -> Path:
    """Where tables are kept: ``HAL_CACHE_DIR``, or its default."""
    return Path(cache_dir())


def path(op: str, device: int) -> Path:
    """The file of one op's table for one device: by its name, the driver and Triton's version."""
    import torch
    import triton

    name = torch.cuda.get_device_name(device).replace(" ", "-")
    return folder() / f"{op}-{name}-cuda{torch.version.cuda}-triton{triton.__version__}.json"


def load(op: str, device: int) -> Any:
    """The table that `save` wrote, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        return json.loads(path(op, device).read_text())["costs"]
    except (OSError, ValueError, KeyError):
        return None


def save(op: str, device: int, costs: Any) -> Path:
    """Write a table whole or not at all; returns where."""
    file = path(op, device)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}.tmp")
    part.write_text(json.dumps({"costs": costs}, indent=1))
    part.replace(file)
    return file
