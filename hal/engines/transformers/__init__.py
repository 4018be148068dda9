"""transformers on hal: ``attn_implementation="hal"``, for `generate` and for `generate_batch` (continuous batching).

transformers has no plugin point of its own, so importing this module is what switches it on:

    import hal.engines.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="hal")

Models that name another implementation stay as they are. docs/engines.md says what is not supported; whatever that is
raises `hal.engines.EngineError` where it is asked for, and never runs as stock attention.
"""

from __future__ import annotations

from hal.engines._engine import EngineError, require

VERSION = require("transformers")

from hal.engines.transformers.attention import attention_forward  # noqa: E402
from hal.engines.transformers.cache import HalCache  # noqa: E402
from hal.engines.transformers.paged import apply_patches  # noqa: E402
from hal.engines.transformers.step import step_mask  # noqa: E402

NAME = "hal"

__all__ = ["NAME", "EngineError", "HalCache", "attention_forward", "step_mask"]


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    # What may fail comes first: never half switched on.
    apply_patches()
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, step_mask)


_register()
