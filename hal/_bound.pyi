"""The signatures of the ops as `hal.bind` gives them: those of `hal.<op>` without ``backend``.

Written by ci/docs from the contracts.
"""

from torch import Tensor

from hal.kv.pool import KVPool

class Ops:
    def get_last_loc(self, req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor) -> Tensor: ...
    def assign_extend_cache_locs(
        self, req_to_token: Tensor, req_pool_indices: Tensor, start_offsets: Tensor, end_offsets: Tensor, out: Tensor
    ) -> Tensor: ...
    def rope_kv_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        cos_sin_cache: Tensor,
        positions: Tensor,
        k_cache: Tensor | None = None,
        v_cache: Tensor | None = None,
        slots: Tensor | None = None,
        *,
        interleaved: bool = False,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        write_k: bool = True,
    ) -> None: ...
    def kv_transfer(
        self,
        src: KVPool,
        dst: KVPool,
        src_slots: Tensor,
        dst_slots: Tensor,
        *,
        layers: range | None = None,
        method: str = "auto",
    ) -> None: ...
    def write_req_to_token(
        self, req_to_token: Tensor, req_pool_indices: Tensor, start_offsets: Tensor, end_offsets: Tensor, src: Tensor
    ) -> None: ...
    def compute_positions(
        self, prefix_lens: Tensor, seq_lens: Tensor, out: Tensor, indptr: Tensor | None = None
    ) -> Tensor: ...
    def build_kv_indices(
        self,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        kv_lens: Tensor,
        kv_indptr: Tensor | None,
        out: Tensor,
        kv_start: Tensor | None = None,
        *,
        given_indptr: Tensor | None = None,
    ) -> Tensor: ...
    def build_kv_indices_from_blocks(
        self,
        block_table: Tensor,
        kv_lens: Tensor,
        page_size: int,
        kv_indptr: Tensor,
        out: Tensor,
        kv_start: Tensor | None = None,
        *,
        keep_last: int = -1,
    ) -> Tensor: ...
    def build_page_table(
        self, req_to_token: Tensor, req_pool_indices: Tensor, kv_lens: Tensor, page_size: int, out: Tensor
    ) -> Tensor: ...
    def alloc_extend(
        self, prefix_lens: Tensor, seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int, out: Tensor
    ) -> Tensor: ...
    def alloc_decode(
        self, seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int, out: Tensor
    ) -> Tensor: ...
    def kv_write(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor,
        *,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
    ) -> None: ...
    def mla_kv_write(
        self,
        kv_lora: Tensor,
        k_rope: Tensor,
        kv_cache: Tensor,
        slots: Tensor,
        *,
        kv_scale: float | Tensor | None = None,
    ) -> None: ...
    def mla_rope_kv_write(
        self,
        q_rope: Tensor,
        k_rope: Tensor,
        kv_lora: Tensor,
        cos_sin_cache: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        slots: Tensor,
        *,
        interleaved: bool = False,
        kv_scale: float | Tensor | None = None,
        write_k: bool = True,
    ) -> None: ...
    def qk_norm_rope_kv_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        q_weight: Tensor,
        k_weight: Tensor,
        cos_sin_cache: Tensor,
        positions: Tensor,
        k_cache: Tensor | None = None,
        v_cache: Tensor | None = None,
        slots: Tensor | None = None,
        *,
        eps: float = 1e-6,
        interleaved: bool = False,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        write_k: bool = True,
    ) -> None: ...
    def kv_move(
        self, pool: KVPool, src_slots: Tensor, dst_slots: Tensor, workspace: Tensor, *, layers: range | None = None
    ) -> None: ...
    def decode_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        *,
        scale: float,
        sliding_window: int = -1,
        logit_cap: float = 0.0,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
    ) -> Tensor: ...
    def extend_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        *,
        scale: float,
        causal: bool = True,
        sliding_window: int = -1,
        logit_cap: float = 0.0,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
    ) -> Tensor: ...
