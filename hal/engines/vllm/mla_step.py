"""A step of latent attention: which requests go over the latent rows, and what unfolding the others takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.v1.attention.backend import CommonAttentionMetadata

import hal
from hal.engines.vllm import unfold
from hal.engines.vllm.step import Step, StepBuilder


@dataclass
class Group:
    """Requests that are unfolded at once: their rows fit in the workspace.

    Attributes:
        begin: their first token, of all that are unfolded.
        end: past their last.
        rows: their tokens, cached and new.
        qo_indptr: as in `hal.extend_attention`, from `begin` on.
        kv_indptr: likewise, of the workspace.
        slots: of their tokens in the cache, in that order.
    """

    begin: int
    end: int
    rows: int
    qo_indptr: Tensor
    kv_indptr: Tensor
    slots: Tensor


@dataclass
class Workspace:
    """Rows of the cache, gathered; all layers use it in turn.

    Attributes:
        rows: ``[room, lora + rope]``, of the cache's dtype.
        pool: that, as `hal.kv_transfer` sees it.
        places: ``[room]``, 0, 1, 2, …: where each row goes, and is found.
    """

    rows: Tensor
    pool: hal.KVPool
    places: Tensor


@dataclass
class MLAStep(Step):
    """A step whose first `num_reqs` requests go over the latent rows; the rest, in `groups`, are unfolded.

    Attributes:
        latent_tokens: of those first requests.
        num_prefills: all requests. vLLM's layer reads this and the ones below: for it, none is a decode.
    """

    latent_tokens: int
    num_prefills: int
    groups: list[Group]
    workspace: Workspace
    prefill: None = None
    num_decodes: int = 0
    num_decode_tokens: int = 0


class MLAStepBuilder(StepBuilder):
    """Makes an `MLAStep`; by lengths that vLLM has on the host, so nothing waits for the device."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = vllm_config.compilation_config.static_forward_context
        self.layers = [context[name] for name in layer_names]
        impl = self.layers[0].impl
        self.widths: unfold.Widths = impl.widths
        # vLLM leaves memory for the projections of so many tokens when it measures how large the cache may be.
        tokens = MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(vllm_config)
        self.room = self.widths.room(tokens) if self.window is None else 0
        # Bytes of zeros: there are builds that lack a fill of fp8 ones.
        dtype = impl.dtype if impl.fp8 is None else impl.fp8
        zeros = torch.zeros(self.room, impl.head_size * dtype.itemsize, dtype=torch.uint8, device=device).view(dtype)
        places = torch.arange(self.room, dtype=self.kv_indices.dtype, device=device)
        self.workspace = Workspace(zeros, hal.KVPool(zeros.unsqueeze(0)), places)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLAStep:
        m = common_attn_metadata
        # Not when this is made: what is allocated then, vLLM's sleep mode drops with the cache.
        while self.layers:
            layer = self.layers.pop()
            layer.impl.fold(layer)
        decodes, kv_indptr = self.lists(m)
        n = first = m.num_reqs
        tokens, found = m.num_actual_tokens, []
        # What is built fast is a draft's, whose lengths on the host are guesses.
        if decodes < n and self.room and not fast_build:
            starts = m.query_start_loc_cpu[: n + 1].tolist()
            lengths = _lengths(m)
            while n > decodes and starts[n] == starts[n - 1]:
                n -= 1  # padding of a graph
            if lengths is not None:
                new = [b - a for a, b in zip(starts[decodes:n], starts[decodes + 1 : n + 1], strict=True)]
                chosen = unfold.first_unfolded(new, lengths[decodes:n], self.widths, self.room)
                if chosen < len(new):
                    first = decodes + chosen
                    tokens = starts[first]
                    found = self._groups(m, starts, lengths, range(first, n))
        return MLAStep(
            m.num_actual_tokens,
            first,
            min(decodes, first),
            m.query_start_loc[: first + 1],
            kv_indptr[: first + 1],
            self.kv_indices,
            m.max_query_len,
            m.max_seq_len,
            m.slot_mapping,
            tokens,
            m.num_reqs,
            found,
            self.workspace,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> MLAStep:
        # Lists of the latent rows lie in buffers that stay; those of a group do not.
        return self.build(0, common_attn_metadata, fast_build=True)

    def _groups(
        self, m: CommonAttentionMetadata, starts: list[int], lengths: list[int], requests: range
    ) -> list[Group]:
        found = []
        base = starts[requests.start]
        for part in unfold.groups(lengths[requests.start : requests.stop], self.room):
            a, b = requests.start + part.start, requests.start + part.stop
            rows = sum(lengths[a:b])
            kv_indptr = torch.empty(b - a + 1, dtype=self.kv_indptr.dtype, device=m.seq_lens.device)
            slots = torch.empty(rows, dtype=self.kv_indices.dtype, device=m.seq_lens.device)
            self.list_slots(m.block_table_tensor[a:b], m.seq_lens[a:b], self.block_size, kv_indptr, slots)
            qo_indptr = m.query_start_loc[a : b + 1] - starts[a]
            found.append(Group(starts[a] - base, starts[b] - base, rows, qo_indptr, kv_indptr, slots))
        return found


def _lengths(m: CommonAttentionMetadata) -> list[int] | None:
    """Tokens of each request, or more: on the host, where vLLM has them there."""
    for name in ("seq_lens_cpu_upper_bound", "_seq_lens_cpu"):
        found = getattr(m, name, None)
        if found is not None:
            return list(found.tolist())
    return None
