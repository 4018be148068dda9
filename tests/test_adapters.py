"""The adapters of other people's attention: what they ask of a library, against stand-ins that know its interface.

A stand-in has the documented signature, refuses what the library's documentation rules out, computes in float64, and
leaves garbage where the library makes no promise. So a mapping that is wrong gives a wrong result here; what a stand-in
can't show is whether the library itself does what its documentation says.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hal.conformance._arena import POISONS
from hal.conformance._cases import cases_of
from hal.conformance._proofs import BOUND, Refused, Run, run_case
from hal.conformance._result import FAILED, PASSED, Case
from hal.conformance._target import Bound, DirectTarget
from hal.ops import spec
from hal.ops._judge import right_any
from hal.paging import listed

SPEC = spec("decode_attention")
HALVES = (torch.float16, torch.bfloat16)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float) -> tuple[Tensor, Tensor]:
    """One query ``[heads, dim]`` over ``[keys, kv_heads, dim]``: output and natural log-sum-exp, in float64."""
    group = q.shape[0] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("hd,jhd->hj", q.double(), k) * scale
    logits = cap * torch.tanh(logits / cap) if cap else logits
    return torch.einsum("hj,jhd->hd", logits.softmax(-1), v), logits.logsumexp(-1)


class Wrapper:
    """flashinfer.BatchDecodeWithPagedKVCacheWrapper."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
                 use_tensor_cores: bool = False) -> None:  # fmt: skip
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.numel() >= 128 << 20
        assert (kv_layout, use_cuda_graph, use_tensor_cores) == ("NHD", False, True)
        self.plans = 0

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, pos_encoding_mode: str = "NONE", window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: Any = "float16", kv_data_type: Any = None,
        sm_scale: float | None = None,
    ) -> None:  # fmt: skip
        assert {t.dtype for t in (indptr, indices, last_page_len)} == {torch.int32}
        assert indptr[0] == 0
        assert (indptr.diff() >= 0).all()
        assert indptr[-1] == indices.shape[0]
        used = indptr.diff() > 0
        assert ((last_page_len >= 1) & (last_page_len <= page_size))[used].all()
        # kv length = (pages - 1) * page_size + last_page_len, with no page 0 + last_page_len
        assert (last_page_len[~used] == 0).all()
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim in (64, 128, 256)
        assert q_data_type in HALVES
        assert kv_data_type == q_data_type
        assert pos_encoding_mode == "NONE"
        assert isinstance(sm_scale, float)
        self.indptr, self.indices, self.page_size = indptr.tolist(), indices, page_size
        self.heads, self.kind = (num_qo_heads, num_kv_heads, head_dim), q_data_type
        self.cap, self.scale, self.window = logits_soft_cap or 0.0, sm_scale, window_left
        self.plans += 1

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None,
        lse: Tensor | None = None, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        k, v = paged_kv_cache
        heads, kv_heads, dim = self.heads
        assert q.dtype == self.kind
        assert q.is_contiguous()
        assert q.shape == (len(self.indptr) - 1, heads, dim)
        assert k.shape[1:] == (self.page_size, kv_heads, dim)
        assert k.stride() == v.stride()
        assert ((self.indices >= 0) & (self.indices < k.shape[0])).all()
        assert self.window == -1
        assert out is not None
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        assert out.is_contiguous()
        out.fill_(torch.nan)
        if return_lse:
            assert lse is not None
            assert (lse.shape, lse.dtype) == (q.shape[:2], torch.float32)
            lse.fill_(torch.nan)
        for i, (a, b) in enumerate(zip(self.indptr, self.indptr[1:], strict=False)):
            if b > a:
                pages = self.indices[a:b].long()
                found, sums = attend(
                    q[i], k[pages].flatten(0, 1), v[pages].flatten(0, 1), self.scale, self.cap
                )
                out[i] = found.to(q.dtype)
                if return_lse and lse is not None:
                    lse[i] = (sums / math.log(2)).float()
        return (out, lse) if return_lse else out


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: None = None, v: None = None, qv: None = None,
    rotary_cos: None = None, rotary_sin: None = None, cache_seqlens: Tensor | None = None, cache_batch_idx: None = None,
    cache_leftpad: None = None, page_table: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    assert page_table is not None
    assert cache_seqlens is not None
    bs, seqlen, heads, _ = q.shape
    blocks, page, _, _ = k_cache.shape
    assert seqlen == 1
    assert q.dtype in HALVES
    assert q.dtype == k_cache.dtype == v_cache.dtype
    assert {t.dtype for t in (page_table, cache_seqlens)} == {torch.int32}
    assert page_table.is_contiguous()
    assert cache_seqlens.shape == (bs,)
    assert page_table.shape[0] == bs
    assert int(cache_seqlens.max()) <= page_table.shape[1] * page
    assert ((page_table >= 0) & (page_table < blocks)).all()
    assert causal
    assert window_size == (-1, -1)
    assert isinstance(softmax_scale, float)
    out, lse = torch.full_like(q, torch.nan), torch.full((bs, heads, 1), torch.inf)
    for i, n in enumerate(cache_seqlens.tolist()):
        if n:
            rows = [c[page_table[i].long()].flatten(0, 1)[:n] for c in (k_cache, v_cache)]
            found, sums = attend(q[i, 0], rows[0], rows[1], softmax_scale, softcap)
            out[i, 0], lse[i, :, 0] = found.to(q.dtype), sums.float()
    return (out, lse, None, None) if return_softmax_lse else out


