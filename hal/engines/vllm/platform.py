"""What vLLM's platform for CPUs takes from latent attention, since its own kernel there lacks it; hal's does not."""

from __future__ import annotations

import functools
from typing import Any

from vllm.platforms import current_platform


def on() -> None:
    """Without AMX vLLM's latent attention has no prefix caching, no prompts in chunks, and blocks of 16 alone. A choice
    of these stays what it was before the platform looked at it; a size of blocks that nobody has chosen is vLLM's."""
    platform = type(current_platform)
    update = platform.check_and_update_config
    if not current_platform.is_cpu() or hasattr(update, "of_hal"):
        return

    @functools.wraps(update)
    def updated(cls: Any, config: Any) -> None:
        cache, scheduler, model = config.cache_config, config.scheduler_config, config.model_config
        chosen: list[tuple[Any, str, Any]] = []
        if model is not None and model.use_mla:
            fields = [(cache, "enable_prefix_caching")]
            fields += [(scheduler, name) for name in ("enable_chunked_prefill", "max_num_batched_tokens")]
            if getattr(cache, "user_specified_block_size", False):
                fields.append((cache, "block_size"))
            chosen = [(part, name, getattr(part, name)) for part, name in fields]
        update(config)
        for part, name, value in chosen:
            setattr(part, name, value)

    updated.of_hal = True  # type: ignore[attr-defined]
    platform.check_and_update_config = classmethod(updated)
