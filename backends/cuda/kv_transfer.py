"""kv_transfer: token rows from one KVPool to another, by a streaming kernel or by the copy engine.

*kernel*: programs stride over rows, a tile of rows in flight each, host memory through its pinned
address. Any slots, any two layouts; few multiprocessors saturate the bus.
*direct*: the copy engine is faster than any kernel over PCIe, but wants long runs. Where whole granules
(a slot of page_first, a page of the paged layouts) are wanted and the host side is consecutive, rows are
gathered on the device into one of two staging buffers while the engine moves the other; for
host-to-device the other way about. Elsewhere: the runs as they are, in one batched call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hal._errors import HalError
from hal.backends.cuda import _copy, _engine, _staging
from hal.kv import plan as kvplan
from hal.kv.pool import KVPool
from hal.ops.kv_transfer import kv_transfer as reference
from hal.triton.launch import lane


def kv_transfer(
    src: KVPool, dst: KVPool, src_slots: Tensor, dst_slots: Tensor, *, layers: range | None = None, method: str = "auto"
) -> None:
    by_kernel = method != "direct" and (src_slots.is_cuda or lane() != "device")
    if by_kernel and (layers is None or len(layers)) and _copy.again(src, dst, src_slots, dst_slots, layers):
        return
    if not (src_slots.shape[0] and src.num_slots and dst.num_slots and (layers is None or len(layers))):
        return
    if lane() == "device" and src.device.type == dst.device.type == "cpu":
        reference(src, dst, src_slots, dst_slots, layers=layers)
        return
    device = src.device if src.device.type == "cuda" else dst.device
    if not src_slots.is_cuda and lane() == "device":
        _from_host(src, dst, src_slots, dst_slots, layers or range(src.num_layers), method, device)
    elif method == "direct":
        _direct(src, dst, src_slots, dst_slots, layers or range(src.num_layers), device)
    else:
        _copy.rows(src, dst, src_slots, dst_slots, layers, device)


def _from_host(
    src: KVPool, dst: KVPool, src_slots: Tensor, dst_slots: Tensor, todo: range, method: str, device: torch.device
) -> None:
    """Slots on the CPU: their runs are known, so any method will do."""
    if torch.cuda.is_current_stream_capturing():
        raise HalError("hal: kv_transfer: slots on the CPU can't be captured in a graph; give slots on the device")
    if method == "auto":
        method = _staging.choose(src, dst, src_slots, dst_slots, todo, device)
    if method == "direct":
        _direct(src, dst, src_slots, dst_slots, todo, device)
        return
    a, b = _copy.upload(torch.stack([src_slots.to(torch.int64), dst_slots.to(torch.int64)]), device)
    _copy.rows(src, dst, a, b, todo, device)


def _direct(src: KVPool, dst: KVPool, src_slots: Tensor, dst_slots: Tensor, todo: range, device: torch.device) -> None:
    n, done = len(src_slots), _staging.transfer(src, dst, src_slots, dst_slots, len(todo), device)
    if done == n:
        return
    s, d = kvplan.pairs(src, dst, src_slots[done:], dst_slots[done:])
    if len(s) and len(s) != n:
        done = _staging.transfer(src, dst, s, d, len(todo), device)
        s, d = s[done:], d[done:]
    if len(s):
        with _staging.side(device) as stream:
            _engine.copy(kvplan.copies(src, dst, s, d, todo), stream)


def warm(device: torch.device, args: dict[str, Any] | None) -> None:
    """Slots of -1: nothing is moved. Makes the staging of the current stream too."""
    _staging.buffers(device)
    if args is None:
        return
    none = torch.full((1,), -1, dtype=args["src_slots"].dtype, device="cpu")
    for a, b in ((args["src"], args["dst"]), (args["dst"], args["src"])):
        if all(p.pinned or p.device.type == "cuda" for p in (a, b)):
            kv_transfer(a, b, none.to(device), none.to(device), method="kernel")


def supports(sig: Any) -> str | None:
    """Everything, but a kernel on pageable host memory."""
    if lane() != "device":
        return None
    kernel = sig["src_slots"].device != "cpu" or sig["method"] == "kernel"
    if kernel and any(p.device == "cpu" and not p.pinned for p in (sig["src"], sig["dst"])):
        return "pinned: no kernel reaches pageable host memory; pin it (KVPool.host_like), or give slots on the CPU"
    return None
