"""The adapters of FlashInfer's attention: what they ask of it, against stand-ins that know its interface.

A stand-in has the documented signature, refuses what the library's documentation rules out, computes in float64, and
leaves garbage where FlashInfer makes no promise. So a mapping that is wrong gives a wrong result here; what a stand-in
can't show is whether FlashInfer itself does what its documentation says.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import hal
from hal._remote.target import Bound, DirectTarget
from hal.backends.cuda import _flashinfer
from hal.conformance._arena import POISONS
from hal.conformance._cases import cases_of
from hal.conformance._result import FAILED, PASSED, Case
from hal.conformance.execute import BOUND, Refused
from hal.conformance.proofs.run import Run, run_case
from hal.ops import get_spec
from hal.ops.spec import OpSpec

DECODE, EXTEND = get_spec("decode_attention"), get_spec("extend_attention")
HALVES = (torch.float16, torch.bfloat16)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, rounded: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """One query ``[heads, dim]`` over ``[keys, kv_heads, dim]``: output and natural log-sum-exp, in float64; or from
    weights that are `rounded`."""
    group = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("hd,jhd->hj", q.double(), k) * scale
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).exp()
    weights = weights if rounded is None else weights.to(rounded).double()
    total = weights.sum(-1, keepdim=True)
    return torch.einsum("hj,jhd->hd", weights / total, v), (total.log() + top).squeeze(-1)


class Planned:
    """What FlashInfer's two wrappers have in common: a plan, then calls by whoever made it."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, exact: bool) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.numel() >= 128 << 20
        assert not float_workspace_buffer[:: 1 << 20].any()
        assert kv_layout == "NHD"
        self.exact = exact

    def planned(
        self,
        lists: tuple[Tensor, ...],
        heads: tuple[int, ...],
        page_size: int,
        seen: tuple[bool, int],
        dtypes: tuple[Any, Any],
        sm_scale: float | None,
    ) -> None:
        """`lists`: offsets of queries and of pages, pages, lengths of the last; `seen`: causal, window_left."""
        (qo_indptr, indptr, indices, last_page_len), (causal, window_left) = lists, seen
        q_data_type, kv_data_type = dtypes
        assert {t.dtype for t in (qo_indptr, indptr, indices, last_page_len)} == {torch.int32}
        for offsets, end in ((qo_indptr, qo_indptr[-1]), (indptr, indices.shape[0])):
            assert offsets[0] == 0
            assert (offsets.diff() >= 0).all()
            assert offsets[-1] == end
        assert qo_indptr.shape == indptr.shape
        used = indptr.diff() > 0
        assert ((last_page_len >= 1) & (last_page_len <= page_size))[used].all()
        # kv length = (pages - 1) * page_size + last_page_len, with no page 0 + last_page_len
        assert (last_page_len[~used] == 0).all()
        assert heads[0] % heads[1] == 0
        assert heads[2] in (64, 128, 256)
        assert q_data_type in HALVES
        assert kv_data_type == q_data_type
        assert isinstance(sm_scale, float)
        assert window_left >= -1
        self.qo, self.indptr, self.indices, self.page_size = (qo_indptr.tolist(), indptr.tolist(), indices, page_size)
        self.heads, self.kind, self.causal = heads, q_data_type, causal
        self.scale, self.window, self.by = sm_scale, window_left, threading.get_ident()

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        assert self.by == threading.get_ident()
        k, v = paged_kv_cache
        heads, kv_heads, dim = self.heads
        assert q.dtype == self.kind
        assert q.is_contiguous()
        assert q.shape == (self.qo[-1], heads, dim)
        assert k.shape[1:] == (self.page_size, kv_heads, dim)
        assert k.stride() == v.stride()
        assert ((self.indices >= 0) & (self.indices < k.shape[0])).all()
        assert out is not None
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        assert out.is_contiguous()
        out.fill_(torch.nan)
        if return_lse:
            assert lse is not None
            assert (lse.shape, lse.dtype) == (q.shape[:2], torch.float32)
            lse.fill_(torch.nan)
        for i, (a, b) in enumerate(pairwise(self.indptr)):
            pages = self.indices[a:b].long()
            keys, values = (c[pages].flatten(0, 1) for c in (k, v))
            rounded = None if self.exact else q.dtype
            for t, first, last in seen_of(self.qo[i], self.qo[i + 1], b - a, self.causal, self.window):
                found, sums = attend(q[t], keys[first:last], values[first:last], self.scale, rounded)
                out[t] = found.to(q.dtype)
                if return_lse and lse is not None:
                    lse[t] = (sums / math.log(2)).float()
        return (out, lse) if return_lse else out


