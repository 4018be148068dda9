"""What SGLang has for accelerators alone, or not for every model on a CPU; on the platform `hal_cpu` these stand in."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.rotary_embedding import factory
from torch import Tensor


def get_rope_wrapper(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    partial_rotary_factor: float = 1.0,
    device: str | None = None,
) -> Any:
    """The rotary embedding of DeepSeek's layers. SGLang's own has, on a CPU, those with YaRN alone."""
    given = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor)
    if rope_scaling is None:
        return factory.get_rope(*given)
    return factory.get_rope_cpu(*given, device)


def softcap_inplace_logits(full_logits: Tensor, final_logit_softcapping: float) -> Tensor:
    """Gemma's cap of the logits that tokens are chosen by; SGLang's own is a Triton kernel."""
    cap = final_logit_softcapping
    return full_logits.div_(cap).tanh_().mul_(cap)


def set_embed_and_head(self: Any, embed: Any, head: Any) -> None:
    """Of DeepSeek's models: the target's embedding and head, for its MTP layer. SGLang's own waits for CUDA."""
    self.model.embed_tokens.weight = embed
    self.lm_head.weight = head
