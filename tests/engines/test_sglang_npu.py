"""The names of SGLang's Ascend path on hal's ops, against plain torch. Runs without SGLang, torch_npu and an NPU.

What each must do was read in sgl-kernel-npu's and vllm-ascend's own tests and kernels; the cases here are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hal
from hal._errors import ArgumentError
from hal.engines.sglang import npu

I32, I64 = torch.int32, torch.int64


@pytest.fixture(autouse=True, params=["reference", "cpu"])
def backend(fresh: None, request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(0)
    with hal.use(request.param):
        yield


# --- slots ------------------------------------------------------------------------------------------


def ragged(rows: list[int], starts: list[int], ends: list[int], dtype: torch.dtype) -> tuple[Any, ...]:
    return torch.tensor(rows, dtype=dtype), torch.tensor(starts), torch.tensor(ends)


@pytest.mark.parametrize("dtype", [I32, I64])
def test_cache_locs_there_and_back(dtype: torch.dtype) -> None:
    table = torch.arange(12 * 32, dtype=I32).view(12, 32)
    r, s, e = ragged([3, 0, 11, 5], [4, 0, 31, 7], [6, 0, 32, 29], dtype)
    new = torch.arange(1000, 1000 + int((e - s).sum()), dtype=I32)
    want, at = table.clone(), 0
    for row, a, b in zip(r.tolist(), s.tolist(), e.tolist(), strict=True):
        want[row, a:b] = new[at : at + b - a]
        at += b - a
    assert npu.cache_loc_assign(r, table, s, e, new) is table
    assert torch.equal(table, want)
    out = torch.full((len(new) + 2,), 7, dtype=I32)
    assert npu.cache_loc_update(r, table, s, e, out) is out
    assert out.tolist() == [*new.tolist(), -1, -1]


def test_cache_locs_out_of_range_touch_nothing() -> None:
    backing = torch.arange(6 * 8, dtype=I32)
    table = backing[8:40].view(4, 8)
    was = backing.clone()
    r, s, e = ragged([-1, 4, 2**31 - 1, 1], [0, 0, 0, 8], [2, 2, 2, 10], I64)
    npu.cache_loc_assign(r, table, s, e, torch.arange(8, dtype=I32))
    assert torch.equal(backing, was)
    assert npu.cache_loc_update(r, table, s, e, torch.zeros(8, dtype=I32)).tolist() == [-1] * 8
    hal.configure(checks="full")
    with pytest.raises(ArgumentError, match="req_pool_indices"):
        npu.cache_loc_assign(r, table, s, e, torch.arange(8, dtype=I32))
    assert torch.equal(backing, was)


def test_empty_batches() -> None:
    none, table = torch.empty(0, dtype=I64), torch.ones(2, 4, dtype=I32)
    slots = torch.empty(0, dtype=I32)
    npu.cache_loc_assign(none, table, none, none, slots)
    assert npu.cache_loc_update(none, table, none, none, slots).shape == (0,)
    values = torch.full((1,), 9)
    npu.alloc_extend(none, none, none, torch.arange(3), 4, torch.empty(0, dtype=I64), values)
    assert values.tolist() == [0]
    assert table.tolist() == [[1] * 4] * 2
    device, host = torch.ones(2, 3, 4, 1, 8), torch.zeros(3, 2, 4, 1, 8)
    npu.transfer_kv_dim_exchange(none, none, device, host, none, none, page_size=4, direction=2)
    q, k = npu.fused_rope_qk_mqa(torch.empty(0, 2, 8), torch.empty(0, 1, 8), torch.empty(0, 4), 4, True)
    assert (q.shape, k.shape) == ((0, 2, 8), (0, 1, 8))
    parts = npu.split_qkv_rmsnorm_rope(torch.empty(0, 32), torch.empty(0, 8), torch.empty(0, 8), 16, 8, 8)
    assert [p.shape for p in parts] == [(0, 16), (0, 8), (0, 8)]


def grown(before: list[int], after: list[int], last: list[int], free: list[int], page: int) -> tuple[list[int], int]:
    """Slots token by token: the next in the open page, or the first of the next free page."""
    slots, taken = [], 0
    for a, b, at in zip(before, after, last, strict=True):
        for position in range(a, b):
            if position % page == 0:
                at, taken = free[taken] * page, taken + 1
            else:
                at += 1
            slots.append(at)
    return slots, taken


@pytest.mark.parametrize("dtype", [I32, I64])
@pytest.mark.parametrize(
    ("before", "after", "last"),
    [
        ([0], [7], [-1]),
        ([7], [9], [134]),
        ([100], [400], [227]),
        ([0] * 3, [256, 128, 300], [-1] * 3),
        ([127, 128, 200, 5], [130, 129, 200, 256], [254, 383, 455, 516]),
    ],
    ids=["new", "two drafts", "cached", "ends with a page", "mixed"],
)
def test_alloc_extend(before: list[int], after: list[int], last: list[int], dtype: torch.dtype) -> None:
    free = list(range(40, 60))
    want, pages = grown(before, after, last, free, 128)
    given = [torch.tensor(x, dtype=dtype) for x in (before, after, last, free)]
    out, values = torch.empty(len(want), dtype=dtype), torch.full((1,), -5, dtype=dtype)
    npu.alloc_extend(*given, 128, out, values)
    assert (out.tolist(), values.tolist()) == (want, [pages])
    out.zero_()
    npu.alloc_extend_kernel[(len(before),)](*given, out, 4, 128, 512)
    assert out.tolist() == want


def test_alloc_extend_refuses_before_it_writes() -> None:
    out = torch.full((2,), 9)
    lens = torch.tensor([0]), torch.tensor([2]), torch.tensor([-1]), torch.tensor([3])
    for values in (torch.empty(0, dtype=I64), torch.zeros(1)):
        with pytest.raises(ArgumentError, match="values"):
            npu.alloc_extend(*lens, 4, out, values)
    assert out.tolist() == [9, 9]
    # No page left: -1, and what was there past the list is not read.
    npu.alloc_extend(*lens[:3], torch.empty(0, dtype=I64), 4, out, torch.zeros(1, dtype=I64))
    assert out.tolist() == [-1, -1]


# --- device <-> host --------------------------------------------------------------------------------

L, P, HP, PAGE, H, D = 3, 6, 9, 4, 2, 8


def slots_of(pages: list[int], dtype: torch.dtype = I64) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten().to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("with_v", [True, False])
def test_transfer_kv_dim_exchange(dtype: torch.dtype, with_v: bool) -> None:
    def pools(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = (torch.randn(L, P, PAGE, H, dim), torch.randn(HP, L, PAGE, H, dim))
        return made[0].mul(9).to(dtype), made[1].mul(9).to(dtype)

    (dk, hk), (dv, hv), (di, hi) = pools(D), pools(2 * D), pools(1)
    if not with_v:
        dv = hv = torch.empty(0)
    was = [t.clone() for t in (dk, hk, dv, hv, di, hi)]
    src, dst = [5, 0, 2], [8, 1, 0]
    npu.transfer_kv_dim_exchange(
        slots_of(src, I32), slots_of(dst, I32), dk, hk, dv, hv, di, hi, PAGE, npu.TransferDirection.D2H
    )
    for device, host, before in ((dk, hk, was[1]), (dv, hv, was[3]), (di, hi, was[5])):
        if host.numel():
            before[dst] = device[:, src].transpose(0, 1)
        assert torch.equal(host, before)
    assert torch.equal(dk, was[0])
    # And back to other pages, by the operator's order, layers 1 and 2 alone: a view of the host's.
    npu.OPS["transfer_kv_dim_exchange"][1](
        dk[1:], hk[:, 1:], dv[1:], hv[:, 1:] if with_v else hv, slots_of([4, 3]), slots_of([8, 1]), PAGE, 1, 2
    )
    for device, host, before in ((dk, hk, was[0]), (dv, hv, was[2])):
        if host.numel():
            before[1:, [4, 3]] = host[[8, 1], 1:].transpose(0, 1)
        assert torch.equal(device, before)


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"device_indices": slots_of([0, P])}, ArgumentError, f"slots 0 to {P * PAGE - 1}"),
        ({"device_indices": slots_of([0, -1])}, ArgumentError, "from slot -4 on"),
        ({"host_indices": slots_of([0, HP])}, ArgumentError, "host_indices"),
        ({"host_indices": slots_of([0])}, ArgumentError, "8 slots"),
        ({"host_indices": torch.arange(7)}, ArgumentError, r"\[n \* 4\]"),
        ({"device_indices": slots_of([0, 1]).flip(0)}, npu.Unsupported, "whole pages"),
        ({"device_indices": slots_of([0, 1]) + 1}, npu.Unsupported, "whole pages"),
        ({"direction": 3}, npu.Unsupported, "direction 3"),
        ({"flags": 1}, npu.Unsupported, "flags 1"),
        ({"device_v": torch.empty(0)}, npu.Unsupported, "v on one side"),
        ({"device_index_k": torch.ones(L, P, PAGE, 1, 1)}, npu.Unsupported, "one side"),
        ({"host_k": torch.zeros(HP, L + 1, PAGE, H, D)}, ArgumentError, "layers and rows"),
        ({"page_size": 2}, ArgumentError, "device_k"),
    ],
)
def test_transfer_refuses_and_writes_nothing(changed: dict[str, Any], error: type[Exception], says: str) -> None:
    host = {"host_k": torch.zeros(HP, L, PAGE, H, D), "host_v": torch.zeros(HP, L, PAGE, H, D)}
    device = {"device_k": torch.ones(L, P, PAGE, H, D), "device_v": torch.ones(L, P, PAGE, H, D)}
    call = {"device_indices": slots_of([0, 1]), "host_indices": slots_of([2, 3]), "page_size": PAGE, "direction": 2}
    with pytest.raises(error, match=says):
        npu.transfer_kv_dim_exchange(**{**call, **host, **device, **changed})
    assert not any(t.any() for t in host.values())


# --- writes -----------------------------------------------------------------------------------------


def written(cache: torch.Tensor, slots: list[int], rows: torch.Tensor) -> torch.Tensor:
    """A copy of a paged cache with rows in those of the slots that it has."""
    want = cache.clone()
    flat = want.view(-1, *cache.shape[2:])
    for slot, row in zip(slots, rows, strict=True):
        if 0 <= slot < flat.shape[0]:
            flat[slot] = row
    return want


@pytest.mark.parametrize("slots", [[0, -1, 3], [-1, -1, -1], [7, 8, -(2**31)]])
@pytest.mark.parametrize("name", ["_npu_reshape_and_cache", "npu_scatter_pa_kv_cache"])
def test_paged_writes(name: str, slots: list[int]) -> None:
    key, value = torch.randn(3, H, D).half(), torch.randn(3, H, 2 * D).half()
    caches = torch.randn(2, PAGE, H, D).half(), torch.randn(2, PAGE, H, 2 * D).half()
    want = [written(c, slots, rows) for c, rows in zip(caches, (key, value), strict=True)]
    getattr(npu, name)(key, value, *caches, torch.tensor(slots, dtype=I32))
    assert all(torch.equal(a, b) for a, b in zip(caches, want, strict=True))


def test_scatter_and_prefixes() -> None:
    pool, slots = torch.randn(3, PAGE, 1, 12).bfloat16(), [5, 11, 12, -1]
    rows = torch.randn(4, 1, 12).bfloat16()
    want = written(pool, slots, rows)
    flat = pool.view(-1, 1, 12)
    assert npu.npu_scatter_nd_update_(flat, torch.tensor(slots, dtype=I32)[:, None], rows) is flat
    assert torch.equal(pool, want)
    locs, lens = torch.tensor([[3, 4, 5], [9, 10, 11]]), torch.tensor([2, 0], dtype=I32)
    k, v = torch.randn(6, H, D), torch.randn(6, H, D)
    caches = torch.zeros(12, H, D), torch.zeros(12, H, D)
    npu.store_kv_cache_prefix_valid_npu_triton(*caches, k, v, locs, lens)
    for cache, new in zip(caches, (k, v), strict=True):
        assert torch.equal(cache[[3, 4]], new[:2])
        assert cache.any(dim=(1, 2)).sum() == 2


def test_writes_that_do_not_fit() -> None:
    key, cache, slots = torch.ones(1, H, D), torch.zeros(2, PAGE, H, D), torch.zeros(1, dtype=I32)
    tiled: dict[str, Any]
    for tiled in ({"cache_mode": "PA_NZ"}, {"cache_mode": None}, {"seq_lens": slots}, {"compress_lens": slots}):
        with pytest.raises(npu.Unsupported, match=next(iter(tiled))):
            npu.npu_scatter_pa_kv_cache(key, key, cache, cache.clone(), slots, **tiled)
    flat = cache.view(-1, H, D)
    for indices in (slots, slots[:, None].repeat(1, 2)):
        with pytest.raises(npu.Unsupported, match="a slot a row"):
            npu.npu_scatter_nd_update_(flat, indices, key)
    with pytest.raises(npu.Unsupported, match="one element"):
        npu.npu_scatter_nd_update_(torch.zeros(4, 1), slots[:, None], torch.ones(1, 1))
    assert not cache.any()


# --- rotations --------------------------------------------------------------------------------------


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neox: bool) -> torch.Tensor:
    """``[n, heads, dim]`` in float64; cos and sin ``[n, rotary_dim / 2]``."""
    c, s = cos.double()[:, None], sin.double()[:, None]
    turn, rest = x[..., : 2 * cos.shape[1]], x[..., 2 * cos.shape[1] :]
    a, b = turn.chunk(2, -1) if neox else (turn[..., ::2], turn[..., 1::2])
    new = a * c - b * s, b * c + a * s
    return torch.cat([torch.cat(new, -1) if neox else torch.stack(new, -1).flatten(-2), rest], -1)


def normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    x = x.double()
    return x if weight is None else x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """One rounding to got's dtype, and a little of fp32 before it."""
    torch.testing.assert_close(got, want.to(got.dtype).view_as(got), rtol=1.6 * torch.finfo(got.dtype).eps, atol=2e-6)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary", [4, 8])