class DecodeWrapper(Planned):
    """flashinfer.BatchDecodeWithPagedKVCacheWrapper."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        backend: str = "auto",
    ) -> None:
        assert (use_cuda_graph, backend) == (False, "fa2")
        super().__init__(float_workspace_buffer, kv_layout, exact=not use_tensor_cores)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        sm_scale: float | None = None,
    ) -> None:
        assert not self.exact or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8)
        each, heads = torch.arange(indptr.shape[0], dtype=torch.int32), (num_qo_heads, num_kv_heads, head_dim)
        lists, dtypes = (each, indptr, indices, last_page_len), (q_data_type, kv_data_type)
        self.planned(lists, heads, page_size, (False, window_left), dtypes, sm_scale)


class PrefillWrapper(Planned):
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        assert backend in ("fa2", "fa3")
        super().__init__(float_workspace_buffer, kv_layout, exact=backend == "fa3")

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        assert qo_indptr.shape[0] <= 32768 + 1
        lists = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        heads, dtypes = (num_qo_heads, num_kv_heads, head_dim_qk), (q_data_type, kv_data_type)
        self.planned(lists, heads, page_size, (causal, window_left), dtypes, sm_scale)


def seen_of(begin: int, stop: int, keys: int, causal: bool, window: int) -> Iterator[tuple[int, int, int]]:
    """(row, first key, end of keys) of each query of a request that sees any, the last query aligned with the last
    key. Where a causal one has fewer keys than queries, libraries differ: no adapter may ask for it."""
    assert not causal or keys >= stop - begin or not keys
    for t in range(begin, stop):
        own = keys - (stop - t)
        first, last = max(0, own - window) if window >= 0 else 0, own + 1 if causal else keys
        if last > first:
            yield t, first, last


ADAPTERS = {"decode_attention": DECODE, "extend_attention": EXTEND}


@dataclass
class Adapter:
    """An adapter's module, with the stand-ins in FlashInfer's place."""

    spec: OpSpec
    module: Any

    @property
    def fn(self) -> Callable[..., Tensor]:
        found: Callable[..., Tensor] = getattr(self.module, self.spec.name)
        return found

    def supports(self, arguments: dict[str, Any]) -> str | None:
        why: str | None = self.module.supports(self.spec.sign(arguments))
        return why

    def target(self, fn: Callable[..., Tensor] | None = None) -> DirectTarget:
        bound = Bound(fn or self.fn, self.module.supports, "adapter", graph_safe=False, deterministic=False)
        return DirectTarget({self.spec.name: bound}, limits=("adapter",))


@pytest.fixture
def adapter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Adapter:
    library = ModuleType("flashinfer")
    vars(library).update(
        BatchDecodeWithPagedKVCacheWrapper=DecodeWrapper, BatchPrefillWithPagedKVCacheWrapper=PrefillWrapper
    )
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.setattr(_flashinfer, "_wrappers", {})
    monkeypatch.setattr(_flashinfer, "hopper", lambda device: True)
    module = importlib.import_module(f"hal.backends.cuda.{request.param}_flashinfer")
    return Adapter(ADAPTERS[request.param], module)


@pytest.mark.parametrize("adapter", ADAPTERS, indirect=True)
def test_value(adapter: Adapter) -> None:
    """Every sample that it supports gives what the contract says, and writes nothing else; it refuses the others."""
    judged, ran, refused = adapter.target(), 0, 0
    every = 1 if os.environ.get("CI_ALL") else 3
    for case in [c for c in cases_of(adapter.spec) if c.proof == "value"][::every]:
        sample = next(s for s in adapter.spec.samples if s.name == case.sample)
        run = Run(judged, adapter.spec, case)
        why = adapter.supports(adapter.spec.make(**sample.params))
        if why is None:
            run.prove(sample.params, ways=((BOUND, POISONS[0]),))
            ran += 1
        else:
            assert why.startswith("adapter: ")
            with pytest.raises(Refused, match=re.escape(why)):
                run.prove(sample.params, ways=((BOUND, POISONS[0]),))
            refused += 1
    assert ran >= 25 // every
    assert refused >= 10 // every


@pytest.mark.parametrize("adapter", ADAPTERS, indirect=True)
def test_ragged(adapter: Adapter) -> None:
    """Random batches of what it supports: odd listings, odd offsets, windows, rows of no request."""
    judged, op, ran = adapter.target(), adapter.spec, 0
    for seed in range(80 if os.environ.get("CI_ALL") else 20):
        g = torch.Generator().manual_seed(seed)

        def pick(choices: Any, g: torch.Generator = g) -> Any:
            return choices[int(torch.randint(0, len(choices), (1,), generator=g))]

        params = {
            "seed": seed,
            "bs": pick(range(8)),
            "longest": pick(range(60)),
            "kv_heads": pick([1, 2, 4]),
            "cache": pick(["slots", "paged"]),
            "page_size": pick([1, 3, 16]),
            "index": pick(["i32", "i64"]),
            "values": pick(["valid", "skip", "edge", "extreme"]),
            "out": pick(["none", "given"]),
            "indptr_values": pick(["valid", "edge", "extreme"]),
            "sliding_window": pick([-1, 0, 5]),
            "lse": pick([True, False]),
        }
        if op is EXTEND:
            params |= {
                "longest": pick([1, 4, 15]),
                "prefix": pick([-4, 0, 20]),
                "spare": pick([0, 2]),
                "causal": pick([True, True, False]),
            }
        if adapter.supports(op.make(**params)) is None:
            Run(judged, op, Case(op.name, "value", "ragged")).prove(params)
            ran += 1
    assert ran >= 8


@pytest.mark.parametrize("adapter", ADAPTERS, indirect=True)
def test_threads_share_a_wrapper(adapter: Adapter) -> None:
    """One has a wrapper at a time: a plan of another between plan and run would be run with these queries."""
    assert run_case(Case(adapter.spec.name, "threads", "all"), adapter.target(), adapter.spec).outcome == PASSED


@pytest.mark.parametrize("adapter", ["decode_attention"], indirect=True)
def test_the_log_sum_exp_is_asked_of_exact_kernels(adapter: Adapter) -> None:
    """FlashInfer's tensor cores sum rounded weights: they are used where no log-sum-exp is asked for."""
    for q_heads, lse, why in ((5, True, "has an exact log-sum-exp for 1, 2, 3, 4, 8"), (5, False, None)):
        params = {"q_heads": q_heads, "kv_heads": 1, "lse": lse}
        said = adapter.supports(DECODE.make(**params))
        assert (said is None) if why is None else (said is not None and why in said)
        if why is None:
            Run(adapter.target(), DECODE, Case("decode_attention", "value", "group")).prove(params)
    for lse, exact in ((True, True), (False, False)):
        _flashinfer._wrappers.clear()
        Run(adapter.target(), DECODE, Case("decode_attention", "value", "group")).prove(
            {"q_heads": 4, "kv_heads": 1, "lse": lse}, ways=((BOUND, POISONS[0]),)
        )
        assert [w.exact for w, _ in _flashinfer._wrappers.values()] == [exact]


