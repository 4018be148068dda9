"""Speculative decoding in chains: each draft follows the one before it, so that to verify is to extend, causally.

What SGLang has for this is CUDA's, Triton's or `sgl_kernel`'s; on the platform `hal_cpu` these stand in, by its names
and parameters. Trees of drafts (`limits.of_speculation` refuses them) never get here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hal


class HalDraft:
    """The attention of a chain's draft steps: step i reads a request's tokens and i + 1 drafts."""

    def __init__(self, runner: Any, steps: int) -> None:
        from hal.engines.sglang.attention import HalAttention

        # The last draft is only verified: no step of the draft model reads it.
        self.attn_backends = [HalAttention(runner) for _ in range(steps - 1)]
        for step in self.attn_backends:
            step.prefill_attention_backend_str = step.decode_attention_backend_str = "hal"

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for i, step in enumerate(self.attn_backends):
            step.init_forward_metadata(forward_batch, i + 1)


def create_decode_backend(self: Any) -> HalDraft | None:
    """Of SGLang's `DraftBackendFactory`: None where there is no step but the last."""
    return (
        HalDraft(self.draft_model_runner, self.speculative_num_steps)
        if self.speculative_num_steps > 1
        else None
    )


def create_draft_extend_backend(self: Any) -> None:
    """Of the same: none of its own, the draft model's attention extends too."""


# --- slots --------------------------------------------------------------------------------------------


