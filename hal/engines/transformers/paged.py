"""Continuous batching (`generate_batch`): transformers' paged cache is hal's, page for page."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import hal
from hal.engines._engine import EngineError
from hal.engines._softmax import join_sinks, room_for

SLIDING = "sliding_attention"


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Any,
    step: dict[str, Any],
    sinks: Tensor | None,
    values: Any,
) -> Tensor:
    """Writes the new keys and values to their slots, and attends over the slots of each request.

    Args:
        query: ``[1, q_heads, tokens, head_dim]``, the requests one after the other.
        key: ``[1, kv_heads, tokens, head_dim]``.
        value: likewise.
        cache: transformers' ``PagedAttentionCache``.
        step: what continuous batching hands to every layer.
        sinks: ``[q_heads]``, or None.
        values: the op's keyword arguments.
    """
    if step.get("block_table") is not None:
        raise EngineError(
            "hal: transformers: the decode fast path of flash attention was asked for; hal reads slots — "
            "ContinuousBatchingConfig(max_blocks_per_request=0)"
        )
    part = cache.layer_to_allocator[module.layer_idx]
    read, write = step["read_index"][part.index], step["write_index"][part.index]
    kv_indptr, qo_indptr = step["cu_seq_lens_k"][part.layer_type], step["cu_seq_lens_q"]
    window = -1
    if part.layer_type == SLIDING:
        # The window's slots are a ring: new tokens lie on top of what their own queries still see. transformers
        # itself puts both together, in the order of positions.
        window = part.sliding_window - 1
        both = cache.update(key, value, module.layer_idx, dict(step))
        k_cache, v_cache = (x[0].transpose(0, 1) for x in both)
        indices = _in_order(k_cache.shape[0], k_cache.device)
    else:
        k_cache, v_cache = part.get_cache_for_block_table(module.layer_idx)
        _same_heads(key, value, k_cache)
        hal.kv_write(key[0].transpose(0, 1), value[0].transpose(0, 1), k_cache, v_cache, write)
        # Where nothing is cached yet, a request's slots are those that its tokens have just been written to.
        indices = read if read.numel() else write
    q = query[0].transpose(0, 1)
    lse = room_for(q, sinks)
    values = {**values, "lse": lse, "sliding_window": window}
    if q.shape[0] == kv_indptr.shape[0] - 1 and step["max_length_q"] == 1:
        out = hal.decode_attention(q, k_cache, v_cache, kv_indptr, indices, **values)
    else:
        out = hal.extend_attention(q, k_cache, v_cache, qo_indptr, kv_indptr, indices, **values)
    return join_sinks(out, lse, sinks).unsqueeze(0)


def _same_heads(key: Tensor, value: Tensor, held: Tensor) -> None:
    """transformers sizes its paged cache by one head_dim; keys of latent attention have another."""
    if not key.shape[-1] == value.shape[-1] == held.shape[-1]:
        raise EngineError(
            f"hal: transformers: its paged cache has heads of {held.shape[-1]}; this model's keys have "
            f"{key.shape[-1]} and its values {value.shape[-1]} — use generate, which takes them"
        )


@functools.lru_cache(maxsize=8)
def _numbers(device: torch.device) -> list[Tensor]:
    return [torch.arange(1024, dtype=torch.int32, device=device)]


def _in_order(n: int, device: torch.device) -> Tensor:
    """0, 1, … n - 1."""
    held = _numbers(device)
    if held[0].shape[0] < n:
        held[0] = torch.arange(2 * n, dtype=torch.int32, device=device)
    return held[0][:n]


# --- what the public seams don't offer --------------------------------------------------------------


@dataclass(frozen=True)
class Patch:
    """One function of transformers that is wrapped.

    Args:
        module: where it is.
        path: ``Class.function``.
        signature: the parameters that it was read with.
        versions: those that it was read in.
        why: what transformers does without.
    """

    module: str
    path: str
    signature: tuple[str, ...]
    versions: str
    why: str


PATCHES = (
    Patch(
        "transformers.generation.continuous_batching.continuous_api",
        "ContinuousBatchingManager.switch_to_cb_friendly_attn",
        ("self", "model", "auto_switch_to_flash"),
        "5.23.0",
        "continuous batching takes no attention but its own: it refuses a registered name, or goes over to flash",
    ),
)


def apply_patches() -> None:
    """Wraps what `PATCHES` lists, once. All are looked at before any is applied.

    Raises:
        EngineError: one is not what it was read as.
    """
    found = [_verified(p) for p in PATCHES]
    for owner, name, original in found:
        if not hasattr(original, "_hal_original"):
            setattr(owner, name, _leaves_hal_alone(original))


def _verified(patch: Patch) -> tuple[Any, str, Any]:
    name, _, function = patch.path.partition(".")
    try:
        owner = getattr(import_module(patch.module), name)
        original = getattr(owner, function)
    except (ImportError, AttributeError) as e:
        raise EngineError(
            f"hal: transformers: there is no {patch.module}.{patch.path}, as in {patch.versions} ({e})"
        ) from None
    got = tuple(inspect.signature(original).parameters)
    if got != patch.signature:
        raise EngineError(
            f"hal: transformers: {patch.path} has the parameters {', '.join(got)}; in {patch.versions}, which it was "
            f"read in: {', '.join(patch.signature)}"
        )
    return owner, function, original


def _leaves_hal_alone(original: Any) -> Any:
    @functools.wraps(original)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation != "hal":
            original(self, model, *args, **kwargs)

    switch_to_cb_friendly_attn._hal_original = original  # type: ignore[attr-defined]
    return switch_to_cb_friendly_attn
