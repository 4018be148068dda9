"""Trees of drafts: of what a draft model found likeliest, or of n-grams, and verified. A chain is one without forks.

What SGLang has for this is CUDA's, Triton's or `sgl_kernel`'s; on the platform `hal_cpu` these stand in, by its names
and parameters. A request's nodes are numbered so that parents come before their children: 0 is its last token. `links`
are SGLang's: a node's first child (`retrieve_next_token`) and its next sibling, -1 where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# --- making -------------------------------------------------------------------------------------------


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
    """What verifying reads of the drafts. The attention backend asks for masks of the new tokens alone.

    Args:
        parent_list: ``[bs, topk * (spec_steps - 1) + 1]``: which candidate each node that was gone on from is.
        top_scores_index: ``[bs, n - 1]``, ascending: the candidates that became nodes 1 to n - 1.
        tree_mask: ``[bs * n * n]``, receives who sees whom: itself, and its ancestors.
        positions: ``[bs * n]``, receives them.
        retrieve_index, retrieve_next_token, retrieve_next_sibling: ``[bs, n]``, receive the numbers and the links.
    """
    bs, n = seq_lens.shape[0], num_verify_tokens
    gone_on_from = top_scores_index // topk
    candidate = parent_list.gather(1, gone_on_from) if parent_list.shape[1] else gone_on_from
    is_node = top_scores_index[:, None, :] == candidate[:, :, None]
    parents = torch.where(gone_on_from == 0, 0, is_node.int().argmax(dim=2) + 1)
    parents = torch.cat([torch.zeros_like(parents[:, :1]), parents], dim=1)
    mask = tree_mask.view(bs, n, n).zero_()
    at = _count(n, seq_lens).expand(bs, n)
    for _ in range(spec_steps + 1):
        mask.scatter_(2, at[:, :, None], True)
        at = parents.gather(1, at)
    _link(mask, seq_lens, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling)


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
    """The same for n-grams, which come with their masks."""
    mask = tree_mask.view(batch_size, draft_token_num, draft_token_num)
    _link(mask, verified_seq_len, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling)


def _link(mask: Tensor, seq_lens: Tensor, positions: Tensor, index: Tensor, child: Tensor, sibling: Tensor) -> None:
    """Positions, numbers and links of trees by their masks ``[bs, n, n]``."""
    bs, n, _ = mask.shape
    node = _count(n, seq_lens)
    positions.view(bs, n).copy_(seq_lens[:, None] + mask.sum(dim=2) - 1)
    index.copy_(_count(bs * n, seq_lens).view(bs, n))
    # An ancestor of a greater number is nearer.
    parents = torch.where(mask.bool() & (node < node[:, None]), node, -1).amax(dim=2)
    for found, links in (
        (parents[:, None, :] == node[:, None], child),
        ((parents[:, None, :] == parents[:, :, None]) & (parents[:, :, None] >= 0) & (node > node[:, None]), sibling),
    ):
        first = torch.where(found, node, n).amin(dim=2)
        links.copy_(torch.where(first < n, first, -1))


def _count(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, dtype=torch.int64, device=like.device)


# --- verifying ----------------------------------------------------------------------------------------


def _walk(
    child: Tensor, sibling: Tensor, fits: Callable[[Tensor, Tensor], Tensor], accept_index: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From each request's root to the first child that fits, and so on, until none does.

    Args:
        child: ``[bs, n]``; sibling: likewise.
        fits: takes nodes ``[bs, 1]`` and a child of each, -1 for none; returns which to go to.
        accept_index: ``[bs, depth]``, receives the nodes of the way among all requests', -1 past its end.

    Returns:
        (the last node ``[bs, 1]``, how many came after the root ``[bs, 1]``, the next of each on its way ``[bs, n]``)
    """
    bs, n = child.shape
    base = _count(bs, child)[:, None] * n
    at = torch.zeros_like(base)
    length, way = torch.zeros_like(at), torch.zeros_like(child)
    accept_index.fill_(-1)
    accept_index[:, :1] = base
    candidate = child[:, :1]
    for _ in range(n - 1):  # each looks at another node
        good = fits(at, candidate)
        seen = candidate.clamp(min=0)
        way.scatter_(1, at, torch.where(good, candidate, way.gather(1, at)))
        at = torch.where(good, candidate, at)
        candidate = torch.where(candidate < 0, -1, torch.where(good, child, sibling).gather(1, seen))
        length += good
        place = length.clamp(max=accept_index.shape[1] - 1)
        accept_index.scatter_(1, place, (base + at).to(accept_index.dtype))
    return at, length, way


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
    """Drafts are taken as long as one is the target's own choice; then comes that choice itself.

    Args:
        predicts: ``[bs * n]``, receives the target's tokens.
        accept_index: ``[bs, depth]``, receives the places in `predicts` of all that is taken, -1 past them.
        accept_token_num: ``[bs]``, receives the number of drafts taken.
        candidates: ``[bs, n]``, a request's last token and its drafts.
        retrieve_next_token: ``[bs, n]``, the links; retrieve_next_sibling: likewise.
        target_predict: ``[bs, n]``, what the target has after each of the candidates.
    """

    def fits(at: Tensor, drafted: Tensor) -> Tensor:
        token = candidates.gather(1, drafted.clamp(min=0))
        return (drafted >= 0) & (token == target_predict.gather(1, at))

    _, length, _ = _walk(retrieve_next_token, retrieve_next_sibling, fits, accept_index)
    predicts.copy_(target_predict.flatten())
    accept_token_num.copy_(length.squeeze(1))
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

    Of the drafts that follow a token, x is taken with the target's probability p(x), none with what is left; then comes
    a token of p without them. So tokens are distributed as without speculation.

    Args:
        uniform_samples: ``[bs, n]`` in [0, 1), one a token of `candidates`, for what follows it;
            `uniform_samples_for_final_sampling`: ``[bs]``.
        target_probs: ``[bs, n, vocabulary]``, the target's after each token of `candidates`.
        threshold_single, threshold_acc: below 1, take more drafts than the distribution has.
    """
    rows = _count(candidates.shape[0], candidates)[:, None]
    total = torch.zeros_like(uniform_samples[:, :1])
    refused = torch.zeros_like(candidates, dtype=torch.bool)

    def fits(at: Tensor, drafted: Tensor) -> Tensor:
        node = drafted.clamp(min=0)
        p = torch.where(drafted >= 0, target_probs[rows, at, candidates.gather(1, node)], 0.0)
        total.add_(p)
        coin = uniform_samples.gather(1, at)
        good = (drafted >= 0) & ((coin < total / threshold_acc) | (p >= threshold_single))
        # Those beside the one that is taken are no longer refused: what follows it is another distribution.
        total.masked_fill_(good, 0.0)
        refused.scatter_(1, node, refused.gather(1, node) | (drafted >= 0)).masked_fill_(good, False)
        return good

    last, length, way = _walk(retrive_next_token, retrive_next_sibling, fits, accept_index)
    left = target_probs[rows, last].squeeze(1).double()
    without = torch.zeros_like(left).scatter_add_(1, candidates, refused.double())
    left.masked_fill_(without > 0, 0.0)
    below = left.cumsum(dim=1)
    final = torch.searchsorted(
        below, uniform_samples_for_final_sampling.double()[:, None] * below[:, -1:], right=True
    ).clamp(max=left.shape[1] - 1)
    predicts.view(candidates.shape).copy_(candidates.gather(1, way).scatter_(1, last, final))
    accept_token_num.copy_(length.squeeze(1))