@pytest.mark.parametrize("adapter", ["extend_attention"], indirect=True)
def test_off_hopper_there_is_no_log_sum_exp(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_flashinfer, "hopper", lambda device: False)
    assert adapter.supports(EXTEND.make(lse=True)) == (
        "adapter: FlashInfer has an exact log-sum-exp on compute capability 9.0"
    )
    assert adapter.supports(EXTEND.make(lse=False)) is None
    Run(adapter.target(), EXTEND, Case("extend_attention", "value", "fa2")).prove({"lse": False})
    assert [w.exact for w, _ in _flashinfer._wrappers.values()] == [False]


@pytest.mark.parametrize("adapter", ["extend_attention"], indirect=True)
def test_more_runs_than_flashinfer_has_lengths_for(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_flashinfer, "REQUESTS", 3)
    arguments = EXTEND.make(bs=4, lengths="full")
    before = arguments["out"].clone()
    with pytest.raises(hal.ArgumentError, match="at most 3 runs of queries, by FlashInfer; got 4"):
        adapter.fn(**arguments)
    assert torch.equal(arguments["out"].view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("adapter", ADAPTERS, indirect=True)
def test_a_planted_error_is_seen(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins do judge: an adapter that forgets the scale, -1, causality or a row of no request fails."""
    op, right = adapter.spec, adapter.fn

    def outcome(sample: str, fn: Callable[..., Tensor] = right) -> str:
        return run_case(Case(op.name, "value", sample, sample), adapter.target(fn), op).outcome

    def broken(**arguments: Any) -> Tensor:
        return right(**{**arguments, "scale": arguments["scale"] * 1.5})

    assert outcome("bf16") == PASSED
    assert outcome("bf16", broken) == FAILED
    assert outcome("skip") == PASSED
    if op is EXTEND:

        def all_rows(**arguments: Any) -> Tensor:
            ends = torch.cat([arguments["qo_indptr"][:-1], torch.tensor([arguments["q"].shape[0]])])
            return right(**{**arguments, "qo_indptr": ends})

        def seeing_all(**arguments: Any) -> Tensor:
            return right(**{**arguments, "causal": False})

        assert outcome("bf16", seeing_all) == FAILED
        assert outcome("spare-rows") == PASSED
        assert outcome("spare-rows", all_rows) == FAILED

    name = "list_keys" if op is DECODE else "runs"
    real = getattr(adapter.module, name)
    at = inspect.signature(real).parameters

    def careless(*given: Any) -> Any:
        slots = given[list(at).index("kv_indices")]
        return real(*[torch.where(slots < 0, 0, slots) if x is slots else x for x in given])

    monkeypatch.setattr(adapter.module, name, careless)
    assert outcome("skip") == FAILED
