"""Serving engines on hal: an adapter a folder, loaded by the engine it is for, never by `import hal`.

Installed is not switched on: ``HAL_ENGINES=vllm`` switches a whole adapter on, the engine's own flag what it names.
"""

from __future__ import annotations

from typing import Any

from hal.engines._engine import ENGINES, Engine, EngineError, asked, layer, require, states

__all__ = ["ENGINES", "Engine", "EngineError", "asked", "join_parts", "join_sinks", "layer", "require", "states"]


def __getattr__(name: str) -> Any:
    # torch is imported by whoever attends, not by `hal info`.
    if name in ("join_parts", "join_sinks"):
        from hal.engines import _softmax

        return getattr(_softmax, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
