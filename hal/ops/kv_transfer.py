"""kv_transfer: copies the KV rows of tokens between two pools, over all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal._errors import ArgumentError
from hal.kv.pool import KVPool
from hal.ops._checks import check_range
from hal.ops._torch import BITS, in_range, store_rows
from hal.ops.spec import INDEX, OpSpec, PoolArg, TensorArg, ValueArg, describe

METHODS = ("auto", "kernel", "direct")


def kv_transfer(
    src: KVPool, dst: KVPool, src_slots: Tensor, dst_slots: Tensor, *, layers: range | None = None, method: str = "auto"
) -> None:
    """Copies token rows from slots of one pool to slots of another, for all layers or a range of them.

    ``dst[layer, dst_slots[i]] = src[layer, src_slots[i]]``, bit for bit, in stream order. The pools may be on
    the device or the host, in different layouts and of different page sizes. A pair in which either slot is
    -1 or out of range is skipped. Equal `dst_slots`: each element is one of the candidates'. Rows that are
    both read and written in one call are undefined.

    Args:
        src: the pool to read. Layers, dtype, row and whether there is a v must be dst's.
        dst: the pool to write.
        src_slots: ``[n]`` int32 or int64, on the CPU, or on the device of the pools.
        dst_slots: ``[n]`` int32 or int64, on the same device as src_slots.
        layers: which layers, in steps of 1; None for all.
        method: ``kernel``: a kernel reads and writes the rows, host memory through pinned addresses; with slots
            on the device it syncs nothing and can be captured. ``direct``: the runtime's batched copies over
            runs of consecutive slots, staged where rows don't coalesce; slots on the CPU. ``auto``: the
            better of the two by the cost table of this machine (``hal tune``). Between two host pools all
            three are the same copy.

    Raises:
        ArgumentError: pools that don't match, slots on two devices, layers outside the pool, ``direct`` with
            slots on the device; nothing is copied.

    Example:
        >>> import torch, hal
        >>> pool = hal.KVPool(torch.randn(2, 8, 4, 16), torch.randn(2, 8, 4, 16), layout="layer_first")
        >>> host = hal.KVPool.host_like(pool, slots=8, layout="page_first")
        >>> hal.kv_transfer(pool, host, torch.tensor([3, 5]), torch.tensor([0, 1]))
        >>> torch.equal(host.k[1, 0], pool.k[0, 5])
        True

    Source: the layouts are those of SGLang's hierarchical cache.
    """
    todo = range(src.num_layers) if layers is None else layers
    if src_slots.shape[0] == 0 or src.num_slots == 0 or dst.num_slots == 0:
        return
    valid = in_range(src_slots, src.num_slots) & in_range(dst_slots, dst.num_slots)
    take = torch.where(valid, src_slots.to(torch.int64), 0)
    for layer in todo:
        for a, b in zip(src.layer(layer), dst.layer(layer), strict=True):
            if a is not None and b is not None:
                rows = _gather(a, src, take.to(a.device))
                rows = rows.to(b.device).view(rows.shape[0], *_row_view(b, dst))
                store_rows(b, dst_slots.to(b.device), valid.to(b.device), rows)


def _gather(half: Tensor, pool: KVPool, slots: Tensor) -> Tensor:
    """``[n, *row]`` of one layer's view."""
    bits = BITS.get(half.dtype.itemsize)
    view = half if bits is None else half.view(bits)
    paged = pool.layout.startswith("page_") and pool.layout != "page_first"
    rows = view[slots // pool.page_size, slots % pool.page_size] if paged else view[slots]
    return rows.contiguous().view(half.dtype)


def _row_view(half: Tensor, pool: KVPool) -> tuple[int, ...]:
    paged = pool.layout.startswith("page_") and pool.layout != "page_first"
    return tuple(half.shape[2:] if paged else half.shape[1:])


def _bad(argument: str, expected: str, got: str) -> ArgumentError:
    return ArgumentError("kv_transfer", argument, expected, got)


def _check(a: Mapping[str, Any], dims: Mapping[str, int]) -> None:
    src, dst = a["src"], a["dst"]
    if dst.num_layers != src.num_layers:
        raise _bad("dst", f"{src.num_layers} layers, like src", str(dst))
    if dst.dtype != src.dtype:
        raise _bad("dst", f"{src.dtype}, src's dtype", str(dst))
    if (dst.v is None) != (src.v is None):
        raise _bad("dst", "a v" if src.v is not None else "no v, like src", str(dst))
    for x, mine, theirs in (("k", src.row_shape, dst.row_shape), ("v", src.v_row_shape, dst.v_row_shape)):
        if mine is not None and theirs is not None and _row(mine) != _row(theirs):
            raise _bad("dst", f"{x} rows of {mine}, like src", f"{theirs} in {dst}")
    accelerators = {p.device for p in (src, dst) if p.device.type != "cpu"}
    if len(accelerators) > 1:
        raise _bad("dst", f"a pool on {src.device} or on the host", str(dst))
    if a["dst_slots"].device != a["src_slots"].device:
        raise _bad("dst_slots", f"slots on {a['src_slots'].device}, like src_slots", describe(a["dst_slots"]))
    where = a["src_slots"].device
    if where.type != "cpu":
        if where not in accelerators:
            raise _bad("src_slots", "slots on the CPU or on a pool's device", describe(a["src_slots"]))
        if a["method"] == "direct":
            raise _bad("method", "'kernel' or 'auto', since the slots are on the device", "'direct'")


def _row(shape: tuple[int, ...]) -> tuple[int, ...]:
    """(1, D) and (D,) are one row."""
    return shape[1:] if len(shape) == 2 and shape[0] == 1 else shape


def _check_sizes(src: KVPool, dst: KVPool, src_slots: Tensor, dst_slots: Tensor, layers: Any, method: str) -> None:
    if src_slots.shape[0] != dst_slots.shape[0]:
        raise _bad("dst_slots", f"{src_slots.shape[0]} slots, as many as src_slots", describe(dst_slots))
    if layers is None:
        return
    if not isinstance(layers, range) or layers.step != 1:
        raise _bad("layers", "a range with step 1, or None for all", repr(layers))
    if layers and (layers.start < 0 or layers.stop > src.num_layers):
        raise _bad("layers", f"a range within [0, {src.num_layers})", repr(layers))


def _check_values(a: Mapping[str, Any]) -> None:
    check_range("kv_transfer", "src_slots", a["src_slots"], -1, a["src"].num_slots - 1)
    check_range("kv_transfer", "dst_slots", a["dst_slots"], -1, a["dst"].num_slots - 1)


def stack_layers(half: Tensor | tuple[Tensor, ...]) -> Tensor:
    """One half of a pool as one tensor: a list of layers is stacked (a copy)."""
    if not isinstance(half, tuple):
        return half
    bits = BITS[half[0].dtype.itemsize]
    return torch.stack([t.view(bits) for t in half]).view(half[0].dtype)


SPEC = OpSpec(
    kv_transfer,
    core=True,
    args={
        "src": PoolArg(),
        "dst": PoolArg(mutated=True),
        "src_slots": TensorArg("n", INDEX),
        "dst_slots": TensorArg("n_dst", INDEX),
        "layers": ValueArg(),
        "method": ValueArg(METHODS),
    },
    check=_check,
    check_sizes=_check_sizes,
    check_values=_check_values,
    proof="hal.ops.proofs.kv_transfer",
)
