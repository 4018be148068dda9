"""The names of SGLang's Ascend path (`hal.engines.sglang.npu`) on the lowered kernels: every access is traced."""

from __future__ import annotations

import pytest
import torch

import hal
from hal._errors import ArgumentError
from hal.engines.sglang import npu

I32 = torch.int32
PAGE = 16


def test_cache_locs() -> None:
    table = torch.arange(6 * 40, dtype=I32).view(6, 40)
    rows, start = torch.tensor([4, 0, -1, 6], dtype=I32), torch.tensor([3, 38, 0, 1])
    end = torch.tensor([21, 40, 2, 2])
    new = torch.arange(500, 523, dtype=I32)
    want = table.clone()
    want[4, 3:21], want[0, 38:] = new[:18], new[18:20]
    npu.cache_loc_assign(rows, table, start, end, new)
    assert torch.equal(table, want)
    out = torch.empty(24, dtype=I32)
    npu.cache_loc_update(rows, table, start, end, out)
    assert out.tolist() == [*new[:20].tolist(), -1, -1, -1, -1]
    none = torch.empty(0, dtype=torch.int64)
    assert npu.cache_loc_update(none.int(), table, none, none, torch.empty(3, dtype=I32)).tolist() == [-1] * 3


def test_alloc_extend() -> None:
    before, after, last, free = (torch.tensor(x, dtype=I32) for x in ([0, 20], [17, 33], [-1, 899], [7, 3, 9, 5]))
    out, pages = torch.empty(30, dtype=I32), torch.zeros(1, dtype=I32)
    npu.alloc_extend(before, after, last, free, PAGE, out, pages)
    assert out.tolist() == [*range(112, 128), 48, *range(900, 912), 144]
    assert pages.tolist() == [3]


def test_paged_writes() -> None:
    key, value = torch.randn(4, 2, 32).bfloat16(), torch.randn(4, 2, 32).bfloat16()
    caches = torch.zeros(2, 3, PAGE, 2, 32).bfloat16()
    npu._npu_reshape_and_cache(key, value, caches[0], caches[1], torch.tensor([17, -1, 47, 48], dtype=I32))
    for cache, rows in zip(caches, (key, value), strict=True):
        flat = cache.view(-1, 2, 32)
        assert torch.equal(flat[[17, 47]], rows[[0, 2]])
        assert flat.any(dim=(1, 2)).sum() == 2


def test_host_pages() -> None:
    device = torch.randn(2, 2, 4, PAGE, 2, 32).half()
    host = torch.zeros(2, 5, 2, PAGE, 2, 32).half()
    pages = [(torch.tensor(x)[:, None] * PAGE + torch.arange(PAGE)).flatten().to(I32) for x in ([3, 0], [1, 4])]
    call = {"page_size": PAGE, "direction": npu.TransferDirection.D2H}
    with pytest.raises(ArgumentError, match="device_indices"):
        npu.transfer_kv_dim_exchange(pages[0] + PAGE, pages[1], device[0], host[0], device[1], host[1], **call)
    assert not host.any()
    npu.transfer_kv_dim_exchange(*pages, device[0], host[0], device[1], host[1], **call)
    assert torch.equal(host[:, [1, 4]], device[:, :, [3, 0]].transpose(1, 2))
    assert not host[:, [0, 2, 3]].any()


def test_split_qkv() -> None:
    """As the reference has it, which its own test judges, to one rounding."""
    qkv, angles = torch.randn(3, 4 * 64 + 2 * 2 * 64).bfloat16(), torch.rand(2, 3, 32).bfloat16()
    given = (qkv, *angles.repeat(1, 1, 2), 256, 128, 64, 1e-6, torch.rand(64).bfloat16(), torch.rand(64).bfloat16())
    got = npu.split_qkv_rmsnorm_rope(*given)
    with hal.use("reference"):
        want = npu.split_qkv_rmsnorm_rope(*given)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)