ways: list[str] = []


def npu_fused_infer_attention_score(
    query: Tensor, key: Tensor, value: Tensor, *, atten_mask: None = None, actual_seq_lengths: None = None,
    actual_seq_lengths_kv: list[int] | None = None, block_table: Tensor | None = None, num_heads: int = 1,
    scale: float = 1.0, pre_tokens: int = 2147483647, next_tokens: int = 2147483647, input_layout: str = "BSH",
    num_key_value_heads: int = 0, sparse_mode: int = 0, block_size: int = 0, softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    bs, seqlen, hidden = query.shape
    dim = hidden // num_heads
    assert (input_layout, seqlen, sparse_mode) == ("BSH", 1, 0)
    assert query.dtype in HALVES
    assert query.dtype == key.dtype == value.dtype
    assert all(t.is_contiguous() for t in (query, key, value))
    assert isinstance(actual_seq_lengths_kv, list)
    assert len(actual_seq_lengths_kv) == bs
    assert min(actual_seq_lengths_kv) >= 1
    assert num_heads % num_key_value_heads == 0
    assert key.shape[-1] == num_key_value_heads * dim
    assert dim % 16 == 0
    if block_table is None:
        assert key.shape[0] == bs
        assert key.shape[1] >= max(actual_seq_lengths_kv)
        rows = [key, value]
        ways.append("gathered")
    else:
        assert block_table.dtype == torch.int32
        assert block_size == key.shape[1]
        assert block_size % 16 == 0
        assert block_table.shape[1] * block_size >= max(actual_seq_lengths_kv)
        assert ((block_table >= 0) & (block_table < key.shape[0])).all()
        rows = [c[block_table.long()].flatten(1, 2) for c in (key, value)]
        ways.append("paged")
    out, lse = torch.full_like(query, torch.nan), torch.full((bs, num_heads, 1, 1), torch.nan)
    for i, n in enumerate(actual_seq_lengths_kv):
        k, v = (r[i, :n].view(n, num_key_value_heads, dim) for r in rows)
        found, sums = attend(query[i, 0].view(num_heads, dim), k, v, scale, 0.0)
        out[i, 0], lse[i, :, 0, 0] = found.flatten().to(query.dtype), sums.float()
    return out, lse if softmax_lse_flag else torch.zeros(1)


ADAPTERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "cuda/flashinfer": (
        "hal.backends.cuda.decode_attention_flashinfer",
        "flashinfer",
        {"BatchDecodeWithPagedKVCacheWrapper": Wrapper},
    ),
    "cuda/fa3": (
        "hal.backends.cuda.decode_attention_fa3",
        "flash_attn_interface",
        {"flash_attn_with_kvcache": flash_attn_with_kvcache},
    ),
    "ascend/fused": (
        "hal.backends.ascend.decode_attention_fused",
        "torch_npu",
        {"npu_fused_infer_attention_score": npu_fused_infer_attention_score},
    ),
}


