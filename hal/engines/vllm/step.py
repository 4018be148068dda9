"""What a step's attention needs beside q and the cache: each request's slots, listed once a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

import hal
from hal.engines import asked, layer
from hal.engines._softmax import join_sinks, room_for
from hal.engines.vllm import limits, rotary


@dataclass
class Step(AttentionMetadata):
    """One step of a group of layers that share a block table.

    The first `decodes` requests have one new token each. `kv_indptr` and `kv_indices` are as in hal's attention ops.
    """

    num_actual_tokens: int
    num_reqs: int
    decodes: int
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    max_query_len: int
    max_seq_len: int
    slot_mapping: Tensor

    def __post_init__(self) -> None:
        # Cut once, not in every layer. The lists say where a request's rows are in all of q: no part of it is cut out.
        n = self.decodes
        self.lists_of_decodes = self.kv_indptr[: n + 1], self.kv_indices
        self.lists_of_others = self.qo_indptr[n:], self.kv_indptr[n:], self.kv_indices

    def attend(
        self, ops: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sinks: Tensor | None = None, **options: Any
    ) -> None:
        """Attention of this step's queries: single tokens by `decode_attention`, all others by `extend_attention`.

        Rows of q and out past the step's tokens are padding, left alone.

        Args:
            ops: bound.
            q: ``[tokens, q_heads, head_dim]``.
            k: the cache's.
            v: likewise.
            out: ``[tokens, q_heads, v_head_dim]``, written.
            sinks: ``[q_heads]``, of layers that have them.
            options: the ops' keyword arguments.
        """
        n = self.decodes
        lse = room_for(q, sinks)
        if n:
            of_decodes = None if lse is None else lse[:n]
            ops.decode_attention(q[:n], k, v, *self.lists_of_decodes, out[:n], of_decodes, **options)
        if n < self.num_reqs:
            ops.extend_attention(q, k, v, *self.lists_of_others, out, lse, **options)
        join_sinks(out, lse, sinks)


class StepBuilder(AttentionMetadataBuilder[Step]):
    """Makes a `Step` of vLLM's block table: one kernel, no synchronization, nothing allocated."""

    # Graphs of uniform batches: all decodes, or as many new tokens each (speculative decoding).
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold: int | None = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = vllm_config.compilation_config.static_forward_context
        limits.check_layers(context)
        if asked("vllm"):
            rotary.check_instances()
        limits.check_config(vllm_config)
        self.block_size: int = kv_cache_spec.block_size
        requests: int = vllm_config.scheduler_config.max_num_seqs
        longest: int = vllm_config.model_config.max_model_len
        # A group of layers that all have the same window needs the slots within it alone, and those of the new tokens.
        windows = [context[name].impl.options["sliding_window"] for name in layer_names]
        self.window = None if min(windows) < 0 else max(windows) + 1
        if self.window is not None:
            tokens = vllm_config.scheduler_config.max_num_batched_tokens
            capacity = min(requests * longest, requests * self.window + tokens)
        else:
            capacity = requests * longest
        slots = (vllm_config.cache_config.num_gpu_blocks or 0) * self.block_size
        index = torch.int32 if slots < 2**31 else torch.int64
        padded = max(requests, vllm_config.compilation_config.max_cudagraph_capture_size or 0)
        self.kv_indptr = torch.zeros(padded + 1, dtype=index, device=device)
        self.kv_indices = torch.empty(capacity, dtype=index, device=device)
        with layer("vllm", layer_names[0]):
            for name in layer_names:
                context[name].impl.bind(kv_cache_spec, device)
            table = torch.zeros(1, 1, dtype=torch.int32, device=device)
            one = torch.ones(1, dtype=torch.int32, device=device)
            arguments = (table, one, self.block_size, self.kv_indptr[:2], self.kv_indices)
            bound = hal.bind(device, like={"build_kv_indices_from_blocks": arguments})
        self.list_slots: Callable[..., Tensor] = bound.build_kv_indices_from_blocks

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        m = common_attn_metadata
        decodes, kv_indptr = self.lists(m)
        n = m.num_reqs
        return Step(
            m.num_actual_tokens,
            n,
            decodes,
            m.query_start_loc[: n + 1],
            kv_indptr,
            self.kv_indices,
            m.max_query_len,
            m.max_seq_len,
            m.slot_mapping,
        )

    def lists(self, m: CommonAttentionMetadata) -> tuple[int, Tensor]:
        """(requests with one new token each, `kv_indptr`); lists all slots of all requests in `kv_indices`."""
        if m.causal is not True:
            raise limits.refusal(["attention that is not causal"])
        decodes, *_ = split_decodes_and_prefills(m, decode_threshold=1)
        n = m.num_reqs
        kv_indptr = self.kv_indptr[: n + 1]
        # Positions in a list count from its end, so a list that lost its beginning says the same of its last tokens.
        keep = -1 if self.window is None else self.window + m.max_query_len - 1
        self.list_slots(
            m.block_table_tensor[:n], m.seq_lens[:n], self.block_size, kv_indptr, self.kv_indices, keep_last=keep
        )
        return decodes, kv_indptr