def assign_req_to_token_pool_func(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """New slots to the requests' rows."""
    hal.write_req_to_token(req_to_token, req_pool_indices, start_offset, end_offset, out_cache_loc)


def assign_draft_cache_locs_contiguous_func(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    topk: int,
    num_cols: int,
    positions: Tensor | None = None,
    mrope: Tensor | None = None,
) -> None:
    """The slots of each request's drafts, ``[bs * num_cols]``."""
    assert topk == 1
    assert positions is None
    assert mrope is None
    hal.assign_extend_cache_locs(req_to_token, req_pool_indices, seq_lens, seq_lens + num_cols, out_cache_loc)


def fill_front_out_cache_loc_func(
    num_front: Tensor, out_cache_loc: Tensor, front_out_cache_loc: Tensor
) -> None:
    """The first `num_front[i]` slots of each request's window of `out_cache_loc`, packed; the rest stays."""
    window = out_cache_loc.view(num_front.shape[0], -1)
    front = window[_count(window.shape[1], window) < num_front[:, None]]
    front_out_cache_loc[: front.shape[0]] = front


def fill_accept_out_cache_loc_func(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor, size: int
) -> None:
    """The slots that `accept_index` names where it is not -1, packed; the rest stays."""
    accepted = out_cache_loc[accept_index[accept_index >= 0].long()]
    accept_out_cache_loc[: accepted.shape[0]] = accepted


def _count(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, dtype=torch.int64, device=like.device)


# --- the chain ----------------------------------------------------------------------------------------


def select_top_k_tokens(
    i: int, topk_p: Tensor, topk_index: Tensor, hidden_states: Tensor, scores: Tensor, topk: int
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The one candidate. SGLang's own is compiled, which takes longer than all drafts of a request."""
    assert topk == 1
    parents = torch.full_like(topk_index, i)
    return topk_index.flatten(), hidden_states, topk_p, (topk_p.unsqueeze(1), topk_index, parents)


def _link(
    seq_lens: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    following: Tensor,
    sibling: Tensor,
    n: int,
) -> None:
    """A chain of n tokens a request, in the form of SGLang's trees; `mask` has rows of n columns."""
    bs = seq_lens.shape[0]
    step = _count(n, seq_lens)
    mask.view(bs, n, n).copy_(step[:, None] >= step)
    positions.view(bs, n).copy_(seq_lens[:, None] + step)
    index.copy_(_count(bs * n, seq_lens).view(bs, n))
    following.copy_(torch.where(step + 1 < n, step + 1, -1).expand(bs, n))
    sibling.fill_(-1)


def build_tree_kernel_efficient_func(
    parent_list: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: Any,
) -> None:
    """What verifying reads of the drafts: a chain. The attention backend asks for masks of the new tokens alone."""
    assert topk == 1
    _link(
        seq_lens, tree_mask, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling, num_verify_tokens
    )  # fmt: skip


def reconstruct_indices_from_tree_mask_func(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """The same for n-grams: `ChainCorpus` makes no other masks."""
    _link(
        verified_seq_len, tree_mask, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling,
        draft_token_num,
    )  # fmt: skip


# --- verifying ----------------------------------------------------------------------------------------


def _accept(
    correct: Tensor, tokens: Tensor, predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor
) -> None:
    """Writes what was found: `correct` [bs, n - 1] drafts that fit, `tokens` [bs, n] what follows each token."""
    bs, n = tokens.shape
    taken = correct.int().cumprod(dim=1).sum(dim=1)
    step = _count(n, tokens)
    kept = step <= taken[:, None]
    predicts.view(bs, n).copy_(torch.where(kept, tokens, 0))
    accept_index.copy_(torch.where(kept, _count(bs * n, tokens).view(bs, n), -1))
    accept_token_num.copy_(taken)


def verify_tree_greedy_func(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts are taken as long as they are the target's own choice; then comes that choice itself.

    Args:
        predicts: ``[bs * n]``, receives the target's tokens for all that is taken.
        accept_index: ``[bs, n]``, receives their places in `predicts`, -1 past them.
        accept_token_num: ``[bs]``, receives the number of drafts taken.
        candidates: ``[bs, n]``, a request's last token and its drafts.
        target_predict: ``[bs, n]``, what the target has after each of these.
    """
    correct = candidates[:, 1:] == target_predict[:, :-1]
    _accept(correct, target_predict, predicts, accept_index, accept_token_num)
    return predicts, accept_index, accept_token_num


def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Rejection sampling of drafts that were not sampled (Leviathan et al. 2023, a draft's own probability 1).

    A draft x is taken with the target's probability p(x); the first that is not gives way to a token of p without x.
    So tokens are distributed as without speculation.

    Args:
        uniform_samples: ``[bs, n]`` in [0, 1), one a draft; `uniform_samples_for_final_sampling`: ``[bs]``.
        target_probs: ``[bs, n, vocabulary]``, the target's after each token of `candidates`.
        threshold_single, threshold_acc: below 1, take more drafts than the distribution has.
    """
    bs, n = candidates.shape
    drafts = candidates[:, 1:, None]
    p = target_probs[:, :-1].gather(2, drafts).squeeze(2)
    correct = (uniform_samples[:, :-1] < p / threshold_acc) | (p >= threshold_single)
    taken = correct.int().cumprod(dim=1).sum(dim=1)
    rows = _count(bs, candidates)
    left = target_probs[rows, taken].double()
    refused = taken < n - 1
    left[rows[refused], candidates[rows, (taken + 1).clamp(max=n - 1)][refused]] = 0.0
    below = left.cumsum(dim=1)
    last = torch.searchsorted(
        below, uniform_samples_for_final_sampling.double()[:, None] * below[:, -1:], right=True
    ).clamp(max=left.shape[1] - 1)
    tokens = candidates.roll(-1, dims=1)
    tokens.scatter_(1, taken[:, None].long(), last)
    _accept(correct, tokens, predicts, accept_index, accept_token_num)


def top_k_renorm_prob(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Probabilities ``[n, vocabulary]`` of each row's `top_ks` likeliest tokens alone, again summing to 1."""
    return _renorm(probs, lambda ordered: _count(ordered.shape[1], probs) < top_ks[:, None])


def top_p_renorm_prob(probs: Tensor, top_ps: Tensor) -> Tensor:
    """The same of the fewest tokens that make up `top_ps`."""
    return _renorm(probs, lambda ordered: ordered.cumsum(dim=1) - ordered < top_ps[:, None])


def _renorm(probs: Tensor, keep: Any) -> Tensor:
    ordered, order = probs.sort(dim=1, descending=True, stable=True)
    kept = torch.zeros_like(probs).scatter_(1, order, torch.where(keep(ordered), ordered, 0.0))
    return kept / kept.sum(dim=1, keepdim=True)


def fill_bonus_tokens_func(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int, batch_size: int
) -> None:
    """The last token that each request took."""
    taken = accept_tokens.view(batch_size, accept_stride)
    bonus_tokens.copy_(taken.gather(1, accept_lens[:, None].long() - 1).squeeze(1))
