"""vLLM's latent attention (MLA, as DeepSeek's) on hal: over the latent rows, or over keys and values of heads.

Over the latent rows, the projections of k and v are folded into q and the output: for all whose request multiplies less
so (`unfold`). vLLM's layer would do that for what it calls decode tokens; here it calls none so, and hands over all of
them as they are, so that one product makes the latent query whole, in the memory that attention reads it from. Of the
others, new and cached latents are read from the same rows of the cache, so a prompt, its chunks and a cached prefix are
one case either way.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl

import hal
from hal import _host
from hal.engines.vllm import fuse, limits
from hal.engines.vllm.attention import FP8, SharedAnswers, options_of
from hal.engines.vllm.mla_step import MLAStep, MLAStepBuilder
from hal.engines.vllm.unfold import Widths


class HalMLABackend(SharedAnswers, MLACommonBackend):
    """What vLLM's selector asks."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [d for d in limits.KV_DTYPES if d != "fp8_e5m2"]

    @staticmethod
    def get_impl_cls() -> type[HalMLAImpl]:
        return HalMLAImpl

    @staticmethod
    def get_builder_cls() -> type[MLAStepBuilder]:
        return MLAStepBuilder


class HalMLAImpl(MLAAttentionImpl[MLAStep]):
    """One layer's attention."""

    supports_pcp: bool = False
    supports_dcp: bool = False
    is_sparse: ClassVar[bool] = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: object | None = None,
        q_pad_num_heads: int | None = None,
        **others: Any,
    ) -> None:
        reasons = limits.of_layer(
            kv_cache_dtype=kv_cache_dtype,
            attn_type=attn_type or AttentionType.DECODER,
            alibi_slopes=alibi_slopes,
            sparse_attention=indexer,
            sharing_of_latent_rows=kv_sharing_target_layer_name,
            **others,
        )
        config = get_current_vllm_config()
        limits.check_config(config, reasons)
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, 1
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
        self.widths = Widths(kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim)
        self.kv_b_proj = kv_b_proj
        self.fp8 = FP8.get(kv_cache_dtype)
        self.options = options_of(self.scale, sliding_window, logits_soft_cap)
        self.dtype = torch.get_default_dtype()
        self._seen: Any = None
        fuse.enable(config)

    def bind(self, spec: Any, device: torch.device) -> None:
        """Chooses who runs this layer's ops, by examples of its calls.

        Raises:
            NoBackendError: nobody can; the error says who was asked, and why not.
        """
        rows = _host.zeros(2, spec.block_size, self.head_size, dtype=self.dtype)
        rows = rows.to(device) if self.fp8 is None else rows.to(self.fp8).to(device)
        k = rows.unsqueeze(2)
        v = k[..., : self.kv_lora_rank]
        q = torch.zeros(1, self.num_heads, self.head_size, dtype=self.dtype, device=device)
        out = torch.zeros(1, self.num_heads, self.kv_lora_rank, dtype=self.dtype, device=device)
        index = torch.zeros(2, dtype=torch.int32, device=device)
        one = torch.ones((), dtype=torch.float32, device=device)
        scales = {} if self.fp8 is None else {"k_scale": one, "v_scale": one}
        attend = {
            "q": q,
            "k_cache": k,
            "v_cache": v,
            "kv_indptr": index,
            "kv_indices": index,
            "out": out,
            **self.options,
            **scales,
        }
        lora = torch.zeros(1, self.kv_lora_rank, dtype=self.dtype, device=device)
        write = {
            "kv_lora": lora,
            "k_rope": q[:, 0, : self.qk_rope_head_dim],
            "kv_cache": rows,
            "slots": torch.zeros(1, dtype=torch.int64, device=device),
        }
        if self.fp8 is not None:
            write["kv_scale"] = one
        rope = self.qk_rope_head_dim
        table = torch.zeros(1, rope, dtype=self.dtype, device=device)
        self.ops = hal.bind(
            device,
            like={
                "decode_attention": attend,
                "extend_attention": {**attend, "qo_indptr": index},
                "mla_kv_write": write,
                "mla_rope_kv_write": {
                    **write,
                    "q_rope": q[..., -rope:],
                    "cos_sin_cache": table,
                    "positions": write["slots"],
                },
            },
        )
        kv = torch.zeros(2, self.num_heads, self.widths.nope + self.widths.v, dtype=self.dtype, device=device)
        k, v = self._heads(kv, write["k_rope"].expand(2, -1))
        pool = _pool(rows)
        self.unfolded = hal.bind(
            device,
            like={
                "extend_attention": {
                    "q": k,
                    "k_cache": k,
                    "v_cache": v,
                    "qo_indptr": index,
                    "kv_indptr": index,
                    "kv_indices": index,
                    "out": v.contiguous(),
                    **self.options,
                },
                "kv_transfer": {"src": pool, "dst": pool, "src_slots": index, "dst_slots": index},
            },
        )

    def _heads(self, kv: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of heads: of the projection of latents ``[n, heads, nope + v]``, and ``[n, rope]``."""
        nope = self.widths.nope
        k = kv.new_empty(*kv.shape[:2], nope + self.widths.rope)
        _copy(k[..., :nope], kv[..., :nope])
        _copy(k[..., nope:], k_rope.unsqueeze(1).expand(-1, kv.shape[1], -1))
        return k, kv[..., nope:]

    def fold(self, layer: Any) -> None:
        """Reads the layer's weights, once: the query's projection with a unit matrix beside it, for its rotated part.

        The layer's own weight becomes a view of that, as vLLM writes new weights into the place of the old ones.
        """
        if hasattr(self, "_layer"):
            return
        w, given, self._layer = self.widths, layer.W_UK_T, layer
        self._fold = given.new_zeros(self.num_heads, w.nope + w.rope, w.lora + w.rope)
        self._fold[:, : w.nope, : w.lora] = given.data
        self._fold[:, w.nope :, w.lora :] = torch.eye(w.rope, dtype=given.dtype, device=given.device)
        given.data = self._fold[:, : w.nope, : w.lora]

    def forward_mqa(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError("hal's latent attention is called for all tokens at once, by forward_mha")

    def _latent(self, q: Tensor, kv_cache: Tensor, step: MLAStep, k_scale: Tensor, output: Tensor) -> None:
        """Over the latent rows: q ``[n, heads, nope + rope]``, output ``[n, heads, v]``."""
        wide = q.new_empty(q.shape[0], self.num_heads, self.head_size)
        torch.bmm(q.transpose(0, 1), self._fold, out=wide.transpose(0, 1))
        k = self._rows(kv_cache).unsqueeze(2)
        out = q.new_empty(q.shape[0], self.num_heads, self.kv_lora_rank)
        scales = {} if self.fp8 is None else {"k_scale": k_scale, "v_scale": k_scale}
        step.attend(self.ops, wide, k, k[..., : self.kv_lora_rank], out, **self.options, **scales)
        torch.bmm(out.transpose(0, 1), self._layer.W_UV, out=output.transpose(0, 1))

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        if kv_cache.numel():
            rows, slots, scale = self._place(kv_cache, slot_mapping, k_scale)
            n = slots.shape[0]
            self.ops.mla_kv_write(kv_c_normed[:n], k_pe[:n], rows, slots, **scale)

    def do_rope_and_kv_cache_update(
        self,
        query: Tensor,
        key: Tensor,
        latents: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        is_neox: bool,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor,
    ) -> None:
        if kv_cache.numel():
            rows, slots, scale = self._place(kv_cache, slot_mapping, k_scale)
            n = slots.shape[0]
            self.ops.mla_rope_kv_write(
                query[:n, :, self.widths.nope :],
                key[:n],
                latents[:n],
                cos_sin_cache,
                positions[:n],
                rows,
                slots,
                interleaved=not is_neox,
                **scale,
            )

    def _place(self, kv_cache: Tensor, slot_mapping: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """(the cache's rows, slots, what a cache of fp8 is divided by)."""
        return self._rows(kv_cache), slot_mapping.flatten(), {} if self.fp8 is None else {"kv_scale": k_scale}

    def _rows(self, kv_cache: Tensor) -> Tensor:
        return kv_cache if self.fp8 in (None, kv_cache.dtype) else kv_cache.view(self.fp8)

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLAStep,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
        **others: Any,
    ) -> None:
        if output_scale is not None:
            raise NotImplementedError("hal's attention writes no quantized output")
        workspace, latent = attn_metadata.workspace, attn_metadata.latent_tokens
        out = output.view(-1, self.num_heads, self.widths.v)
        if latent:
            self._latent(q[:latent], kv_c_and_k_pe_cache, attn_metadata, k_scale, out[:latent])
            q, out = q[latent:], out[latent:]
        pool = self._cached(kv_c_and_k_pe_cache)
        for g in attn_metadata.groups:
            places = workspace.places[: g.rows]
            self.unfolded.kv_transfer(pool, workspace.pool, g.slots, places)
            rows = workspace.rows[: g.rows]
            if self.fp8 is not None:
                rows = (rows.to(q.dtype) * k_scale).to(q.dtype)
            latents, k_rope = rows.split_with_sizes([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
            k, v = self._heads(self.kv_b_proj(latents)[0].view(g.rows, self.num_heads, -1), k_rope)
            mine = slice(g.begin, g.end)
            lists = g.qo_indptr, g.kv_indptr, places
            self.unfolded.extend_attention(q[mine], k, v, *lists, out[mine], **self.options)

    def _cached(self, kv_cache: Tensor) -> hal.KVPool:
        """vLLM's cache as a pool, made once for as long as it stays."""
        rows = self._rows(kv_cache)
        seen = rows.data_ptr(), rows.shape, rows.stride()
        if self._seen != seen:
            self._seen, self._pool = seen, _pool(rows)
        return self._pool


def _copy(to: Tensor, of: Tensor) -> None:
    """As 16 bytes at a time where they lie so: what is not in one piece torch copies by elements."""
    wide = torch.complex128
    n = wide.itemsize // to.itemsize
    if not any(m % n for x in (to, of) for m in (x.shape[-1], x.storage_offset(), *x.stride()[:-1])):
        to, of = to.view(wide), of.view(wide)
    to.copy_(of)


def _pool(rows: Tensor) -> hal.KVPool:
    """Rows ``[blocks, block_size, width]`` of one layer."""
    return hal.KVPool(rows.unsqueeze(1), layout="page_first_direct", page_size=rows.shape[1])
