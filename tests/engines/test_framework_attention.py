"""What adapters make of attention's log-sum-exp: sinks, parts of keys, trees of drafts; against plain softmax."""

from __future__ import annotations

import pytest
import torch

import hal
from hal.engines import join_parts, join_sinks
from hal.engines._masks import attend_trees, lists_of_tokens
from hal.engines._mrope import axes_of, rows_of_tokens

N, HEADS, DIM, KEYS = 5, 4, 8, 9


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q ``[n, heads, dim]``; k, v ``[keys, heads, dim]``."""
    logits = torch.einsum("nhd,khd->nhk", q, k)
    out = torch.einsum("nhk,khd->nhd", logits.softmax(-1).nan_to_num(0.0), v)
    return out, logits.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(N, HEADS, DIM), torch.randn(KEYS, HEADS, DIM), torch.randn(KEYS, HEADS, DIM)
    sinks = torch.randn(HEADS)
    logits = torch.cat([torch.einsum("nhd,khd->nhk", q, k), sinks.view(1, -1, 1).expand(N, -1, 1)], dim=-1)
    want = torch.einsum("nhk,khd->nhd", logits.softmax(-1)[..., :KEYS], v)
    out, lse = attend(q, k, v)
    found = join_sinks(out.to(dtype), lse, sinks.to(dtype).float())
    torch.testing.assert_close(found, want.to(dtype), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=2e-2)
    nothing = join_sinks(torch.zeros(1, HEADS, DIM), torch.full((1, HEADS), -torch.inf), sinks)
    assert not nothing.any()


@pytest.mark.parametrize("first", [0, 1, 4, KEYS])
def test_parts(first: int) -> None:
    """A part without keys, first or last, has zeros, or whatever lay there."""
    q, k, v = torch.randn(N, HEADS, DIM), torch.randn(KEYS, HEADS, DIM), torch.randn(KEYS, HEADS, DIM)
    want, total = attend(q, k, v)
    (a, lse), (b, other) = attend(q, k[:first], v[:first]), attend(q, k[first:], v[first:])
    for x, keys in ((a, first), (b, KEYS - first)):
        if not keys:
            x.fill_(torch.nan)
    assert join_parts(a, lse, b, other, lse) is a
    torch.testing.assert_close(a, want)
    torch.testing.assert_close(lse, total)


def test_two_parts_without_keys() -> None:
    nan, none = torch.full((1, HEADS, DIM), torch.nan), torch.full((1, HEADS), -torch.inf)
    lse = torch.zeros(1, HEADS)
    assert not join_parts(nan, none, nan.clone(), -none, lse).any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("prefixes", [[6, 0, 11], [3]])
def test_trees(prefixes: list[int]) -> None:
    """Each new token sees its request's prefix and its ancestors: as an attention over just these."""
    bs, new, kv_heads, cap = len(prefixes), 4, 2, 5.0
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 2], [-1, 0, 0, 0]])[:bs]
    mask = torch.zeros(bs, new, new, dtype=torch.bool)
    for b in range(bs):
        for i in range(new):
            at = i
            while at >= 0:
                mask[b, i, at], at = True, int(parents[b, at])
    k_cache, v_cache = torch.randn(64, kv_heads, DIM), torch.randn(64, kv_heads, DIM + 3)
    free = torch.randperm(64).split([*prefixes, bs * new, 64 - sum(prefixes) - bs * new])
    slots = free[bs].view(bs, new)
    indptr = torch.tensor([0, *torch.tensor(prefixes).cumsum(0).tolist()])
    q, out = torch.randn(bs * new, HEADS, DIM), torch.empty(bs * new, HEADS, DIM + 3)
    trees = torch.where(mask, slots.unsqueeze(1), -1).flatten(0, 1)
    lse, options = torch.empty(bs * new, HEADS), {"scale": 0.4, "logit_cap": cap}
    attend_trees(hal, q, k_cache, v_cache, indptr, torch.cat(free[:bs]), trees, out, lse, **options)
    for b in range(bs):
        for i in range(new):
            seen = torch.cat([free[b], slots[b][mask[b, i]]])
            k, v = (x[seen].repeat_interleave(HEADS // kv_heads, 1) for x in (k_cache, v_cache))
            logits = cap * torch.tanh(torch.einsum("hd,khd->hk", q[b * new + i], k) * 0.4 / cap)
            want = torch.einsum("hk,khd->hd", logits.softmax(-1), v)
            torch.testing.assert_close(out[b * new + i], want)
            torch.testing.assert_close(lse[b * new + i], logits.logsumexp(-1))


def test_branches() -> None:
    """Fewer slots than new tokens of a request: as in a list of all of them."""
    q, k, v = torch.randn(4, HEADS, DIM), torch.randn(9, HEADS, DIM), torch.randn(9, HEADS, DIM)
    out = torch.empty(4, HEADS, DIM)
    indptr, slots = torch.tensor([0, 3, 4]), torch.tensor([8, 1, 0, 5])
    branches = torch.tensor([[2], [3], [4], [6]])
    attend_trees(hal, q, k, v, indptr, slots, branches, out, scale=0.4)
    for n, prefix in enumerate(([8, 1, 0], [8, 1, 0], [5], [5])):
        seen = [*prefix, int(branches[n])]
        torch.testing.assert_close(out[n : n + 1], attend(q[n : n + 1] * 0.4, k[seen], v[seen])[0])


def test_axes() -> None:
    assert axes_of((2, 3, 3), interleaved=False) == [0, 0, 1, 1, 1, 2, 2, 2]
    assert axes_of((4, 2, 2), interleaved=True) == [0, 1, 2, 0, 1, 2, 0, 0]


def test_rows_of_tokens() -> None:
    """Each lane of a token's row is from the row of its own axis's position."""
    table = torch.arange(40.0).view(10, 4)
    positions = torch.tensor([[3, 0, 9], [1, 5, 2], [7, 7, 4]])
    rows, tokens = rows_of_tokens(table, positions, torch.tensor([0, 2, 0, 2]))
    assert rows.is_contiguous()
    assert tokens.tolist() == [0, 1, 2]
    assert rows.tolist() == [[12, 29, 14, 31], [0, 29, 2, 31], [36, 17, 38, 19]]


@pytest.mark.parametrize("skip_prefix", [False, True])
def test_lists_of_tokens(skip_prefix: bool) -> None:
    """Two requests: two queries over three keys, one over two."""
    mask = torch.tensor([0, 1, 0, 1, 1, 1, 0, 0], dtype=torch.int8)
    slots = torch.tensor([7, 4, 9, 2, 5], dtype=torch.int32)
    starts, qo, kv = torch.tensor([0, 6, 8]), torch.tensor([0, 2, 3]), torch.tensor([0, 3, 5])
    indptr, indices = lists_of_tokens(mask, starts, qo, kv, slots, skip_prefix)
    assert indptr.tolist() == [0, 3, 6, 8]
    want = [-1, 4, -1, 7, 4, 9, -1, -1]
    if skip_prefix:  # one key of the first request, one of the second
        want[0], want[6] = 7, 2
    assert indices.tolist() == want
