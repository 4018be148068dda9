"""SGLang's names of attention's kernels on hal's ops, against plain torch: masks, sinks, parts. Runs without SGLang."""

from __future__ import annotations

import pytest
import torch

from hal.engines.sglang import kernels

SLOTS, HEADS, DIM = 24, 2, 8


@pytest.fixture(autouse=True)
def seeded(fresh: None) -> None:
    torch.manual_seed(0)


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int,
    cap: float,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of one request: q ``[m, heads, dim]`` of the last of ``l`` tokens, k and v ``[l, kv_heads, dim]``."""
    m, length = q.shape[0], k.shape[0]
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1).transpose(0, 1) for t in (k, v))
    logits = q.transpose(0, 1) @ k.mT * scale
    if cap:
        logits = cap * torch.tanh(logits / cap)
    at, j = torch.arange(length - m, length)[:, None], torch.arange(length)
    seen = (j <= at) & ((j >= at - window) | (window < 0))
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(-1, m, 1)], dim=-1)
    return (logits.softmax(-1)[..., :length] @ v).transpose(0, 1), logits.logsumexp(-1).T


LENS, NEW = [7, 1, 12], [3, 1, 5]


@pytest.mark.parametrize(
    ("window", "cap", "sinking"), [(-1, 0.0, False), (4, 5.0, False), (-1, 0.0, True), (2, 0.0, True)]
)
def test_attention(window: int, cap: float, sinking: bool) -> None:
    k_cache, v_cache = torch.randn(SLOTS, HEADS, DIM), torch.randn(SLOTS, HEADS, 4)
    slots = torch.randperm(SLOTS)[: sum(LENS)]
    kv = torch.tensor([0, *torch.tensor(LENS).cumsum(0).tolist()])
    qo = torch.tensor([0, *torch.tensor(NEW).cumsum(0).tolist()])
    q = torch.randn(sum(NEW), 2 * HEADS, DIM)
    scale = 0.3
    lists = [slots[kv[i] : kv[i + 1]] for i in range(3)]
    sinks = torch.randn(2 * HEADS) if sinking else None
    each = [dense(q[qo[i] : qo[i + 1]], k_cache[s], v_cache[s], scale, window, cap, sinks) for i, s in enumerate(lists)]
    want, sums = map(torch.cat, zip(*each, strict=True))
    out = torch.zeros_like(want)
    options = {"sm_scale": scale, "logit_cap": cap, "sliding_window_size": window, "sinks": sinks}
    kernels.extend_attention_fwd_unified(q, out, k_cache, v_cache, 1.0, 1.0, qo, kv, slots, None, 5, **options)
    torch.testing.assert_close(out, want)
    # By the signature of before there were scales.
    kernels.extend_attention_fwd_unified(q, out.zero_(), k_cache, v_cache, qo, kv, slots, None, 5, **options)
    torch.testing.assert_close(out, want)
    # The cache without the new rows, which come apart.
    cached = [s[: len(s) - m] for s, m in zip(lists, NEW, strict=True)]
    new = torch.cat([s[len(s) - m :] for s, m in zip(lists, NEW, strict=True)])
    prefix = torch.tensor([0, *torch.tensor([len(s) for s in cached]).cumsum(0).tolist()], dtype=torch.int32)
    # SGLang's list may be longer than what it says.
    given, lse, out = torch.cat([*cached, torch.tensor([99])]), torch.empty(sum(NEW), 2 * HEADS), out.zero_()
    fresh, pool = (q, k_cache[new], v_cache[new]), (k_cache, v_cache, qo.int(), prefix, given)
    kernels.extend_attention_fwd(*fresh, out, *pool, lse_extend=lse, **options)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, sums)
    if window < 0:
        parts = []
        for skipped in ({"skip_extend": True}, {"skip_prefix": True}):
            part, sums_of = torch.full_like(out, torch.nan), torch.empty_like(lse)
            kernels.extend_attention_fwd(*fresh, part, *pool, sm_scale=scale, lse_extend=sums_of, **skipped)
            parts += [part, sums_of]
        both, total = kernels.merge_state_triton(*parts)
        if sinks is None:
            torch.testing.assert_close(both, want)
            torch.testing.assert_close(total, sums)
        torch.testing.assert_close(kernels.merge_state_v2(*parts), (both, total))
        last = q[qo[1:] - 1]
        one = torch.zeros(3, 2 * HEADS, 4)
        kernels.decode_attention_fwd(
            last, k_cache, v_cache, one, kv, slots, None, None, None, 8, scale, 1.0, 1.0, logit_cap=cap, sinks=sinks
        )
        torch.testing.assert_close(one, want[qo[1:] - 1])


def test_attention_refuses() -> None:
    x, none = torch.zeros(1, 2, 8), torch.tensor([0, 0])
    for changed in ({"xai_temperature_len": 3}, {"score_mod": len}, {"k_scale": 2.0}):
        with pytest.raises(kernels.Unsupported, match=f"extend_attention_fwd: {next(iter(changed))} is set"):
            kernels.extend_attention_fwd(x, x, x, x, x, x, none, none, none, **changed)
    masked = {"custom_mask": none, "sliding_window_size": 3}
    with pytest.raises(kernels.Unsupported, match="custom_mask is set, and mask_indptr is not"):
        kernels.extend_attention_fwd(x, x, x, x, x, x, none, none, none, custom_mask=none)
    with pytest.raises(kernels.Unsupported, match="sliding_window_size 3 beside custom_mask"):
        kernels.extend_attention_fwd(x, x, x, x, x, x, none, none, none, mask_indptr=none, **masked)


@pytest.mark.parametrize("causal", [True, False])
def test_whole_prompts(causal: bool) -> None:
    q, k, v = torch.randn(8, 2 * HEADS, DIM), torch.randn(8, HEADS, DIM), torch.randn(8, HEADS, 4)
    out = torch.empty(8, 2 * HEADS, 4)
    kernels.context_attention_fwd(q, k, v, out, torch.tensor([0, 3]), torch.tensor([3, 5]), 5, causal)
    for begin, end in ((0, 3), (3, 8)):
        for i in range(begin, end):
            last = i + 1 if causal else end
            want, _ = dense(q[i : i + 1], k[begin:last], v[begin:last], DIM**-0.5, -1, 0.0, None)
            torch.testing.assert_close(out[i], want[0])


def test_states_of_base_2() -> None:
    a, b, s, t = torch.randn(3, 2, 4), torch.randn(3, 2, 4), torch.randn(3, 2), torch.randn(3, 2)
    out, lse = kernels.merge_state(a, s, b, t)
    weight = (2**s / (2**s + 2**t))[..., None]
    torch.testing.assert_close(out, a * weight + b * (1 - weight))
    torch.testing.assert_close(lse, torch.log2(2**s + 2**t))


@pytest.mark.parametrize("skip_prefix", [True, False])
def test_masks(skip_prefix: bool) -> None:
    """Each query over the keys that its row of the mask has; `skip_prefix`: all of the prefix, whatever it says."""
    k_cache, v_cache = torch.randn(SLOTS, HEADS, DIM), torch.randn(SLOTS, HEADS, 4)
    slots = torch.randperm(SLOTS)[: sum(LENS)].int()
    kv, qo = (torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()]) for n in (LENS, NEW))
    masks = [(torch.rand(m, n) < 0.6).to(torch.int8) for m, n in zip(NEW, LENS, strict=True)]
    starts = torch.tensor([0, *torch.tensor([m.numel() for m in masks]).cumsum(0).tolist()])
    q, sinks = torch.randn(sum(NEW), 2 * HEADS, DIM), torch.randn(2 * HEADS)
    want, sums = torch.empty(sum(NEW), 2 * HEADS, 4), torch.empty(sum(NEW), 2 * HEADS)
    for i, (m, n) in enumerate(zip(NEW, LENS, strict=True)):
        for j in range(m):
            seen = masks[i][j].bool() | (skip_prefix & (torch.arange(n) < n - m))
            at, s = qo[i] + j, slots[kv[i] : kv[i + 1]][seen]
            out, lse = dense(q[at : at + 1], k_cache[s], v_cache[s], 0.3, -1, 0.0, sinks)
            want[at], sums[at] = out[0], lse[0]
    mask = torch.cat([m.flatten() for m in masks])
    cached = [slots[kv[i] : kv[i + 1] - m] for i, m in enumerate(NEW)]
    new = torch.cat([slots[kv[i + 1] - m : kv[i + 1]] for i, m in enumerate(NEW)])
    prefix = torch.tensor([0, *torch.tensor([len(s) for s in cached]).cumsum(0).tolist()])
    out, lse = torch.empty_like(want), torch.empty_like(sums)
    pool = (k_cache, v_cache, qo, prefix, torch.cat(cached), mask, True, starts)
    options = {"sm_scale": 0.3, "lse_extend": lse, "skip_prefix_custom_mask": skip_prefix, "sinks": sinks}
    kernels.extend_attention_fwd(q, k_cache[new], v_cache[new], out, *pool, **options)
    torch.testing.assert_close(out, want)
    seeing = (sums - sinks).abs() > 1e-6
    torch.testing.assert_close(lse[seeing], sums[seeing])
    if not skip_prefix:
        kernels.extend_attention_fwd_unified(
            q, out.zero_(), k_cache, v_cache, 1.0, 1.0, qo, kv, slots, None, 5, mask, starts, sm_scale=0.3, sinks=sinks
        )
        torch.testing.assert_close(out, want)
