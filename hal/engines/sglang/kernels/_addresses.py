"""Tables of addresses of layers, with the sizes that they do not carry: those of the allocations they point into.

A layer's rows end where the next address of the table begins or where its allocation ends, whichever comes first. So
no slot reaches another allocation, and none reaches another layer of the same one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hal.engines.sglang.kernels._common import Unsupported

Range = tuple[int, int, str]
"""The first address of an allocation, the one after its last, and the device that it is on."""

_MEMORY_TYPE, _DEVICE_ORDINAL, _RANGE_START, _RANGE_SIZE = 2, 9, 11, 12
"""Of CUDA's ``CUpointer_attribute``."""
_HOST = 1
"""Of ``CUmemorytype``."""

_known: Any = WeakIdKeyDictionary()


def layers_at(function: str, table: Tensor, item_size: int, count: int) -> list[Tensor]:
    """The layers at the first `count` addresses of a table, uint8 ``[bytes]`` each, all as large as the smallest.

    They are kept with the table, since reading it waits for the device: while it lives, so must they.

    Args:
        table: ``[layers]`` uint64.
        item_size: bytes of a row.

    Raises:
        Unsupported: an address of memory whose size no allocator tells, or a graph is being captured.
    """
    found = _known.get(table)
    asked = (table.data_ptr(), table._version, item_size, count)
    if found is None or found[0] != asked:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise Unsupported(f"hal: {function}: a new table of addresses while a graph is captured")
        addresses = [int(a) for a in table[:count].cpu().tolist()]
        found = asked, layers_of(function, addresses, item_size, allocations(addresses))
        _known[table] = found
    made: list[Tensor] = found[1]
    return made


def layers_of(function: str, addresses: Sequence[int], item_size: int, ranges: Sequence[Range | None]) -> list[Tensor]:
    """The same of addresses in these allocations; None: one that nobody knows."""
    known = []
    for address, within in zip(addresses, ranges, strict=True):
        if within is None:
            raise Unsupported(
                f"hal: {function}: the address {address:#x} of a table: no allocator tells the size of its memory, so "
                "no slot could be checked — pass the layers, a list of tensors"
            )
        known.append(within)
    order = sorted(set(addresses))
    after = dict(pairwise(order))
    rows = [
        (min(end, after.get(address, end)) - address) // item_size
        for address, (_, end, _) in zip(addresses, known, strict=True)
    ]
    size = min(rows) * item_size
    return [_bytes(address, size, device) for address, (_, _, device) in zip(addresses, known, strict=True)]


def allocations(addresses: Iterable[int]) -> list[Range | None]:
    """The allocation that each address is in: a block of torch's, else one of CUDA's, pinned host memory too."""
    if not torch.cuda.is_available():
        return [None for _ in addresses]
    blocks = [
        (block["address"], block["address"] + block["requested_size"], f"cuda:{segment['device']}")
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call, unused-ignore]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    found = []
    for address in addresses:
        block = next((b for b in blocks if b[0] <= address < b[1]), None)
        found.append(block or _of_driver(address))
    return found


def _of_driver(address: int) -> Range | None:
    driver = ctypes.CDLL("libcuda.so.1")

    def read(attribute: int, of: Any) -> int | None:
        value = of()
        failed = driver.cuPointerGetAttribute(ctypes.byref(value), attribute, ctypes.c_uint64(address))
        return None if failed else int(value.value or 0)

    kind, ordinal = read(_MEMORY_TYPE, ctypes.c_uint), read(_DEVICE_ORDINAL, ctypes.c_int)
    start, size = read(_RANGE_START, ctypes.c_void_p), read(_RANGE_SIZE, ctypes.c_size_t)
    if not (kind and start and size) or not start <= address < start + size:
        return None
    return start, start + size, "cpu" if kind == _HOST else f"cuda:{ordinal}"


class _Memory:
    """Memory of a device for whoever reads CUDA's array interface."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _bytes(address: int, size: int, device: str) -> Tensor:
    if device == "cpu":
        memory = (ctypes.c_ubyte * size).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8, device=device)
    return torch.as_tensor(_Memory(address, size), dtype=torch.uint8, device=device)
