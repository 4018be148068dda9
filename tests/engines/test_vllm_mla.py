"""Latent attention without an engine: which requests are unfolded, and both ways against the truth in float64."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("vllm", reason="vLLM is not installed here")

from engines import vllm_models
from torch.utils.flop_counter import FlopCounterMode
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata

import hal
from hal.engines.vllm import mla, mla_step, platform, unfold

TINY = unfold.Widths(lora=16, nope=16, rope=8, v=12)
DEEPSEEK = unfold.Widths(lora=512, nope=128, rope=64, v=128)
HEADS, BLOCK = 3, 4
FAR = 10**9

# --- the decision -----------------------------------------------------------------------------------


def multiplied(w: unfold.Widths, new: int, cached: int, way: str) -> int:
    """Multiply-adds of a head, as torch counts the products that are made."""

    def product(m: int, k: int, n: int) -> None:
        torch.empty(m, k, device="meta") @ torch.empty(k, n, device="meta")

    with FlopCounterMode(display=False) as counter:
        if way == "latent":
            product(new, w.nope, w.lora)
            product(new, w.lora, w.v)
        else:
            product(new + cached, w.lora, w.nope + w.v)
        wide, out = (w.lora + w.rope, w.lora) if way == "latent" else (w.nope + w.rope, w.v)
        for t in range(new):
            product(1, wide, cached + t + 1)
            product(1, cached + t + 1, out)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("w", [TINY, DEEPSEEK])
@pytest.mark.parametrize(("new", "cached"), [(1, 0), (1, 5), (7, 0), (5, 9), (3, 64)])
def test_counts_are_those_of_the_products(w: unfold.Widths, new: int, cached: int) -> None:
    assert w.latent(new, cached) == multiplied(w, new, cached, "latent")
    assert w.unfolded(new, cached) == multiplied(w, new, cached, "unfolded")


@pytest.mark.parametrize(("cached", "fewest"), [(0, 1), (1, 18), (1000, 159), (10**6, 171)])
def test_a_request_is_unfolded_from_so_many_new_tokens_on(cached: int, fewest: int) -> None:
    """DeepSeek's widths: 512 x 256 for a cached token, 1088 - 320 saved by a query that sees it."""
    for new, first in ((fewest, 0), (fewest - 1, 1)):
        if new:
            assert unfold.first_unfolded([new], [cached + new], DEEPSEEK, FAR) == first, new


def test_room_is_kept() -> None:
    for room, first in ((300, 0), (299, 1)):
        assert unfold.first_unfolded([300, 200], [300, 200], DEEPSEEK, room) == first
    assert unfold.first_unfolded([200, 300], [200, 300], DEEPSEEK, 299) == 2, "none after one without room"
    assert unfold.first_unfolded([], [], DEEPSEEK, FAR) == 0
    # What vLLM leaves memory for, 256 elements a token and head, here takes 192 of keys and 256 of the projection.
    assert DEEPSEEK.room(448) == 256


def test_a_batch_is_cut_where_it_multiplies_least() -> None:
    g = torch.Generator().manual_seed(3)

    def several(most: int) -> list[int]:
        return torch.randint(1, most, (5,), generator=g).tolist()

    seen = set()
    for _ in range(200):
        new, cached = several(400), several(2000)
        lengths = [a + b for a, b in zip(new, cached, strict=True)]

        def cost(at: int, new: list[int] = new, cached: list[int] = cached) -> int:
            pairs = list(zip(new, cached, strict=True))
            before = sum(DEEPSEEK.latent(*p) for p in pairs[:at])
            return before + sum(DEEPSEEK.unfolded(*p) for p in pairs[at:])

        at = unfold.first_unfolded(new, lengths, DEEPSEEK, FAR)
        seen.add(at)
        assert cost(at) == min(map(cost, range(6)))
    assert seen == set(range(6))


def test_groups_have_room() -> None:
    assert unfold.groups([], 9) == []
    assert unfold.groups([4, 5, 1, 9, 2, 2], 9) == [range(2), range(2, 3), range(3, 4), range(4, 6)]


# --- both ways --------------------------------------------------------------------------------------


