"""SGLang's names on a device, where they take what a CPU has not: tables of addresses, slots on two devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hal import KVPool
from hal.engines.sglang import hicache, kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LAYERS, SLOTS, ROW = 3, 64, (2, 64)
ITEM = ROW[0] * ROW[1] * 2
HERE, THERE = torch.arange(12), torch.randperm(SLOTS)[:12]


def pool(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, *ROW, dtype=torch.bfloat16, device="cuda")


def table(layers: torch.Tensor) -> torch.Tensor:
    return torch.tensor([t.data_ptr() for t in layers], dtype=torch.uint64, device="cuda")


@pytest.mark.parametrize("far", ["pinned", "device"])
def test_tables_of_addresses(far: str) -> None:
    """No slot reaches past its layer: what lies behind it in the same allocation stays."""
    both = pool(2, LAYERS, SLOTS)
    src, dst = both[0], pool(LAYERS, SLOTS)
    if far == "pinned":
        dst = dst.cpu().pin_memory()
    was = dst.clone()
    past = torch.tensor([SLOTS, 2 * SLOTS], dtype=torch.int64)
    here, there = torch.cat([HERE, past]).cuda(), torch.cat([THERE, past]).cuda()
    kernels.transfer_kv_all_layer_mla(table(src), table(dst), here, there, ITEM, LAYERS)
    torch.cuda.synchronize()
    was[:, THERE] = src[:, HERE.cuda()].to(was.device)
    assert torch.equal(dst, was)


def test_memory_that_nobody_knows() -> None:
    unknown = torch.tensor([torch.zeros(8, dtype=torch.float32, device="cpu").data_ptr()], dtype=torch.uint64)
    with pytest.raises(kernels.Unsupported, match="no allocator tells the size"):
        kernels.transfer_kv_all_layer_mla(unknown, unknown, HERE, THERE, ITEM, 1)


def test_slots_on_two_devices() -> None:
    src, dst = pool(SLOTS).cpu().pin_memory(), pool(SLOTS)
    kernels.transfer_kv_direct([src], [dst], HERE, THERE.cuda(), 1)
    assert torch.equal(dst[THERE.cuda()].cpu(), src[HERE])


@pytest.mark.parametrize("where", [("cpu", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")])
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_hicache(layout: str, where: tuple[str, str]) -> None:
    """There and back as SGLang's controller asks, the host's slots where it has them, on a stream of its own."""
    k, v = pool(LAYERS, SLOTS), pool(LAYERS, SLOTS)
    host = KVPool.host_like(KVPool(k, v), SLOTS, layout)
    made: Any = SimpleNamespace(
        layout=layout, page_size=1, k_buffer=host.k, v_buffer=host.v, device_k_buffers=list(k), device_v_buffers=list(v)
    )
    slots = HERE.to(where[0]), THERE.to(where[1])
    want = k[:, THERE.cuda()].clone(), v[:, THERE.cuda()].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        hicache.backup_from_device_all_layer(made, None, *slots, "kernel")
        k.zero_()
        v.zero_()
        for layer in range(LAYERS):
            hicache.load_to_device_per_layer(made, None, *slots, layer, "kernel")
    torch.cuda.current_stream().wait_stream(stream)
    for half, rows in zip((k, v), want, strict=True):
        assert torch.equal(half[:, THERE.cuda()], rows)
        assert half.count_nonzero() == rows.count_nonzero()
