"""`HalCache`: a cache for `generate` that hal writes, in place. Any attention can read it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

import hal


class HalCache(Cache):  # type: ignore[misc]
    """Keys and values of ``generate(past_key_values=HalCache())``, as rows of a slotted cache that grows by doubling.

    A new token costs its own row: transformers' `DynamicCache` copies all keys and values of every layer for it.
    Layers with a sliding window keep all tokens; their attention sees the window.

    Args:
        capacity: tokens a request that there is room for at first.

    Example:
        model.generate(**inputs, past_key_values=HalCache())
    """

    def __init__(self, capacity: int = 256) -> None:
        self.places = Places(capacity)
        super().__init__(layer_class_to_replicate=lambda: HalLayer(self.places))


class Places:
    """Which slots a step's tokens get: the same in every layer, so found once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = max(capacity, 1)
        self._table: Tensor | None = None
        self._known: tuple[Any, Tensor] | None = None

    def slots(self, requests: int, rows: int, start: int, end: int, device: torch.device) -> Tensor:
        """``[requests * (end - start)]``, where each request has `rows` slots."""
        key = requests, rows, start, end, device
        if self._known is None or self._known[0] != key:
            table = self._table
            if table is None or table.shape != (requests, rows) or table.device != device:
                table = torch.arange(requests * rows, dtype=torch.int32, device=device).view(requests, rows)
                self._table = table
            first = torch.full((requests,), start, dtype=torch.int32, device=device)
            last = torch.full((requests,), end, dtype=torch.int32, device=device)
            out = torch.empty(requests * (end - start), dtype=torch.int32, device=device)
            request = torch.arange(requests, dtype=torch.int32, device=device)
            self._known = key, hal.assign_extend_cache_locs(table, request, first, last, out)
        return self._known[1]


class HalLayer(DynamicLayer):  # type: ignore[misc]
    """One layer: ``keys`` and ``values`` are views ``[requests, kv_heads, tokens, dim]`` of what holds them."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places
        self._held: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes the new tokens' keys and values; returns those of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        requests, _, new, _ = key_states.shape
        end = start + new
        keys, values = self._room(key_states, value_states, end)
        slots = self.places.slots(requests, keys.shape[1], start, end, key_states.device)
        k, v = (x.transpose(1, 2).reshape(requests * new, *x.shape[1::2]) for x in (key_states, value_states))
        hal.kv_write(k, v, keys.flatten(0, 1), values.flatten(0, 1), slots)
        self.keys, self.values = (x[:, :end].transpose(1, 2) for x in (keys, values))
        return self.keys, self.values

    def _room(self, key_states: Tensor, value_states: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """``[requests, rows, kv_heads, dim]`` each, with room for `end` tokens and those before in their places."""
        held = self._held
        # Beam search and the like put tensors of their own in the place of our views.
        ours = held is not None and (self.keys.numel() == 0 or self.keys.data_ptr() == held[0].data_ptr())
        if held is not None and ours and held[0].shape[0] == key_states.shape[0] and held[0].shape[1] >= end:
            return held
        rows = self.places.capacity
        while rows < end:
            rows *= 2
        made = []
        for new, old in ((key_states, self.keys), (value_states, self.values)):
            requests, heads, _, dim = new.shape
            room = torch.zeros(requests, rows, heads, dim, dtype=new.dtype, device=new.device)
            if old.numel():
                room[:, : old.shape[2]] = old.transpose(1, 2)
            made.append(room)
        self._held = made[0], made[1]
        return self._held
