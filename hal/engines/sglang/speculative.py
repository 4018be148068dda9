"""Speculative decoding: a draft model's steps, and the slots and tokens of what is taken.

What SGLang has for this is CUDA's, Triton's or `sgl_kernel`'s; on the platform `hal_cpu` these stand in, by its names
and parameters. In chains each draft follows the one before it, so that to verify is to extend, causally; `trees` has
what else trees are.
"""

from __future__ import annotations

import pkgutil
from typing import Any

import torch
from torch import Tensor

import hal


class HalDraft:
    """The attention of the draft steps: step i reads a request's tokens, and of each branch i + 1 drafts.

    As in SGLang a branch is a row of slots: where another's candidate goes on in it, it still reads what it drafted
    itself. Such drafts are guesses by a wrong past, and verified like all.
    """

    def __init__(self, runner: Any, steps: int, topk: int) -> None:
        from hal.engines.sglang.attention import HalAttention

        self.branches = topk, steps
        # The last draft is only verified: no step of the draft model reads it.
        self.attn_backends = [HalAttention(runner) for _ in range(steps - 1)]
        self.needs_cpu_seq_lens = self.attn_backends[0].needs_cpu_seq_lens
        for step in self.attn_backends:
            step.prefill_attention_backend_str = step.decode_attention_backend_str = "hal"

    def init_forward_metadata(self, forward_batch: Any) -> None:
        if self.branches[0] == 1:
            for i, step in enumerate(self.attn_backends):
                step.init_forward_metadata(forward_batch, i + 1)
            return
        slots = forward_batch.out_cache_loc.view(-1, *self.branches)
        for i, step in enumerate(self.attn_backends):
            step.init_trees(forward_batch, slots[:, :, : i + 1].flatten(0, 1))

    # All lists are made in the graph, by its buffers: after the drafts the same step verifies them and extends, and
    # until then SGLang keeps the table as it is.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for step in self.attn_backends:
            step.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Nothing."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        slots = forward_batch.out_cache_loc.view(-1, *self.branches)
        for i, step in enumerate(self.attn_backends):
            if self.branches[0] == 1:
                step.init_forward_metadata_out_graph(forward_batch, drafted=i + 1)
                continue
            seen = slots[:, :, : i + 1].flatten(0, 1)
            step.init_forward_metadata_out_graph(forward_batch, tree_slots=seen)


def create_decode_backend(self: Any) -> HalDraft | None:
    """Of SGLang's `DraftBackendFactory`: None where there is no step but the last."""
    return (
        HalDraft(self.draft_model_runner, self.speculative_num_steps, self.topk)
        if self.speculative_num_steps > 1
        else None
    )


def create_draft_extend_backend(self: Any) -> None:
    """Of the same: none of its own, the draft model's attention extends too."""


# --- on CUDA, on SGLang's own platform ------------------------------------------------------------------

WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs"


def draft_extend_backend(self: Any) -> Any:
    """The draft model's attention: named, a graph is made of it."""
    return self.draft_model_runner.attn_backend


def capture_cuda_graphs(self: Any) -> None:
    """SGLang's own, then the graph of the draft model's extension, which it makes of a list of its attentions alone."""
    from sglang.srt.environ import envs
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

    _own["_capture_cuda_graphs"](self)
    without = check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)
    if not without and not envs.SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH.get():
        self.cuda_graph_runner_for_draft_extend = EAGLEDraftExtendCudaGraphRunner(self)


_own: dict[str, Any] = {}


def use_own_drafts() -> None:
    """Where hal's attention was asked for on SGLang's own platform: SGLang knows no drafts' attention but its own.

    Raises:
        EngineError: SGLang's functions are others than hal knows.
    """
    from hal.engines.sglang import seams

    if _own:
        return
    ours = {
        f"{seams.DRAFTS}.create_decode_backend": create_decode_backend,
        f"{seams.DRAFTS}.create_draft_extend_backend": draft_extend_backend,
        WORKER: capture_cuda_graphs,
    }
    for target, theirs in seams.look(ours).items():
        where, _, name = target.rpartition(".")
        _own[name] = theirs
        setattr(pkgutil.resolve_name(where), name, ours[target])


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


def assign_extend_cache_locs_uniform_func(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device,
) -> Tensor:
    """The slots of as many new tokens of each request, ``[bs * draft_token_num]`` int64. As 0.5.17 has it."""
    out = torch.empty(batch_size * draft_token_num, dtype=torch.int64, device=device)
    ends = start_offset + draft_token_num
    return hal.assign_extend_cache_locs(req_to_token, req_pool_indices, start_offset, ends, out)


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
    """The slots of each request's drafts, ``[bs * topk * num_cols]``."""
    assert positions is None
    assert mrope is None
    ends = seq_lens + topk * num_cols
    hal.assign_extend_cache_locs(req_to_token, req_pool_indices, seq_lens, ends, out_cache_loc)


def fill_front_out_cache_loc_func(num_front: Tensor, out_cache_loc: Tensor, front_out_cache_loc: Tensor) -> None:
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


# --- drafts -------------------------------------------------------------------------------------------


def select_top_k_tokens(
    i: int, topk_p: Tensor, topk_index: Tensor, hidden_states: Tensor | None, scores: Tensor | None, topk: int
) -> tuple[Tensor, Tensor | None, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The likeliest `topk` of all branches' candidates. SGLang's own is compiled: longer than a request's drafts take.

    Args:
        topk_p: ``[bs, topk]`` in step 0, then ``[bs * topk, topk]``: what is likeliest after each branch;
            `topk_index`: these tokens.
        hidden_states: ``[bs, size]`` in step 0, then ``[bs * topk, size]``, or None.
        scores: ``[bs, topk]``, the branches' own, of the step before.

    Returns:
        (the branches' tokens ``[bs * topk]``, their states, their scores, (all candidates' scores
        ``[bs, 1 or topk, topk]``, their tokens, which of all steps' candidates the branches are)).
    """
    if scores is None:
        states = None if hidden_states is None else hidden_states.repeat_interleave(topk, dim=0)
        branches = torch.arange(-1, topk, dtype=torch.int64, device=topk_p.device).expand(topk_p.shape[0], -1)
        return topk_index.flatten(), states, topk_p, (topk_p.unsqueeze(1), topk_index, branches)
    all_scores = scores.unsqueeze(2) * topk_p.view(-1, topk, topk)
    tokens = topk_index.view(-1, topk * topk)
    best, chosen = all_scores.flatten(1).topk(topk, dim=1)
    states = hidden_states
    if hidden_states is not None and topk > 1:
        first = torch.arange(chosen.shape[0], dtype=torch.int64, device=chosen.device)[:, None] * topk
        states = hidden_states[(first + chosen // topk).flatten()]
    branches = chosen + topk + topk * topk * (i - 1)
    return tokens.gather(1, chosen).flatten(), states, best, (all_scores, tokens, branches)


# --- verifying ----------------------------------------------------------------------------------------


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