class Case:
    """A layer, a cache with tokens of requests in blocks without order, and the truth about their new tokens."""

    def __init__(
        self, new: Sequence[int], cached: Sequence[int], dtype: torch.dtype, kv_cache_dtype: str = "auto"
    ) -> None:
        g = torch.Generator().manual_seed(11)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=g, dtype=torch.float64).to(dtype)

        w, n = TINY, len(new)
        lengths = [a + b for a, b in zip(new, cached, strict=True)]
        blocks = [-(-length // BLOCK) for length in lengths]
        order = torch.randperm(sum(blocks), generator=g)
        table = torch.zeros(n, max(blocks), dtype=torch.int32)
        for row, mine in zip(table, order.split(blocks), strict=True):
            row[: len(mine)] = mine
        self.cache = random(sum(blocks), BLOCK, w.lora + w.rope)
        self.k_scale = torch.tensor(1.0)
        stored = self.cache
        if kv_cache_dtype != "auto":
            self.k_scale = torch.tensor(0.37)
            self.cache = (stored.float() / self.k_scale).to(torch.float8_e4m3fn)
            stored = self.cache.double() * self.k_scale.double()
        self.weight = random(HEADS * (w.nope + w.v), w.lora) / 4
        self.q = random(sum(new), HEADS, w.nope + w.rope)
        starts = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
        held = torch.tensor(lengths, dtype=torch.int32)
        self.metadata = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=held,
            num_reqs=n,
            num_actual_tokens=sum(new),
            max_query_len=max(new),
            max_seq_len=max(lengths),
            block_table_tensor=table,
            slot_mapping=torch.zeros(sum(new), dtype=torch.int64),
            seq_lens_cpu_upper_bound=held.clone(),
        )
        config = VllmConfig(compilation_config=CompilationConfig())
        was = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with set_current_vllm_config(config):
                common = (HEADS, w.lora + w.rope, 0.2, 1, None, None, kv_cache_dtype, None, "decoder", None, None)
                dims = (w.lora, w.nope, w.rope, w.nope + w.rope, w.v)
                self.impl = mla.HalMLAImpl(*common, *dims, lambda x: (x @ self.weight.T, None))
        finally:
            torch.set_default_dtype(was)
        # As vLLM's layer has the projection: [heads, nope, lora] and [heads, lora, v].
        k_up, v_up = self.weight.view(HEADS, w.nope + w.v, w.lora).split([w.nope, w.v], 1)
        self.layer = SimpleNamespace(impl=self.impl, W_UK_T=k_up.clone(), W_UV=v_up.transpose(1, 2))
        config.compilation_config.static_forward_context["layer"] = self.layer
        settings = SimpleNamespace(
            compilation_config=config.compilation_config,
            parallel_config=config.parallel_config,
            attention_config=config.attention_config,
            model_config=SimpleNamespace(max_model_len=max(lengths)),
            scheduler_config=SimpleNamespace(max_num_seqs=n, max_num_batched_tokens=sum(new)),
            cache_config=SimpleNamespace(num_gpu_blocks=sum(blocks), block_size=BLOCK),
        )
        spec = SimpleNamespace(block_size=BLOCK)
        self.builder = mla_step.MLAStepBuilder(spec, ["layer"], settings, torch.device("cpu"))  # type: ignore[arg-type]
        self.truth = self._truth(lengths, new, table, stored.double())

    def _truth(self, lengths: list[int], new: Sequence[int], table: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        w, found = TINY, []
        for length, m, row, q in zip(lengths, new, table, self.q.double().split(list(new)), strict=True):
            rows = stored[row.long()].flatten(0, 1)[:length]
            heads = (rows[:, : w.lora] @ self.weight.double().T).view(length, HEADS, w.nope + w.v)
            rope = rows[:, None, w.lora :].expand(-1, HEADS, -1)
            k, v = torch.cat([heads[..., : w.nope], rope], -1), heads[..., w.nope :]
            logits = torch.einsum("qhd,khd->hqk", q, k) * 0.2
            ahead = torch.arange(length) > torch.arange(length - m, length)[:, None]
            found.append(torch.einsum("hqk,khd->qhd", logits.masked_fill(ahead, float("-inf")).softmax(-1), v))
        return torch.cat(found)

    def run(self, step: mla_step.MLAStep) -> torch.Tensor:
        """What vLLM's layer does with a step: ``[tokens, heads, v]``."""
        assert (step.num_decodes, step.num_decode_tokens) == (0, 0)
        out = torch.full((len(self.q), HEADS * TINY.v), float("nan"), dtype=self.q.dtype)
        nothing = self.q[:0]
        self.impl.forward_mha(self.q, nothing, nothing, self.cache, step, self.k_scale, output=out)
        return out.view(-1, HEADS, TINY.v)


NEW, CACHED = (1, 1, 5, 150, 20, 33, 1), (30, 7, 90, 32, 3, 0, 0)
"""Two decodes, a short piece of a long prompt, a long piece, one after a prefix of few tokens, whole prompts."""


def near(found: torch.Tensor, truth: torch.Tensor, bound: float) -> None:
    assert (found.double() - truth).abs().max() <= bound * truth.abs().max()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "bound"),
    [(torch.float32, "auto", 2e-6), (torch.float32, "fp8", 2e-6), (torch.bfloat16, "auto", 3e-2)],
)
def test_both_ways_are_the_truth(
    dtype: torch.dtype, kv_cache_dtype: str, bound: float, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hal.use(backend):
        case = Case(NEW, CACHED, dtype, kv_cache_dtype)
        step = case.builder.build(0, case.metadata)
        assert (step.num_reqs, step.latent_tokens, len(step.groups)) == (3, 7, 1)
        near(case.run(step), case.truth, bound)
        latent = case.builder.build_for_cudagraph_capture(case.metadata)
        assert (latent.num_reqs, latent.latent_tokens, latent.groups) == (7, sum(NEW), [])
        near(case.run(latent), case.truth, bound)


def test_weights_that_vllm_writes_anew_are_used() -> None:
    """Without keys of the latent, the part of a query that meets them does not count."""
    new, without = (Case((1, 2), (5, 0), torch.float32) for _ in range(2))
    without.q[..., : TINY.nope] = 0
    want = without.run(without.builder.build_for_cudagraph_capture(without.metadata))
    step = new.builder.build_for_cudagraph_capture(new.metadata)
    new.layer.W_UK_T.zero_()
    near(new.run(step), want.double(), 2e-6)
    assert (new.truth - want).abs().max() > 0.01


def test_a_small_workspace_is_used_in_turns() -> None:
    case = Case(NEW, CACHED, torch.float32)
    case.builder.room = 182
    step = case.builder.build(0, case.metadata)
    assert [(g.begin, g.end, g.rows) for g in step.groups] == [(0, 150, 182), (150, 204, 57)]
    near(case.run(step), case.truth, 2e-6)
    case.builder.room = 181
    step = case.builder.build(0, case.metadata)
    assert (step.num_reqs, [(g.begin, g.end, g.rows) for g in step.groups]) == (5, [(0, 34, 34)])
    near(case.run(step), case.truth, 2e-6)


def test_what_lengths_are_not_known_of_stays_latent() -> None:
    case = Case(NEW, CACHED, torch.float32)
    case.metadata.seq_lens_cpu_upper_bound = None
    assert case.builder.build(0, case.metadata).groups == []


def test_padding_of_a_graph_is_no_request() -> None:
    """Requests without new tokens at the end, whose lengths are another step's, and tokens of none."""
    case = Case((20, 33), (0, 0), torch.float32)
    m = case.metadata
    want = [(g.begin, g.end, g.rows) for g in case.builder.build(0, m).groups]
    m.query_start_loc = m.query_start_loc_cpu = torch.tensor([0, 20, 53, 53], dtype=torch.int32)
    m.seq_lens, m.seq_lens_cpu_upper_bound = (torch.tensor([20, 33, 9], dtype=torch.int32) for _ in range(2))
    m.block_table_tensor = torch.cat([m.block_table_tensor, m.block_table_tensor[:1]])
    m.num_reqs, m.num_actual_tokens = 3, 64
    case.builder.kv_indptr = torch.zeros(4, dtype=torch.int32)
    step = case.builder.build(0, m)
    assert [(g.begin, g.end, g.rows) for g in step.groups] == want == [(0, 53, 53)]
    near(case.run(step), case.truth, 2e-6)


def test_quantized_output_is_refused() -> None:
    case = Case((20,), (0,), torch.float32)
    step: Any = case.builder.build(0, case.metadata)
    q = case.q
    with pytest.raises(NotImplementedError, match="no quantized output"):
        case.impl.forward_mha(q, q, q, case.cache, step, case.k_scale, q, output_scale=case.k_scale)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="what vLLM's platform for CPUs does")
@pytest.mark.parametrize("amx", [True, False])
def test_what_was_chosen_stays_on_any_cpu(amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own kernel without AMX has no prefix caching, no chunks and blocks of 16 alone."""
    cpus = type(current_platform)
    monkeypatch.setattr(cpus, "check_and_update_config", vars(cpus)["check_and_update_config"])
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    platform.on()
    platform.on()
    chosen = {"max_num_batched_tokens": 64, "enable_prefix_caching": True, "enable_chunked_prefill": True}
    given = {"max_model_len": 256, "max_num_seqs": 8, "skip_tokenizer_init": True, "enforce_eager": True}
    model = str(vllm_models.tiny_model("deepseek-v2-mla"))
    config = EngineArgs(model=model, block_size=32, **given, **chosen).create_engine_config()
    found = {**vars(config.scheduler_config), **vars(config.cache_config)}
    assert {name: found[name] for name in (*chosen, "block_size")} == {**chosen, "block_size": 32}
