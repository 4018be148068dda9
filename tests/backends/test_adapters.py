"""The adapters of other people's attention: what they ask of a library, against stand-ins that know its interface.

A stand-in has the documented signature, refuses what the library's documentation rules out, computes in float64, and
leaves garbage where the library makes no promise. So a mapping that is wrong gives a wrong result here; what a stand-in
can't show is whether the library itself does what its documentation says.
"""

from __future__ import annotations

import importlib
import inspect
import math
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
from hal.backends.ascend import _fused
from hal.backends.cuda import _flashinfer
from hal.conformance._arena import POISONS
from hal.conformance._cases import cases_of
from hal.conformance._result import FAILED, PASSED, Case
from hal.conformance.execute import BOUND, Refused
from hal.conformance.proofs.run import Run, run_case
from hal.kv.paging import listed, runs
from hal.ops import get_spec
from hal.ops.proofs.judge import right_any
from hal.ops.spec import OpSpec

DECODE, EXTEND = get_spec("decode_attention"), get_spec("extend_attention")
HALVES = (torch.float16, torch.bfloat16)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, rounded: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
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
        self, qo_indptr: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor, heads: tuple[int, int, int],
        page_size: int, causal: bool, window_left: int, q_data_type: Any, kv_data_type: Any, sm_scale: float | None,
    ) -> None:  # fmt: skip
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
        self.qo, self.indptr, self.indices, self.page_size = (
            qo_indptr.tolist(),
            indptr.tolist(),
            indices,
            page_size,
        )
        self.heads, self.kind, self.causal = heads, q_data_type, causal
        self.scale, self.window, self.by = sm_scale, window_left, threading.get_ident()

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None,
        lse: Tensor | None = None, return_lse: bool = False,
    ) -> Any:  # fmt: skip
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

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
                 use_tensor_cores: bool = False, backend: str = "auto") -> None:  # fmt: skip
        assert (use_cuda_graph, backend) == (False, "fa2")
        super().__init__(float_workspace_buffer, kv_layout, exact=not use_tensor_cores)

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, pos_encoding_mode: str = "NONE", window_left: int = -1,
        q_data_type: Any = "float16", kv_data_type: Any = None, sm_scale: float | None = None,
    ) -> None:  # fmt: skip
        assert not self.exact or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8)
        each = torch.arange(indptr.shape[0], dtype=torch.int32)
        self.planned(
            each, indptr, indices, last_page_len, (num_qo_heads, num_kv_heads, head_dim), page_size, False,
            window_left, q_data_type, kv_data_type, sm_scale,
        )  # fmt: skip


