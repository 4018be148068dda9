"""`transfer_kv_*`: rows between pools, on `kv_transfer`. All of them copy bytes, whatever the dtype.

Layers are a list of tensors, or SGLang's uint64 table of their addresses, whose sizes are asked of the allocators
(`_addresses`). Slots are on the CPU, or all on the pools' device; of two devices, they are brought to the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import hal
from hal.engines.sglang.kernels._addresses import layers_at

Layers = Sequence[Tensor] | Tensor
"""A list of them, or a table ``[layers]`` uint64 of their addresses."""


def transfer_kv_per_layer(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Rows of `item_size` bytes of one layer, k and v, from slots to slots.

    Example:
        >>> import torch
        >>> src, dst = torch.arange(8.0).view(4, 2), torch.zeros(4, 2)
        >>> v = dst.clone()
        >>> transfer_kv_per_layer(src, dst, src, v, torch.tensor([3]), torch.tensor([1]), item_size=8)
        >>> dst[1].tolist()
        [6.0, 7.0]
    """
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size)


def transfer_kv_per_layer_mla(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Likewise, of one buffer."""
    _copy([_rows(src, item_size)], [_rows(dst, item_size)], src_indices, dst_indices)


def transfer_kv_all_layer(
    src_k_layers: Layers,
    dst_k_layers: Layers,
    src_v_layers: Layers,
    dst_v_layers: Layers,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Rows of all layers, k and v."""
    for src, dst in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        transfer_kv_all_layer_mla(src, dst, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_all_layer_mla(
    src_layers: Layers,
    dst_layers: Layers,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Likewise, of one buffer a layer."""
    src, dst = (
        _layers("transfer_kv_all_layer_mla", layers, item_size, num_layers) for layers in (src_layers, dst_layers)
    )
    _copy(src, dst, src_indices, dst_indices)


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Rows of one layer out of a page_first buffer (`src_layout_dim` bytes a slot), k and v."""
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla_pf_lf(src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim)


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Likewise, of one buffer."""
    layer = _page_first(src, item_size, src_layout_dim)[:, layer_id]
    _copy([layer], [_rows(dst, item_size)], src_indices, dst_indices)


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Layers,
    dst_k: Tensor,
    src_v_layers: Layers,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Rows of all layers into a page_first buffer, k and v."""
    for src, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(src, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Layers,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Likewise, of one buffer a layer."""
    src = _layers("transfer_kv_all_layer_mla_lf_pf", src_layers, item_size, num_layers)
    pages = _page_first(dst, item_size, dst_layout_dim)
    _copy(src, [pages[:, i] for i in range(num_layers)], src_indices, dst_indices)


def transfer_kv_per_layer_ph_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Rows of one layer out of a page_head buffer, k and v."""
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        pages = _page_head(src, item_size, src_layout_dim, page_size, head_num)
        layer = pages[:, :, :, layer_id : layer_id + 1]
        _move(
            hal.KVPool(layer, layout="page_head", page_size=page_size),
            hal.KVPool([_rows(dst, item_size, head_num)]),
            src_indices,
            dst_indices,
        )


def transfer_kv_all_layer_lf_ph(
    src_k_layers: Layers,
    dst_k: Tensor,
    src_v_layers: Layers,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
    block_quota: int = 2,
    num_warps_per_block: int = 32,
) -> None:
    """Rows of all layers into a page_head buffer, k and v."""
    for src, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        layers = _layers("transfer_kv_all_layer_lf_ph", src, item_size, num_layers, head_num)
        pages = _page_head(dst, item_size, dst_layout_dim, page_size, head_num)
        _move(hal.KVPool(layers), hal.KVPool(pages, layout="page_head", page_size=page_size), src_indices, dst_indices)


def transfer_kv_direct(
    src_layers: Layers, dst_layers: Layers, src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> None:
    """Rows of each tensor of a list to the tensor beside it. `page_size` says nothing: runs are found in the slots."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        size = src[0].numel() * src.element_size()
        _copy([_rows(src, size)], [_rows(dst, size)], src_indices, dst_indices)


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Layers, dst_ptrs: Layers, src_indices: Tensor, dst_indices: Tensor, layer_id: int, page_size: int
) -> None:
    """Rows of one layer out of page_first_direct buffers ``[P, L, page_size, ...]``: k and v, or one alone."""
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        _direct(src[:, layer_id : layer_id + 1], [dst], src_indices, dst_indices, page_size, load=True)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Layers, dst_ptrs: Layers, src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> None:
    """Rows of all layers, all of k and then all of v, into page_first_direct buffers: as many as `dst_ptrs`."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for i, dst in enumerate(dst_ptrs):
        own = src_ptrs[i * layers : (i + 1) * layers]
        _direct(dst, own, dst_indices, src_indices, page_size, load=False)


def transfer_hicache_one_layer(
    k_cache_dst: Tensor,
    v_cache_dst: Tensor,
    indices_dst: Tensor,
    k_cache_src: Tensor,
    v_cache_src: Tensor,
    indices_src: Tensor,
    *,
    element_dim: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
) -> None:
    """Rows of `element_dim` elements of one layer, k and v; a cache's rows may be parts of longer ones."""
    for dst, src in ((k_cache_dst, k_cache_src), (v_cache_dst, v_cache_src)):
        transfer_hicache_one_layer_mla(dst, indices_dst, src, indices_src, element_dim=element_dim)


def transfer_hicache_one_layer_mla(
    cache_dst: Tensor,
    indices_dst: Tensor,
    cache_src: Tensor,
    indices_src: Tensor,
    *,
    element_dim: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
) -> None:
    """Likewise, of one buffer."""
    dim = element_dim or cache_dst.shape[-1]
    _copy([cache_src.view(-1, 1, dim)], [cache_dst.view(-1, 1, dim)], indices_src, indices_dst)


def transfer_hicache_all_layer(
    k_ptr_dst: Tensor,
    v_ptr_dst: Tensor,
    indices_dst: Tensor,
    k_ptr_src: Tensor,
    v_ptr_src: Tensor,
    indices_src: Tensor,
    *,
    kv_cache_src_stride_bytes: int,
    kv_cache_dst_stride_bytes: int,
    element_size: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
) -> None:
    """Rows of `element_size` bytes of all layers, k and v, by tables of addresses; rows are so many bytes apart."""
    for dst, src in ((k_ptr_dst, k_ptr_src), (v_ptr_dst, v_ptr_src)):
        transfer_hicache_all_layer_mla(
            dst,
            indices_dst,
            src,
            indices_src,
            cache_src_stride_bytes=kv_cache_src_stride_bytes,
            cache_dst_stride_bytes=kv_cache_dst_stride_bytes,
            element_size=element_size,
        )


def transfer_hicache_all_layer_mla(
    ptr_dst: Tensor,
    indices_dst: Tensor,
    ptr_src: Tensor,
    indices_src: Tensor,
    *,
    cache_src_stride_bytes: int,
    cache_dst_stride_bytes: int,
    element_size: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
) -> None:
    """Likewise, of one buffer a layer."""
    size = element_size or cache_dst_stride_bytes
    src, dst = (
        [rows[..., :size] for rows in _layers("transfer_hicache_all_layer_mla", table, stride, table.shape[0])]
        for table, stride in ((ptr_src, cache_src_stride_bytes), (ptr_dst, cache_dst_stride_bytes))
    )
    _copy(src, dst, indices_src, indices_dst)


def _direct(pages: Tensor, layers: Layers, page_slots: Tensor, slots: Tensor, page_size: int, load: bool) -> None:
    paged = hal.KVPool(pages, layout="page_first_direct", page_size=page_size)
    flat = hal.KVPool([t.view(t.shape[0], *pages.shape[3:]) for t in layers])
    if load:
        _move(paged, flat, page_slots, slots)
    else:
        _move(flat, paged, slots, page_slots)


def _copy(src: Sequence[Tensor], dst: Sequence[Tensor], src_indices: Tensor, dst_indices: Tensor) -> None:
    _move(hal.KVPool(src), hal.KVPool(dst), src_indices, dst_indices)


def _move(src: hal.KVPool, dst: hal.KVPool, src_indices: Tensor, dst_indices: Tensor) -> None:
    if src_indices.device != dst_indices.device:
        src_indices, dst_indices = src_indices.cpu(), dst_indices.cpu()
    hal.kv_transfer(src, dst, src_indices, dst_indices)


def _layers(function: str, layers: Layers, item_size: int, count: int, heads: int = 1) -> list[Tensor]:
    """The rows of each layer, ``[slots, heads, bytes]``."""
    if isinstance(layers, Tensor) and layers.dtype == torch.uint64:
        layers = layers_at(function, layers, item_size, count)
    return [_rows(t, item_size, heads) for t in layers[:count]]


def _rows(t: Tensor, item_size: int, heads: int = 1) -> Tensor:
    """``[slots, heads, bytes]`` of a contiguous tensor."""
    return t.view(-1).view(torch.uint8).view(-1, heads, item_size // heads)


def _page_first(t: Tensor, item_size: int, layout_dim: int) -> Tensor:
    """``[slots, layers, 1, bytes]``."""
    return t.view(-1).view(torch.uint8).view(-1, layout_dim // item_size, 1, item_size)


def _page_head(t: Tensor, item_size: int, layout_dim: int, page_size: int, heads: int) -> Tensor:
    """``[pages, heads, page_size, layers, bytes]``."""
    rows = t.view(-1).view(torch.uint8)
    return rows.view(-1, heads, page_size, layout_dim // item_size, item_size // heads)
