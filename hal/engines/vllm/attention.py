"""vLLM's attention on hal: `decode_attention`, `extend_attention`, `kv_write`, and `rope_kv_write` where rope is fused.

vLLM's cache is ``[blocks, kv_heads, block_size, 2 head_dim]``, in memory as the platform lays it out; hal reads and
writes it through two strided views ``[blocks, block_size, kv_heads, head_dim]``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType, MultipleOf

import hal
from hal import _host
from hal.engines.vllm import fuse, limits
from hal.engines.vllm.step import Step, StepBuilder

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def options_of(scale: float, sliding_window: int | None, logits_soft_cap: float | None) -> dict[str, Any]:
    """The attention ops' keyword arguments. vLLM's window counts the token itself."""
    window = -1 if sliding_window is None else sliding_window - 1
    return {"scale": scale, "sliding_window": window, "logit_cap": float(logits_soft_cap or 0.0)}


class SharedAnswers:
    """What both of hal's backends answer to vLLM's selector. What hal lacks they answer by the reason."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 0 < head_size <= 576

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, *args: Any, **kwargs: Any
    ) -> str | None:
        stored = getattr(torch, kv_cache_dtype or "", None)
        if isinstance(stored, torch.dtype) and stored != dtype:
            return f"a KV cache of {kv_cache_dtype} beside a model of {dtype}: hal has the model's dtype or fp8"
        reasons = limits.of_config(get_current_vllm_config())
        return "; ".join(reasons) or None


class HalAttentionBackend(SharedAnswers, AttentionBackend):
    """What vLLM's selector asks."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = limits.KV_DTYPES

    @staticmethod
    def get_impl_cls() -> type[HalAttentionImpl]:
        return HalAttentionImpl

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return bool(attn_type == AttentionType.DECODER)

    # vLLM before 0.30 or so asks the backend for the cache's shape; later ones have this shape for all.

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        heads_first = get_kv_cache_layout() == "HND"
        if include_num_layers_dimension:
            return (1, 2, 0, 3, 4) if heads_first else (1, 0, 3, 2, 4)
        return (0, 1, 2, 3) if heads_first else (0, 2, 1, 3)


class HalAttentionImpl(AttentionImpl[Step]):
    """One layer's attention."""

    supports_pcp: bool = False
    supports_dcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        config = get_current_vllm_config()
        reasons = limits.of_layer(
            kv_cache_dtype=kv_cache_dtype, attn_type=attn_type, alibi_slopes=alibi_slopes, **others
        )
        limits.check_config(config, reasons)
        self.num_heads, self.head_size = num_heads, head_size
        # vLLM loads its values later.
        self.sinks = sinks
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.fp8 = FP8.get(kv_cache_dtype)
        self.options = options_of(self.scale, sliding_window, logits_soft_cap)
        self.dtype = torch.get_default_dtype()
        self._cache: Tensor | None = None
        fuse.enable(config)

    def bind(self, spec: Any, device: torch.device) -> None:
        """Chooses who runs this layer's ops, by examples of its calls.

        Raises:
            NoBackendError: nobody can; the error says who was asked, and why not.
        """
        example = _host.zeros(2, self.num_kv_heads, spec.block_size, 2 * self.head_size, dtype=self.dtype)
        if self.fp8 is not None:
            example = example.to(self.fp8)
        k, v = self._views(example.to(device))
        # Parts of one projection, as models make them.
        heads = self.num_heads + 2 * self.num_kv_heads
        qkv = torch.zeros(2, heads, self.head_size, dtype=self.dtype, device=device)
        q, new, _ = qkv.split_with_sizes([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        out = torch.zeros(2, self.num_heads, self.head_size, dtype=self.dtype, device=device)
        index = torch.zeros(3, dtype=torch.int32, device=device)
        slot = torch.zeros(2, dtype=torch.int64, device=device)
        one = torch.ones((), dtype=torch.float32, device=device)
        scales = {} if self.fp8 is None else {"k_scale": one, "v_scale": one}
        options = {**self.options, **scales}
        if self.sinks is not None:
            options["lse"] = torch.zeros(2, self.num_heads, dtype=torch.float32, device=device)
        cos_sin = torch.zeros(1, self.head_size // 2 * 2, dtype=self.dtype, device=device)
        self.ops = hal.bind(
            device,
            like={
                "decode_attention": {"q": q, "k_cache": k, "v_cache": v, "kv_indptr": index, "kv_indices": index,
                                     "out": out, **options},
                "extend_attention": {"q": q, "k_cache": k, "v_cache": v, "qo_indptr": index, "kv_indptr": index,
                                     "kv_indices": index, "out": out, **options},
                "kv_write": {"k": new, "v": new, "k_cache": k, "v_cache": v, "slots": slot, **scales},
                "rope_kv_write": {"q": q, "k": new, "v": new, "cos_sin_cache": cos_sin, "positions": slot,
                                  "k_cache": k, "v_cache": v, "slots": slot, **scales},
            },
        )  # fmt: skip

    def _views(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        if self.fp8 is not None and kv_cache.dtype != self.fp8:
            kv_cache = kv_cache.view(self.fp8)
        rows = kv_cache.transpose(1, 2)
        return rows[..., : self.head_size], rows[..., self.head_size :]

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """The views of vLLM's cache, made once for as long as it stays."""
        if kv_cache is not self._cache:
            self._cache, self._k, self._v = kv_cache, *self._views(kv_cache)
        return self._k, self._v

    def _scales(self, layer: Any) -> dict[str, Any]:
        return {} if self.fp8 is None else {"k_scale": layer._k_scale, "v_scale": layer._v_scale}

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("hal's attention writes no quantized output")
        if attn_metadata is None:  # vLLM measures its memory
            return output.fill_(0)
        k, v = self._caches(kv_cache)
        attn_metadata.attend(self.ops, query, k, v, output, self.sinks, **self.options, **self._scales(layer))
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        n = slot_mapping.shape[0]
        k, v = self._caches(kv_cache)
        self.ops.kv_write(key[:n], value[:n], k, v, slot_mapping, **self._scales(layer))

    def fused_rope_kvcache_supported(self) -> bool:
        return True

    def do_rope_and_kv_cache_update(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        is_neox: bool,
        kv_cache: Tensor,
        layer_slot_mapping: Tensor,
    ) -> None:
        n = layer_slot_mapping.shape[0]
        k, v = self._caches(kv_cache)
        self.ops.rope_kv_write(
            query[:n],
            key[:n],
            value[:n],
            cos_sin_cache,
            positions[:n],
            k,
            v,
            layer_slot_mapping,
            interleaved=not is_neox,
            **self._scales(layer),
        )