class PrefillWrapper(Planned):
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper."""

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto"
    ) -> None:
        assert backend in ("fa2", "fa3")
        super().__init__(float_workspace_buffer, kv_layout, exact=backend == "fa3")

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool = False,
        sm_scale: float | None = None, window_left: int = -1, q_data_type: Any = "float16", kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        assert qo_indptr.shape[0] <= 32768 + 1
        self.planned(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
            (num_qo_heads, num_kv_heads, head_dim_qk), page_size, causal, window_left, q_data_type, kv_data_type,
            sm_scale,
        )  # fmt: skip


def seen_of(begin: int, stop: int, keys: int, causal: bool, window: int) -> Iterator[tuple[int, int, int]]:
    """(row, first key, end of keys) of each query of a request that sees any, the last query aligned with the last
    key. Where a causal one has fewer keys than queries, libraries differ: no adapter may ask for it."""
    assert not causal or keys >= stop - begin or not keys
    for t in range(begin, stop):
        own = keys - (stop - t)
        first, last = max(0, own - window) if window >= 0 else 0, own + 1 if causal else keys
        if last > first:
            yield t, first, last


ways: list[str] = []


def npu_fused_infer_attention_score(
    query: Tensor, key: Tensor, value: Tensor, *, atten_mask: Tensor | None = None, actual_seq_lengths: None = None,
    actual_seq_lengths_kv: list[int] | None = None, block_table: Tensor | None = None, num_heads: int = 1,
    scale: float = 1.0, pre_tokens: int = 2147483647, next_tokens: int = 2147483647, input_layout: str = "BSH",
    num_key_value_heads: int = 0, sparse_mode: int = 0, block_size: int = 0, softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    bs, seqlen, hidden = query.shape
    dim = hidden // num_heads
    assert input_layout == "BSH"
    assert bs <= 65536
    assert num_heads <= 256
    assert query.dtype in HALVES
    assert query.dtype == key.dtype == value.dtype
    assert all(t.is_contiguous() for t in (query, key, value))
    assert key.shape == value.shape
    assert isinstance(scale, float)
    assert isinstance(actual_seq_lengths_kv, list)
    assert len(actual_seq_lengths_kv) == bs
    assert min(actual_seq_lengths_kv) >= 1
    assert max(actual_seq_lengths_kv) <= (262144 if seqlen == 1 else 20971520)
    assert num_heads % num_key_value_heads == 0
    assert num_heads // num_key_value_heads <= 64
    assert key.shape[-1] == num_key_value_heads * dim
    assert dim % 16 == 0
    assert dim <= 512
    causal = sparse_mode == 3
    if seqlen == 1 or not causal:
        # For one query the mode is without effect, and a mask of keys would have another shape.
        assert (sparse_mode, atten_mask) == (0, None)
    else:
        assert atten_mask is not None
        assert atten_mask.dtype in (torch.bool, torch.int8, torch.uint8)
        assert torch.equal(atten_mask.bool(), torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    if block_table is None:
        assert key.shape[0] == bs
        assert key.shape[1] >= max(actual_seq_lengths_kv)
        rows = [key, value]
        # Nothing says that rows past a length are not multiplied by weights of 0.
        assert not any(r[i, n:].isnan().any() for r in rows for i, n in enumerate(actual_seq_lengths_kv))
        ways.append(f"{bs} x {seqlen} gathered")
    else:
        assert block_table.dtype == torch.int32
        assert block_size == key.shape[1]
        assert block_size % (16 if seqlen == 1 else 128) == 0
        assert block_size <= 512
        assert key.shape[-1] <= 65535
        assert key.numel() < 2**31
        assert block_table.shape[0] == bs
        assert block_table.shape[1] * block_size >= max(actual_seq_lengths_kv)
        assert sum(-(-n // block_size) for n in actual_seq_lengths_kv) <= key.shape[0]
        assert ((block_table >= 0) & (block_table < key.shape[0])).all()
        rows = [c[block_table.long()].flatten(1, 2) for c in (key, value)]
        ways.append(f"{bs} x {seqlen} paged")
    out, lse = torch.full_like(query, torch.nan), torch.full((bs, num_heads, seqlen, 1), torch.nan)
    for i, n in enumerate(actual_seq_lengths_kv):
        k, v = (r[i, :n].view(n, num_key_value_heads, dim) for r in rows)
        for t, first, last in seen_of(0, seqlen, n, causal, -1):
            found, sums = attend(query[i, t].view(num_heads, dim), k[first:last], v[first:last], scale)
            out[i, t], lse[i, :, t, 0] = found.flatten().to(query.dtype), sums.float()
    return out, lse if softmax_lse_flag else torch.zeros(1)


_FLASHINFER = {
    "BatchDecodeWithPagedKVCacheWrapper": DecodeWrapper,
    "BatchPrefillWithPagedKVCacheWrapper": PrefillWrapper,
}
_FUSED = {"npu_fused_infer_attention_score": npu_fused_infer_attention_score}
ADAPTERS: dict[str, tuple[OpSpec, str, str, dict[str, Any]]] = {
    "decode-flashinfer": (DECODE, "cuda.decode_attention_flashinfer", "flashinfer", _FLASHINFER),
    "decode-fused": (DECODE, "ascend.decode_attention_fused", "torch_npu", _FUSED),
    "extend-flashinfer": (EXTEND, "cuda.extend_attention_flashinfer", "flashinfer", _FLASHINFER),
    "extend-fused": (EXTEND, "ascend.extend_attention_fused", "torch_npu", _FUSED),
}


@dataclass
class Adapter:
    """An adapter's module, with the stand-in in its library's place."""

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


def adapted(name: str, monkeypatch: pytest.MonkeyPatch) -> Adapter:
    op, module, library, names = ADAPTERS[name]
    stand_in = ModuleType(library)
    vars(stand_in).update(names)
    monkeypatch.setitem(sys.modules, library, stand_in)
    monkeypatch.setattr(_flashinfer, "_wrappers", {})
    monkeypatch.setattr(_flashinfer, "hopper", lambda device: True)
    return Adapter(op, importlib.import_module(f"hal.backends.{module}"))


@pytest.fixture
def adapter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Adapter:
    return adapted(request.param, monkeypatch)


@pytest.mark.parametrize("adapter", ADAPTERS, indirect=True)
def test_value(adapter: Adapter) -> None:
    """Every sample that it supports gives what the contract says, and writes nothing else; it refuses the others."""
    judged, ran, refused = adapter.target(), 0, 0
    for case in (c for c in cases_of(adapter.spec) if c.proof == "value"):
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
    assert ran >= 25
    assert refused >= 10


@pytest.mark.parametrize("adapter", ADAPTERS, indirect=True)
def test_ragged(adapter: Adapter) -> None:
    """Random batches of what it supports: odd listings, odd offsets, windows, rows of nobody."""
    judged, op, ran = adapter.target(), adapter.spec, 0
    for seed in range(80):
        g = torch.Generator().manual_seed(seed)

        def pick(choices: Any, g: torch.Generator = g) -> Any:
            return choices[int(torch.randint(0, len(choices), (1,), generator=g))]

        params = {
            "seed": seed, "bs": pick(range(8)), "longest": pick(range(60)), "kv_heads": pick([1, 2, 4]),
            "cache": pick(["slots", "paged"]), "page_size": pick([1, 3, 16]), "index": pick(["i32", "i64"]),
            "values": pick(["valid", "skip", "edge", "extreme"]), "out": pick(["none", "given"]),
            "indptr_values": pick(["valid", "edge", "extreme"]), "sliding_window": pick([-1, 0, 5]),
            "lse": pick([True, False]),
        }  # fmt: skip
        if op is EXTEND:
            params |= {
                "longest": pick([1, 4, 15]), "prefix": pick([-4, 0, 20]), "spare": pick([0, 2]),
                "causal": pick([True, True, False]),
            }  # fmt: skip
        if "windows" in (adapter.supports(op.make(**params)) or ""):
            params["sliding_window"] = -1
        if adapter.supports(op.make(**params)) is None:
            Run(judged, op, Case(op.name, "value", "ragged")).prove(params)
            ran += 1
    assert ran >= 40


@pytest.mark.parametrize("adapter", ["decode-flashinfer", "extend-flashinfer"], indirect=True)
def test_threads_share_a_wrapper(adapter: Adapter) -> None:
    """One has a wrapper at a time: a plan of another between plan and run would be run with these queries."""
    assert (
        run_case(Case(adapter.spec.name, "threads", "all"), adapter.target(), adapter.spec).outcome == PASSED
    )


@pytest.mark.parametrize("adapter", ["decode-flashinfer"], indirect=True)
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


@pytest.mark.parametrize("adapter", ["extend-flashinfer"], indirect=True)
def test_off_hopper_there_is_no_log_sum_exp(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_flashinfer, "hopper", lambda device: False)
    assert adapter.supports(EXTEND.make(lse=True)) == (
        "adapter: FlashInfer has an exact log-sum-exp on compute capability 9.0"
    )
    assert adapter.supports(EXTEND.make(lse=False)) is None
    Run(adapter.target(), EXTEND, Case("extend_attention", "value", "fa2")).prove({"lse": False})
    assert [w.exact for w, _ in _flashinfer._wrappers.values()] == [False]


@pytest.mark.parametrize("adapter", ["extend-flashinfer"], indirect=True)
def test_more_runs_than_flashinfer_has_lengths_for(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_flashinfer, "REQUESTS", 3)
    arguments = EXTEND.make(bs=4, lengths="full")
    before = arguments["out"].clone()
    with pytest.raises(hal.ArgumentError, match="at most 3 runs of queries, by FlashInfer; got 4"):
        adapter.fn(**arguments)
    assert torch.equal(arguments["out"].view(torch.int16), before.view(torch.int16))


def test_runs_are_requests_where_all_keys_are_there() -> None:
    """No run more than needed: a request is one, but where its listing has holes among its queries' own keys."""
    qo, kv = torch.tensor([0, 3, 3, 5]), torch.tensor([0, 5, 9, 11])
    slots = torch.arange(11)
    got = runs(qo, kv, slots, 5, 11)
    assert (got.rows, got.keys.lengths, got.window, got.named) == ([0, 3, 5], [5, 2], -1, None)
    assert got.keys.slots.tolist() == [0, 1, 2, 3, 4, 9, 10]
    assert got.seen.tolist() == [3, 4, 5, 1, 2]
    assert runs(qo, kv, slots, 5, 11, sliding_window=1).window == 1
    early, late = slots.clone(), slots.clone()
    early[0], late[3] = -1, -1
    assert runs(qo, kv, early, 5, 11).rows == [0, 3, 5]
    got = runs(qo, kv, late, 5, 11)
    assert (got.rows, got.keys.lengths) == ([0, 1, 3, 5], [3, 4, 2])
    assert got.seen.tolist() == [3, 3, 4, 1, 2]
    got = runs(qo, kv, late, 5, 11, sliding_window=1)
    assert (got.rows, got.window, got.keys.slots.tolist()) == ([0, 1, 2, 3, 4, 5], -1, [1, 2, 2, 4, 9, 9, 10])


