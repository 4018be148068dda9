"""SGLang's own Ascend code (`hardware_backend/npu`, `kernel_ascend`) on hal's functions, on a CPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch

import hal
from hal.engines.sglang import npu, vision

vision.declare_operators()
sys.path.insert(0, sys.argv[1])
npu.replace()
npu.register()

from sgl_kernel_npu import kvcacheio  # noqa: E402
from sglang.kernels.ops.speculative import cache_locs  # noqa: E402
from sglang.srt.hardware_backend.npu.allocator_npu import NPUPagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.pool_host import mha  # noqa: E402

# What `is_npu()` decides where SGLang is imported.
cache_locs._is_npu, cache_locs._is_cpu = True, False
mha.transfer_kv_dim_exchange, mha.TransferDirection = (kvcacheio.transfer_kv_dim_exchange, kvcacheio.TransferDirection)


def allocation() -> None:
    pool = NPUPagedTokenToKVPoolAllocator(64 * 16, 16, torch.int64, "cpu", None, False)
    free = pool.free_pages.tolist()
    before, after = torch.tensor([0, 20]), torch.tensor([17, 33])
    slots = pool.alloc_extend(before, before, after, after, torch.tensor([-1, 899]), 30)
    want = [free[0] * 16 + i for i in range(16)] + [free[1] * 16]
    want += [*range(900, 912), free[2] * 16]
    assert slots.dtype == torch.int32
    assert slots.tolist() == want
    assert pool.free_pages.tolist() == free[3:]


def speculation() -> None:
    table = torch.arange(64, dtype=torch.int32).view(4, 16)
    start = torch.tensor([3, 14])
    slots = cache_locs.assign_extend_cache_locs_func(
        torch.tensor([2, 0], dtype=torch.int32), table, start, start + 2, 2, 2, "cpu"
    )
    assert slots.dtype == torch.int32
    assert slots.tolist() == [35, 36, 14, 15]


def host_pool() -> None:
    layers, pages, page = 3, 5, 4
    k, v = torch.randn(2, layers, pages, page, 2, 8)
    host = torch.zeros(2, 7, layers, page, 2, 8)
    this = SimpleNamespace(
        layout="page_first_direct",
        page_size=page,
        target_layer_num=layers,
        k_buffer=host[0],
        v_buffer=host[1],
        _buffer_infos=[SimpleNamespace(transfer_buffers=lambda: (k, v))],
    )
    pool = mha.MHATokenToKVPoolHost
    this._npu_transfer_buffers = lambda: pool._npu_transfer_buffers(this)
    on_host, on_device = torch.arange(8, 16), torch.arange(4, 12)
    pool.backup_from_device_all_layer(this, None, on_host, on_device, "kernel_ascend")
    assert torch.equal(host[0][2:4], k[:, 1:3].transpose(0, 1))
    assert torch.equal(host[1][2:4], v[:, 1:3].transpose(0, 1))
    assert not host[:, :2].any()
    was = k.clone()
    k.zero_()
    pool.load_to_device_per_layer(this, None, on_host, on_device, 0, "kernel_ascend")
    assert torch.equal(k[:, 1:3], was[:, 1:3])
    assert not k[:, 0].any()


BACKENDS = ("reference", "cpu")
for backend in BACKENDS:
    with hal.use(backend):
        allocation()
        speculation()
        host_pool()
print("right on", ", ".join(BACKENDS))
