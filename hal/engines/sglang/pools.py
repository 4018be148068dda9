"""SGLang's KV pools with hal's writes: `kv_write`, and `mla_kv_write` for latent rows."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, unwrap_write_loc
from torch import Tensor

import hal
from hal import KVPool
from hal.engines.sglang import limits

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class HalMHAPool(MHATokenToKVPool):
    """k and v of each layer, ``[slots, heads, head_dim]``; SGLang's own buffers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reasons = []
        if self.is_quantized_kv_cache:
            reasons.append("a KV cache of 4 bits")
        if self.kv_cache_layout != "nhd":
            reasons.append(f"a KV cache of the layout {self.kv_cache_layout}")
        if reasons:
            raise limits.refusal(reasons)
        self.fp8 = self.dtype if self.dtype in FP8 else None

    def _init_kv_copy_and_warmup(self) -> None:
        """SGLang's own moves are a Triton kernel, which speculation has compiled at start."""

    def _move_kv_cache_impl(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        _move(KVPool(self.k_buffer, self.v_buffer), src_loc, tgt_loc)

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: Tensor,
        cache_v: Tensor,
        k_scale: Any = None,
        v_scale: Any = None,
        layer_id_override: int | None = None,
        dcp_kv_mask: Tensor | None = None,
    ) -> None:
        assert dcp_kv_mask is None, "context parallelism is refused at start"
        loc, _, _ = unwrap_write_loc(loc_info)
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        scales = {} if self.fp8 is None else {"k_scale": k_scale, "v_scale": v_scale}
        k_cache, v_cache = self._get_key_buffer(layer_id), self._get_value_buffer(layer_id)
        hal.kv_write(cache_k, cache_v, k_cache, v_cache, loc, **scales)


class HalMLAPool(MLATokenToKVPool):
    """The latent rows of each layer, ``[slots, 1, lora_dim + rope_dim]``; SGLang's own buffers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # 0.5.17 gives it to every platform's pool; its own does not know it.
        if kwargs.get("index_head_dim", True) is None:
            del kwargs["index_head_dim"]
        super().__init__(*args, **kwargs)
        if self.use_dsa:
            raise limits.refusal(["sparse attention (DSA)"])
        self.fp8 = self.dtype if self.dtype in FP8 else None

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        _move(KVPool(self.kv_buffer), src_loc, tgt_loc)

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Tensor, layer_id_override: int | None = None
    ) -> None:
        """Writes whole rows, ``[n, 1, lora_dim + rope_dim]``."""
        rank = self.kv_lora_rank
        self.set_mla_kv_buffer(layer, loc_info, cache_k[..., :rank], cache_k[..., rank:], layer_id_override)

    def set_mla_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k_nope: Tensor,
        cache_k_rope: Tensor,
        layer_id_override: int | None = None,
    ) -> None:
        loc, _, _ = unwrap_write_loc(loc_info)
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        rows = self.kv_buffer[layer_id - self.start_layer].squeeze(1)
        hal.mla_kv_write(cache_k_nope, cache_k_rope, rows if self.fp8 is None else rows.view(self.fp8), loc)


def _move(pool: KVPool, src: Tensor, dst: Tensor) -> None:
    row = max(plane.row_bytes for plane in pool.planes())
    hal.kv_move(pool, src, dst, torch.empty(src.shape[0] * row, dtype=torch.uint8, device=src.device))
