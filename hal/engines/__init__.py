"""Serving engines on hal: an adapter a folder, loaded by the engine it is for, never by `import hal`.

Installed is not switched on: ``HAL_ENGINES=vllm`` switches a whole adapter on, the engine's own flag what it names.
"""

from __future__ import annotations

from hal.engines._engine import ENGINES, Engine, EngineError, asked, layer, require, states

__all__ = ["ENGINES", "Engine", "EngineError", "asked", "layer", "require", "states"]