@pytest.fixture
def adapter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter's module, with the stand-in in its library's place."""
    module, library, names = ADAPTERS[request.param]
    stand_in = ModuleType(library)
    vars(stand_in).update(names)
    monkeypatch.setitem(sys.modules, library, stand_in)
    found = importlib.import_module(module)
    if hasattr(found, "_wrappers"):
        monkeypatch.setattr(found, "_wrappers", {})
    return found


def target(adapter: Any) -> DirectTarget:
    bound = Bound(
        adapter.decode_attention, adapter.supports, "adapter", graph_safe=False, deterministic=False
    )
    return DirectTarget({"decode_attention": bound}, limits=("adapter",))


def cases(proof: str) -> list[Case]:
    return [c for c in cases_of(SPEC) if c.proof == proof]


@pytest.mark.parametrize("adapter", ADAPTERS, indirect=True)
def test_value(adapter: Any) -> None:
    """Every sample that it supports gives what the contract says, and writes nothing else; it refuses the others."""
    judged, ran, refused = target(adapter), 0, 0
    for case in cases("value"):
        sample = next(s for s in SPEC.samples if s.name == case.sample)
        run = Run(judged, SPEC, case)
        why = adapter.supports(SPEC.sign(SPEC.make(**sample.params)))
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
def test_ragged(adapter: Any) -> None:
    """Random batches of what it supports: odd listings, odd offsets, windows, caps."""
    judged, ran = target(adapter), 0
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)

        def pick(choices: Any, g: torch.Generator = g) -> Any:
            return choices[int(torch.randint(0, len(choices), (1,), generator=g))]

        params = {
            "seed": seed, "bs": pick(range(8)), "longest": pick(range(60)), "kv_heads": pick([1, 2, 4]),
            "cache": pick(["slots", "paged"]), "page_size": pick([1, 3, 16]), "index": pick(["i32", "i64"]),
            "values": pick(["valid", "skip", "edge", "extreme"]), "out": pick(["none", "given"]),
            "indptr_values": pick(["valid", "edge", "extreme"]), "sliding_window": pick([-1, 0, 5]),
            "lse": pick([True, False]), "logit_cap": pick([0.0, 0.0, 7.0]),
        }  # fmt: skip
        arguments = SPEC.make(**params)
        if adapter.supports(SPEC.sign(arguments)) is None:
            Run(judged, SPEC, Case("decode_attention", "value", "ragged")).prove(params)
            ran += 1
    assert ran >= 20


@pytest.mark.parametrize("adapter", ["ascend/fused"], indirect=True)
@pytest.mark.parametrize(("odd", "way"), [(False, "paged"), (True, "gathered")])
def test_whole_pages_go_by_block_table(adapter: Any, odd: bool, way: str) -> None:
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
    arguments = SPEC.bind(q, k, v, indptr, indices, lse=torch.zeros(3, 4), scale=0.125)
    assert adapter.supports(SPEC.sign(arguments)) is None
    wants = SPEC.oracle(arguments)
    ways.clear()
    found = adapter.decode_attention(**arguments)
    assert ways == [way]
    assert right_any(found, wants["return"]).all()
    assert right_any(arguments["lse"], wants["lse"]).all()


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


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_planted_error_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins are no rubber stamp: an adapter that forgets the scale, or -1, fails."""
    module, library, names = ADAPTERS[name]
    stand_in = ModuleType(library)
    vars(stand_in).update(names)
    monkeypatch.setitem(sys.modules, library, stand_in)
    found = importlib.import_module(module)
    right: Callable[..., Any] = found.decode_attention
    plain = Case("decode_attention", "value", "bf16", "bf16")
    skip = Case("decode_attention", "value", "skip", "skip")

    def broken(**arguments: Any) -> Any:
        return right(**{**arguments, "scale": arguments["scale"] * 1.5})

    for case, fn, expected in ((plain, right, PASSED), (plain, broken, FAILED), (skip, right, PASSED)):
        judged = DirectTarget({"decode_attention": Bound(fn, found.supports, name)}, limits=("adapter",))
        assert run_case(case, judged, SPEC).outcome == expected

    def careless(kv_indptr: Tensor, kv_indices: Tensor, num_slots: int, sliding_window: int = -1) -> Any:
        return listed(kv_indptr, torch.where(kv_indices < 0, 0, kv_indices), num_slots, sliding_window)

    monkeypatch.setattr(found, "listed", careless)
    judged = DirectTarget({"decode_attention": Bound(right, found.supports, name)}, limits=("adapter",))
    assert run_case(skip, judged, SPEC).outcome == FAILED
