"""The signatures of the dispatched ops, for type checkers and editors alone: `hal.<op>` is generated.

Written by ci/docs from the contracts.
"""

from collections.abc import Iterator

from torch import Tensor

from hal.kv.pool import KVPool

def get_last_loc(
    req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor, *, backend: str | None = None
) -> Tensor: ...
def assign_extend_cache_locs(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    start_offsets: Tensor,
    end_offsets: Tensor,
    out: Tensor,
    *,
    backend: str | None = None,
) -> Tensor: ...
def rope_kv_write(
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
    backend: str | None = None,
) -> None: ...
def kv_transfer(
    src: KVPool,
    dst: KVPool,
    src_slots: Tensor,
    dst_slots: Tensor,
    *,
    layers: range | None = None,
    method: str = "auto",
    backend: str | None = None,
) -> None: ...
def write_req_to_token(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    start_offsets: Tensor,
    end_offsets: Tensor,
    src: Tensor,
    *,
    backend: str | None = None,
) -> None: ...
def compute_positions(
    prefix_lens: Tensor, seq_lens: Tensor, out: Tensor, indptr: Tensor | None = None, *, backend: str | None = None
) -> Tensor: ...
def build_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: Tensor,
    kv_indptr: Tensor | None,
    out: Tensor,
    kv_start: Tensor | None = None,
    *,
    given_indptr: Tensor | None = None,
    backend: str | None = None,
) -> Tensor: ...
def build_kv_indices_from_blocks(
    block_table: Tensor,
    kv_lens: Tensor,
    page_size: int,
    kv_indptr: Tensor,
    out: Tensor,
    kv_start: Tensor | None = None,
    *,
    keep_last: int = -1,
    backend: str | None = None,
) -> Tensor: ...
def build_page_table(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: Tensor,
    page_size: int,
    out: Tensor,
    *,
    backend: str | None = None,
) -> Tensor: ...
def alloc_extend(
    prefix_lens: Tensor,
    seq_lens: Tensor,
    last_loc: Tensor,
    free_pages: Tensor,
    page_size: int,
    out: Tensor,
    *,
    backend: str | None = None,
) -> Tensor: ...
def alloc_decode(
    seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int, out: Tensor, *, backend: str | None = None
) -> Tensor: ...
def kv_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    backend: str | None = None,
) -> None: ...
def mla_kv_write(
    kv_lora: Tensor,
    k_rope: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    *,
    kv_scale: float | Tensor | None = None,
    backend: str | None = None,
) -> None: ...
def mla_rope_kv_write(
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
    backend: str | None = None,
) -> None: ...
def qk_norm_rope_kv_write(
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
    backend: str | None = None,
) -> None: ...
def kv_move(
    pool: KVPool,
    src_slots: Tensor,
    dst_slots: Tensor,
    workspace: Tensor,
    *,
    layers: range | None = None,
    backend: str | None = None,
) -> None: ...
def decode_attention(
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
    backend: str | None = None,
) -> Tensor: ...
def extend_attention(
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
    backend: str | None = None,
) -> Tensor: ...

class TorchOps:
    """What `hal.torch_ops` returns."""

    get_last_loc = staticmethod(get_last_loc)
    assign_extend_cache_locs = staticmethod(assign_extend_cache_locs)
    rope_kv_write = staticmethod(rope_kv_write)
    kv_transfer = staticmethod(kv_transfer)
    write_req_to_token = staticmethod(write_req_to_token)
    compute_positions = staticmethod(compute_positions)
    build_kv_indices = staticmethod(build_kv_indices)
    build_kv_indices_from_blocks = staticmethod(build_kv_indices_from_blocks)
    build_page_table = staticmethod(build_page_table)
    alloc_extend = staticmethod(alloc_extend)
    alloc_decode = staticmethod(alloc_decode)
    kv_write = staticmethod(kv_write)
    mla_kv_write = staticmethod(mla_kv_write)
    mla_rope_kv_write = staticmethod(mla_rope_kv_write)
    qk_norm_rope_kv_write = staticmethod(qk_norm_rope_kv_write)
    kv_move = staticmethod(kv_move)
    decode_attention = staticmethod(decode_attention)
    extend_attention = staticmethod(extend_attention)
    def __iter__(self) -> Iterator[str]: ...