@pytest.mark.parametrize("adapter", ["decode-fused"], indirect=True)
@pytest.mark.parametrize(("odd", "way"), [(False, "paged"), (True, "gathered")])
def test_whole_pages_go_by_block_table(adapter: Adapter, odd: bool, way: str) -> None:
    """A listing of whole pages, as `build_kv_indices` makes it; with one slot out of its page, rows are gathered."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*s, 64, generator=g).bfloat16() for s in ((3, 4), (9, 16, 2), (9, 16, 2)))
    lengths, order, slots = [40, 0, 17], torch.randperm(9, generator=g).tolist(), []
    for n in lengths:
        slots += [p * 16 + t for p in [order.pop() for _ in range(-(-n // 16))] for t in range(16)][:n]
    indices = torch.tensor(slots)
    if odd:
        indices[5] = -1
    indptr = torch.tensor([0, 40, 40, 57])
    arguments = DECODE.bind(q, k, v, indptr, indices, lse=torch.zeros(3, 4), scale=0.125)
    assert adapter.supports(arguments) is None
    wants = DECODE.oracle(arguments)
    ways.clear()
    found = adapter.fn(**arguments)
    assert ways == [f"3 x 1 {way}"]
    assert right_any(found, wants["return"]).all()
    assert right_any(arguments["lse"], wants["lse"]).all()


def of_pages(lengths: list[int], page: int, pages: int) -> dict[str, Any]:
    """What extend_attention is called with for requests of 2 new tokens, in pages from a shuffled pool."""
    g = torch.Generator().manual_seed(0)
    order, slots = torch.randperm(pages, generator=g).tolist(), []
    for n in lengths:
        slots += [p * page + t for p in [order.pop() for _ in range(-(-n // page))] for t in range(page)][:n]
    shapes = ((2 * len(lengths), 4), (pages, page, 2), (pages, page, 2))
    q, k, v = (torch.randn(*s, 64, generator=g).bfloat16() for s in shapes)
    kv = torch.tensor([0, *lengths]).cumsum(0)
    qo = 2 * torch.arange(len(lengths) + 1)
    return EXTEND.bind(q, k, v, qo, kv, torch.tensor(slots), lse=torch.zeros(*shapes[0]), scale=0.125)


def agrees(adapter: Adapter, arguments: dict[str, Any]) -> bool:
    assert adapter.supports(arguments) is None
    wants = adapter.spec.oracle(arguments)
    ways.clear()
    found = adapter.fn(**arguments)
    return bool(right_any(found, wants["return"]).all() and right_any(arguments["lse"], wants["lse"]).all())


@pytest.mark.parametrize("adapter", ["extend-fused"], indirect=True)
def test_several_queries_go_by_pages_of_128(adapter: Adapter) -> None:
    assert agrees(adapter, of_pages([140, 128, 3], 128, 5))
    assert ways == ["3 x 2 paged"]
    assert agrees(adapter, of_pages([40, 3], 16, 5))
    assert ways == ["2 x 2 gathered"]
    shared = of_pages([140, 3], 128, 3)
    shared["kv_indices"] = shared["kv_indices"][:140]
    shared["kv_indptr"] = torch.tensor([0, 140, 140])
    assert agrees(adapter, shared)
    assert ways == ["1 x 2 paged"]
    # Both list the same two pages of three: more than there are, one by one.
    shared["kv_indices"] = shared["kv_indices"].repeat(2)
    shared["kv_indptr"] = torch.tensor([0, 140, 280])
    assert agrees(adapter, shared)
    assert ways == ["2 x 2 gathered"]


@pytest.mark.parametrize("adapter", ["extend-fused"], indirect=True)
def test_requests_of_as_many_queries_make_one_call(adapter: Adapter) -> None:
    """Decoding requests among others are one call, whatever their lengths."""
    arguments = EXTEND.make(bs=6, lengths="full", longest=1, prefix=9)
    arguments["qo_indptr"] = torch.tensor([0, 1, 2, 2, 5, 6, 6])
    arguments["kv_indptr"] = torch.tensor([0, 10, 15, 20, 30, 40, 60])
    assert agrees(adapter, arguments)
    assert sorted(ways) == ["1 x 3 gathered", "3 x 1 gathered"]


@pytest.mark.parametrize("adapter", ["decode-fused", "extend-fused"], indirect=True)
@pytest.mark.parametrize(
    ("name", "to", "said"),
    [
        ("REQUESTS", 3, "q: expected at most 3 requests of 1 queries, by torch_npu; got 4"),
        ("KEYS", {True: 1, False: 1}, "kv_indptr: expected at most 1 keys of 1 queries, by torch_npu; got 2"),
    ],
)
def test_more_than_torch_npu_takes(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch, name: str, to: Any, said: str
) -> None:
    monkeypatch.setattr(_fused, name, to)
    params = {"longest": 1, "prefix": 1} if adapter.spec is EXTEND else {"longest": 2}
    arguments = adapter.spec.make(bs=4, lengths="full", **params)
    arguments["kv_indptr"] = torch.tensor([0, 1, 3, 4, 5])
    before = arguments["out"].clone()
    with pytest.raises(hal.ArgumentError, match=re.escape(said)):
        adapter.fn(**arguments)
    assert torch.equal(arguments["out"].view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("adapter", ["extend-fused"], indirect=True)
def test_a_library_that_differs_is_seen(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors in the stand-in, each of which torch_npu's documentation might be misread as."""

    arguments = of_pages([40, 3], 16, 5)

    def from_the_first(begin: int, stop: int, keys: int, causal: bool, window: int) -> Iterator[Any]:
        return ((t, 0, t - begin + 1 if causal else keys) for t in range(begin, stop))

    def by_shape(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Any:
        how["actual_seq_lengths_kv"] = [k.shape[1]] * k.shape[0]
        return npu_fused_infer_attention_score(q, k, v, **how)

    def to_the_base_2(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Any:
        found, sums = npu_fused_infer_attention_score(q, k, v, **how)
        return found, sums / math.log(2)

    with monkeypatch.context() as m:
        m.setitem(globals(), "seen_of", from_the_first)
        assert not agrees(adapter, arguments)
    for wrong in (by_shape, to_the_base_2):
        with monkeypatch.context() as m:
            m.setattr(sys.modules["torch_npu"], "npu_fused_infer_attention_score", wrong)
            assert not agrees(adapter, arguments)
    assert agrees(adapter, arguments)


@pytest.mark.parametrize("adapter", ["extend-fused"], indirect=True)
@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"sliding_window": 5}, "torch_npu's fused attention is asked for no windows"),
        ({"q_heads": 256, "head_dim": 256, "bs": 1}, "fewer than 65535 elements in a row of q"),
        ({"q_heads": 258, "kv_heads": 6, "bs": 1}, "at most 256 query heads, and 64 a key/value head"),
        ({"q_heads": 65, "kv_heads": 1, "bs": 1}, "at most 256 query heads, and 64 a key/value head"),
        ({"logit_cap": 5.0}, "torch_npu's fused attention caps no logits"),
    ],
)
def test_what_is_refused_of_torch_npu(adapter: Adapter, params: dict[str, Any], why: str) -> None:
    assert adapter.supports(EXTEND.make(**params)) == f"adapter: {why}"