def test_fused_rope_qk_mqa(neox: bool, rotary: int) -> None:
    q, k, angles = torch.randn(5, 6, 8).half(), torch.randn(5, 1, 8).half(), torch.randn(5, rotary).half()
    was = q.clone()
    got = npu.fused_rope_qk_mqa(q, k, angles, rotary, neox)
    for new, old in zip(got, (q, k), strict=True):
        near(new, rotated(old.double(), *angles.chunk(2, -1), neox))
    assert torch.equal(q, was)
    with pytest.raises(ArgumentError, match="a row a token"):
        npu.fused_rope_qk_mqa(q, k, angles[:3], rotary, neox)


N, HEADS, KV, DIM, EPS = 5, 4, 2, 16, 1e-6
SIZES = (HEADS * DIM, KV * DIM)


def parts(qkv: torch.Tensor) -> list[torch.Tensor]:
    return [t.reshape(N, -1, DIM) for t in qkv.split([SIZES[0], SIZES[1], SIZES[1]], 1)]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("rope", "neox"), [(16, True), (8, True), (16, False)])
def test_split_qkv(norm: bool, rope: int, neox: bool) -> None:
    qkv = torch.randn(N, sum(SIZES) + SIZES[1]).bfloat16()
    cos, sin = torch.rand(2, N, 1, 1, rope // 2).bfloat16()
    weights = [torch.randn(DIM).bfloat16() if norm else None for _ in range(2)]
    twice = [t.repeat(1, 1, 1, 2) for t in (sin, cos)]
    got = npu.split_qkv_rmsnorm_rope(qkv, *twice, *SIZES, DIM, EPS if norm else None, *weights, is_neox_style=neox)
    for new, old, weight in zip(got, parts(qkv), weights, strict=False):
        near(new, rotated(normed(old, weight, EPS), cos.view(N, -1), sin.view(N, -1), neox).reshape(N, -1))
    assert torch.equal(got[2], qkv[:, -SIZES[1] :])
    # The same angles by position, one of which is out of range.
    table = torch.cat([cos, sin], -1).view(N, rope).flip(0).contiguous()
    positions = torch.tensor([4, 3, 2, 1, N], dtype=I32)
    if neox:
        by = npu.split_qkv_rmsnorm_rope_pos_cache_half_npu(
            qkv, positions, table, *SIZES, DIM, EPS if norm else None, *weights, rope_dim=rope
        )
        assert all(torch.equal(a[:4], b[:4]) for a, b in zip(got, by, strict=True))
        assert torch.equal(by[0][4], qkv[4, : SIZES[0]])


def test_split_qkv_with_gates() -> None:
    qkv = torch.randn(N, SIZES[0] * 2 + SIZES[1] * 2)
    cos, sin = torch.rand(2, N, 4)
    weights = torch.randn(2, DIM)
    q, k, v, gate = npu.split_qkvgate_gemma_rmsnorm_rope(
        qkv, *(t.repeat(1, 2) for t in (sin, cos)), *SIZES, DIM, 8, EPS, *weights
    )
    heads = qkv[:, : 2 * SIZES[0]].view(N, HEADS, 2, DIM)
    near(q, rotated(normed(heads[:, :, 0], weights[0] + 1, EPS), cos, sin, True))
    near(k, rotated(normed(qkv[:, 128:160].view(N, KV, DIM), weights[1] + 1, EPS), cos, sin, True))
    assert torch.equal(gate.view(N, HEADS, DIM), heads[:, :, 1])
    assert torch.equal(v, qkv[:, -SIZES[1] :])


def test_split_qkv_that_does_not_fit() -> None:
    qkv, angles, one = torch.randn(N, sum(SIZES) + SIZES[1]), torch.rand(N, DIM), torch.ones(DIM)
    with pytest.raises(npu.Unsupported, match="halves differ"):
        npu.split_qkv_rmsnorm_rope(qkv, angles, angles, *SIZES, DIM)
    same = angles[:, :8].repeat(1, 2)
    with pytest.raises(npu.Unsupported, match="q_bias is set"):
        npu.split_qkv_rmsnorm_rope(qkv, same, same, *SIZES, DIM, EPS, one, one, q_bias=one, k_bias=one)
    with pytest.raises(ArgumentError, match="input"):
        npu.split_qkv_rmsnorm_rope(qkv[:, :-1], same, same, *SIZES, DIM)
    with pytest.raises(ArgumentError, match="rope_dim"):
        npu.split_qkv_rmsnorm_rope_pos_cache_half_npu(qkv, torch.arange(N), same, *SIZES, DIM, rope_dim=8)
