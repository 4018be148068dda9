"""kv_move: moves the KV rows of tokens within a pool, over all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal._errors import ArgumentError
from hal.kv.pool import KVPool
from hal.ops._checks import check_range
from hal.ops.kv_transfer import kv_transfer
from hal.ops.spec import INDEX, OpSpec, PoolArg, TensorArg, ValueArg, describe


def kv_move(
    pool: KVPool, src_slots: Tensor, dst_slots: Tensor, workspace: Tensor, *, layers: range | None = None
) -> None:
    """``pool[layer, dst_slots[i]] = pool[layer, src_slots[i]]``, as if every read came before every write.

    So slots may be in both lists: swaps, cycles, and shifts by one come out as they are written, whatever their order.
    Rows go through `workspace`, as many layers at a time as it holds; cost is linear in the rows, in stream order,
    without a sync. A pair in which either slot is -1 or out of range is skipped. Equal `dst_slots`: each
    element is one of the candidates'.

    Args:
        pool: what to move within; any layout, k and v (or MLA's rows alone), bit for bit.
        src_slots: ``[n]`` int32 or int64, on the pool's device.
        dst_slots: ``[n]`` int32 or int64, on the pool's device.
        workspace: ``[bytes]`` uint8 on the pool's device, no part of the pool. At least n rows of one layer's k or v,
            the larger of the two: ``n * max(p.row_bytes for p in pool.planes())``; with more, more layers go at once.
            It may hold anything afterwards.
        layers: which layers, in steps of 1; None for all.

    Raises:
        ArgumentError: a workspace that is too small, tensors on another device than the pool, layers outside it;
            nothing is moved.

    Example:
        >>> import torch, hal
        >>> pool = hal.KVPool(torch.randn(2, 8, 4, 16), torch.randn(2, 8, 4, 16), layout="layer_first")
        >>> was, swap = pool.k.clone(), torch.tensor([3, 5])
        >>> workspace = torch.empty(2 * pool.planes()[0].row_bytes, dtype=torch.uint8)
        >>> hal.kv_move(pool, swap, swap.flip(0), workspace)
        >>> torch.equal(pool.k[:, swap], was[:, swap.flip(0)])
        True

    Source: the contract of SGLang's ``move_kv_cache``, with the overlap defined.
    """
    if src_slots.shape[0] == 0 or pool.num_slots == 0:
        return
    # This one gathers all rows of a layer before it stores the first.
    kv_transfer(pool, pool, src_slots, dst_slots, layers=layers)


def _bad(argument: str, expected: str, got: str) -> ArgumentError:
    return ArgumentError("kv_move", argument, expected, got)


def _check(a: Mapping[str, Any], dims: Mapping[str, int]) -> None:
    for name in ("src_slots", "dst_slots", "workspace"):
        if a[name].device != a["pool"].device:
            raise _bad(name, f"a tensor on {a['pool'].device}, the pool's device", describe(a[name]))


def _check_sizes(pool: KVPool, src_slots: Tensor, dst_slots: Tensor, workspace: Tensor, layers: Any) -> None:
    need = src_slots.shape[0] * max(p.row_bytes for p in pool.planes())
    if workspace.shape[0] < need:
        rows = f"{src_slots.shape[0]} rows of one layer"
        raise _bad("workspace", f"at least {need} bytes, for {rows}", describe(workspace))
    if layers is None:
        return
    if not isinstance(layers, range) or layers.step != 1:
        raise _bad("layers", "a range with step 1, or None for all", repr(layers))
    if layers and (layers.start < 0 or layers.stop > pool.num_layers):
        raise _bad("layers", f"a range within [0, {pool.num_layers})", repr(layers))


def _check_values(a: Mapping[str, Any]) -> None:
    for name in ("src_slots", "dst_slots"):
        check_range("kv_move", name, a[name], -1, a["pool"].num_slots - 1)


SPEC = OpSpec(
    kv_move,
    args={
        "pool": PoolArg(mutated=True),
        "src_slots": TensorArg("n", INDEX),
        "dst_slots": TensorArg("n", INDEX),
        "workspace": TensorArg("bytes", (torch.uint8,), mutated=True),
        "layers": ValueArg(),
    },
    check=_check,
    check_sizes=_check_sizes,
    check_values=_check_values,
    proof="hal.ops.proofs.kv_move",
)