def test_listed_is_well_formed_whatever_it_gets() -> None:
    """Offsets that overlap, slots that are none, a window that counts them."""
    indices = torch.tensor([5, -1, 7, 99, 2, 2**40, 3])
    got = listed(torch.tensor([0, 5, 2, 7]), indices, 10)
    assert got.lengths == [3, 0, 3]
    assert got.slots.tolist() == [5, 7, 2, 7, 2, 3]
    assert got.begin.tolist() == [0, 3, 3]
    assert got.rows(4)[0].tolist() == [[5, 7, 2, 0], [0, 0, 0, 0], [7, 2, 3, 0]]
    assert listed(torch.tensor([-(2**62), 2**62]), indices, 10).lengths == [4]
    assert listed(torch.tensor([0, 4]), indices, 10, sliding_window=1).slots.tolist() == [7]
    assert listed(torch.tensor([0]), indices[:0], 0).lengths == []


@pytest.mark.parametrize("adapter", ADAPTERS, indirect=True)
def test_a_planted_error_is_seen(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins are no rubber stamp: an adapter that forgets the scale, -1, causality or a row of nobody fails."""
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

    name = "listed" if op is DECODE else "runs"
    real = getattr(adapter.module, name)
    at = inspect.signature(real).parameters

    def careless(*given: Any) -> Any:
        slots = given[list(at).index("kv_indices")]
        return real(*[torch.where(slots < 0, 0, slots) if x is slots else x for x in given])

    monkeypatch.setattr(adapter.module, name, careless)
    assert outcome("skip") == FAILED
