"""What vllm-ascend's op tests ask of its operators, asked of hal's ops on the lowered kernels: every access is traced.

Its shapes, layouts and conventions, as its tests and their golden functions have them; the truth is ours, in float64.
What hal has no op for stands in docs/engines.md.
"""

from __future__ import annotations

import pytest
import torch

import hal
from hal.kv.pool import KVPool

F64 = torch.float64
PAGE = 128


def rotated(x: torch.Tensor, angles: torch.Tensor, neox: bool) -> torch.Tensor:
    """x ``[n, heads, dim]`` by ``angles`` ``[n, rotary_dim]``, cosines and then sines; the rest of a head as it is."""
    out, (cos, sin) = x.to(F64, copy=True), angles.to(F64).unsqueeze(1).chunk(2, -1)
    half = cos.shape[-1]
    one, two = (slice(0, half), slice(half, 2 * half)) if neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    a, b = out[..., one].clone(), out[..., two].clone()
    out[..., one], out[..., two] = a * cos - b * sin, b * cos + a * sin
    return out


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.to(F64)
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(F64)


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Of fp32 arithmetic, rounded once."""
    unit = torch.finfo(got.dtype).eps / 2
    torch.testing.assert_close(got.to(F64), want, rtol=unit * (1 + 2**-8), atol=2**-20)


@pytest.mark.parametrize(
    ("heads", "dim", "rotary", "neox", "dtype"),
    [
        ((17, 17), 96, 32, True, torch.float16),
        ((17, 17), 64, 64, True, torch.float16),
        ((64, 1), 128, 96, True, torch.bfloat16),
        ((64, 1), 64, 32, False, torch.bfloat16),
    ],
)
def test_rotary_embedding(heads: tuple[int, int], dim: int, rotary: int, neox: bool, dtype: torch.dtype) -> None:
    """Parts of a fused qkv, angles of the tensors' own dtype by position."""
    sizes = [heads[0] * dim, heads[1] * dim, heads[1] * dim]
    qkv, angles = torch.randn(10, sum(sizes)).to(dtype), torch.randn(512, rotary).to(dtype)
    positions = torch.randint(512, (10,))
    was = qkv.clone()
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in qkv.split(sizes, -1))
    hal.rope_kv_write(q, k, v, angles, positions, interleaved=not neox)
    for part, before in zip((q, k), was.split(sizes, -1), strict=False):
        near(part, rotated(before.unflatten(-1, (-1, dim)), angles[positions], neox))
    assert torch.equal(qkv[:, -sizes[2] :], was[:, -sizes[2] :])


@pytest.mark.parametrize("rotary", [64, 128])
def test_split_qkv_rmsnorm_rope(rotary: int) -> None:
    sizes = [12 * 128, 128, 128]
    qkv, angles = torch.randn(4, sum(sizes)).bfloat16(), torch.rand(1024, rotary).bfloat16()
    weights, positions, was = torch.randn(2, 128).bfloat16(), torch.randint(1024, (4,)), qkv.clone()
    q, k, v = (part.unflatten(-1, (-1, 128)) for part in qkv.split(sizes, -1))
    hal.qk_norm_rope_kv_write(q, k, v, *weights, angles, positions, eps=1e-6)
    for part, before, weight in zip((q, k), was.split(sizes, -1), weights, strict=False):
        near(part, rotated(normed(before.unflatten(-1, (-1, 128)), weight, 1e-6), angles[positions], True))
    assert torch.equal(v.flatten(1), was[:, -128:])


def test_latent_rows_and_their_rotated_keys_in_two_caches() -> None:
    """The caches that `mla_preprocess` fills by slot, its test's one claim: 512 numbers and 64, a page of 128."""
    lora, rope = torch.randn(5, 1, 512).bfloat16(), torch.randn(5, 1, 64).bfloat16()
    near_cache, rope_cache = (torch.zeros(3, PAGE, 1, d).bfloat16() for d in (512, 64))
    slots = torch.tensor([127, 128, -1, 383, 384], dtype=torch.int32)
    hal.kv_write(lora, rope, near_cache, rope_cache, slots)
    for cache, rows in ((near_cache, lora), (rope_cache, rope)):
        want = torch.zeros_like(cache)
        want.view(-1, 1, cache.shape[-1])[[127, 128, 383]] = rows[[0, 1, 3]]
        assert torch.equal(cache, want)


def test_copy_mla_kv() -> None:
    """Rows between one layer of each of two interleaved caches, slots by pairs, either of which may be -1."""
    source, there = torch.randn(4, 2, PAGE, 576).bfloat16(), torch.full((4, 3, PAGE, 576), 42).bfloat16()
    a, b = torch.arange(8) + 127, torch.arange(8) + 255
    a[-1], b[::2] = -1, -1
    want = there.clone()
    for i in (1, 3, 5):
        want[b[i] // PAGE, 1, b[i] % PAGE] = source[a[i] // PAGE, 1, a[i] % PAGE]
    one = [KVPool(t[:, 1:2], None, "page_first_direct", PAGE) for t in (source, there)]
    hal.kv_transfer(*one, a, b)
    assert torch.equal(there, want)


def test_slot_mapping() -> None:
    """Of requests whose rows of the table are named apart, each a run of positions; the padding stays (theirs: -1)."""
    table = torch.tensor([[10, 11, 0, 0], [20, 21, 0, 0], [30, 31, 0, 0]], dtype=torch.int32)
    out = torch.full((12,), 777, dtype=torch.int32)
    ends = torch.tensor([0, 5, 8], dtype=torch.int32)
    hal.build_kv_indices_from_blocks(table[[2, 0]], ends.diff(), 4, ends, out, torch.tensor([0, 4], dtype=torch.int32))
    assert out.tolist() == [120, 121, 122, 123, 124, 44, 45, 46, *[777] * 4]


@pytest.mark.parametrize("new", [1, 3])
def test_paged_attention(new: int) -> None:
    """16 query heads of 8, blocks of 128 tokens in falling order, a table whose rest is 0.

    Of one new token a request: paged attention. Of more: causal, its mask against the lower right corner.
    """
    lengths = [129, 16, 23 + new]
    table, free = torch.zeros(3, 2, dtype=torch.int32), list(range(6))
    for row, n in zip(table, lengths, strict=True):
        for i in range(-(-n // PAGE)):
            row[i] = free.pop()
    lens, ends = (
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int(),
    )
    slots = torch.empty(sum(lengths), dtype=torch.int32)
    hal.build_kv_indices_from_blocks(table, lens, PAGE, ends, slots)
    k, v = torch.randn(2, sum(lengths), 8, 128).half()
    caches = torch.full((2, 6, PAGE, 8, 128), 1e4).half()
    hal.kv_write(k, v, *caches, slots)
    q = torch.randn(3 * new, 16, 128).half()
    if new == 1:
        out = hal.decode_attention(q, *caches, ends, slots, scale=128**-0.5)
    else:
        starts = torch.arange(0, 3 * new + 1, new, dtype=torch.int32)
        out = hal.extend_attention(q, *caches, starts, ends, slots, scale=128**-0.5)
    for i, (n, end) in enumerate(zip(lengths, ends[1:].tolist(), strict=True)):
        keys, values = (x[end - n : end].to(F64).repeat_interleave(2, 1) for x in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q[i * new : (i + 1) * new].to(F64), keys) * 128**-0.5
        logits += torch.full((new, n), float("-inf")).triu(n - new + 1)
        want = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values)
        # The weights are multiplied in fp16 too.
        torch.testing.assert_close(out[i * new : (i + 1) * new].to(F64), want, rtol=2**-10, atol=2**-10)
