"""What the plugin asks of torch_npu, by a stand-in for it. On a machine with an NPU, hal's own suite judges it:
``hal conformance torch-npu --op decode_attention --op extend_attention``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import stand_in
import torch
from hal_backend_torch_npu import OPS, attention
from torch import Tensor

import hal
from hal.ops import get_spec
from hal.ops.proofs.judge import right_any, same_bits

DECODE, EXTEND = (get_spec(op) for op in OPS)
Arguments = dict[str, Any]


@pytest.fixture(autouse=True)
def torch_npu() -> Iterator[None]:
    stand_in.calls.clear()
    yield
    stand_in.install()


def check(spec: Any, arguments: Arguments) -> bool:
    """Whether what the contract names is right, within its bound, and all else is as it was."""
    wants = spec.oracle(arguments)
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, Tensor)}
    stand_in.calls.clear()
    found = {**arguments, "return": getattr(attention, spec.name)(**arguments)}
    right = all(bool(right_any(found[name], want).all()) for name, want in wants.items())
    return right and all(
        bool((same_bits(found[name], x) | (wants[name].named if name in wants else False)).all())
        for name, x in before.items()
    )


def supports(spec: Any, arguments: Arguments) -> str | None:
    why: str | None = getattr(attention, f"supports_{spec.name}")(spec.sign(arguments))
    return why


@pytest.mark.parametrize("spec", [DECODE, EXTEND], ids=OPS)
def test_samples(spec: Any) -> None:
    """Every sample of the contract that it supports."""
    ran = 0
    for sample in (s for s in spec.samples if not s.large):
        arguments = spec.make(**sample.params)
        if supports(spec, arguments) is None:
            assert check(spec, arguments), sample.name
            ran += 1
    assert ran >= 25


@pytest.mark.parametrize("spec", [DECODE, EXTEND], ids=OPS)
def test_ragged(spec: Any) -> None:
    """Random batches: odd listings, odd offsets, windows, rows of no request."""
    choices: dict[str, Sequence[Any]] = {
        "bs": range(8),
        "longest": range(60),
        "kv_heads": [1, 2, 4],
        "cache": ["slots", "paged"],
        "page_size": [1, 3, 16],
        "index": ["i32", "i64"],
        "values": ["valid", "skip", "edge", "extreme"],
        "out": ["none", "given"],
        "indptr_values": ["valid", "edge", "extreme"],
        "sliding_window": [-1, 0, 5],
        "lse": [True, False],
    }
    if spec is EXTEND:
        choices |= {"longest": [1, 4, 15], "prefix": [-4, 0, 20], "spare": [0, 2], "causal": [True, True, False]}
        choices["sliding_window"] = [-1]
    for seed in range(60):
        pick = Random(seed)
        params = {name: pick.choice(values) for name, values in choices.items()}
        assert check(spec, spec.make(seed=seed, **params)), params


def test_the_plugin_is_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By hal's registry, from its metadata: bound by name, it runs what hal's dispatch hands it."""
    info = tmp_path / "torch_npu_stand_in-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu-stand-in\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[hal.backends]\n{stand_in.NAME} = stand_in\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    hal.reload()
    arguments = make_pages([40, 0, 17], 16, 9, queries=1)
    named = ("q", "k_cache", "v_cache", "kv_indptr", "kv_indices")
    hal.decode_attention(*(arguments[n] for n in named), scale=0.125, backend=stand_in.NAME)
    assert stand_in.calls == ["3 x 1 paged"]
    with pytest.raises(hal.NoBackendError, match="torch-npu: it caps no logits"):
        hal.decode_attention(*(arguments[n] for n in named), scale=0.125, logit_cap=5.0, backend=stand_in.NAME)


def make_pages(lengths: list[int], page: int, pages: int, queries: int) -> Arguments:
    """Arguments of `extend_attention`, or for one query of `decode_attention`, of requests in pages of a shuffled
    pool."""
    g = torch.Generator().manual_seed(0)
    order, slots = torch.randperm(pages, generator=g).tolist(), []
    for n in lengths:
        slots += [p * page + t for p in [order.pop() for _ in range(-(-n // page))] for t in range(page)][:n]
    shapes = ((queries * len(lengths), 4), (pages, page, 2), (pages, page, 2))
    q, k, v = (torch.randn(*s, 64, generator=g).bfloat16() for s in shapes)
    kv = torch.tensor([0, *lengths]).cumsum(0)
    options = {"lse": torch.zeros(*shapes[0]), "scale": 0.125}
    if queries == 1:
        return DECODE.bind(q, k, v, kv, torch.tensor(slots), **options)
    return EXTEND.bind(q, k, v, queries * torch.arange(len(lengths) + 1), kv, torch.tensor(slots), **options)


def is_right(arguments: Arguments) -> bool:
    spec = EXTEND if "qo_indptr" in arguments else DECODE
    assert supports(spec, arguments) is None
    return check(spec, arguments)


@pytest.mark.parametrize(("odd", "how"), [(False, "paged"), (True, "gathered")])
def test_whole_pages_go_by_block_table(odd: bool, how: str) -> None:
    """A listing of whole pages, as `build_kv_indices` makes it; with one slot out of its page, rows are gathered."""
    arguments = make_pages([40, 0, 17], 16, 9, queries=1)
    if odd:
        arguments["kv_indices"][5] = -1
    assert is_right(arguments)
    assert stand_in.calls == [f"3 x 1 {how}"]


def test_several_queries_go_by_pages_of_128() -> None:
    assert is_right(make_pages([140, 128, 3], 128, 5, queries=2))
    assert stand_in.calls == ["3 x 2 paged"]
    assert is_right(make_pages([40, 3], 16, 5, queries=2))
    assert stand_in.calls == ["2 x 2 gathered"]
    shared = make_pages([140, 3], 128, 3, queries=2)
    shared["kv_indices"] = shared["kv_indices"][:140]
    shared["kv_indptr"] = torch.tensor([0, 140, 140])
    assert is_right(shared)
    assert stand_in.calls == ["1 x 2 paged"]
    # Both list the same two pages of three: more than there are, one by one.
    shared["kv_indices"] = shared["kv_indices"].repeat(2)
    shared["kv_indptr"] = torch.tensor([0, 140, 280])
    assert is_right(shared)
    assert stand_in.calls == ["2 x 2 gathered"]


def test_requests_of_as_many_queries_make_one_call() -> None:
    """Decoding requests among others are one call, whatever their lengths."""
    arguments = EXTEND.make(bs=6, lengths="full", longest=1, prefix=9)
    arguments["qo_indptr"] = torch.tensor([0, 1, 2, 2, 5, 6, 6])
    arguments["kv_indptr"] = torch.tensor([0, 10, 15, 20, 30, 40, 60])
    assert is_right(arguments)
    assert sorted(stand_in.calls) == ["1 x 3 gathered", "3 x 1 gathered"]


@pytest.mark.parametrize("spec", [DECODE, EXTEND], ids=OPS)
@pytest.mark.parametrize(
    ("name", "to", "message"),
    [
        ("MAX_REQUESTS", 3, "q: expected at most 3 requests of 1 queries, by torch_npu; got 4"),
        ("MAX_KEYS", {True: 1, False: 1}, "kv_indptr: expected at most 1 keys of 1 queries, by torch_npu; got 2"),
    ],
)
def test_more_than_torch_npu_takes(
    spec: Any, monkeypatch: pytest.MonkeyPatch, name: str, to: Any, message: str
) -> None:
    monkeypatch.setattr(attention, name, to)
    params = {"longest": 1, "prefix": 1} if spec is EXTEND else {"longest": 2}
    arguments = spec.make(bs=4, lengths="full", **params)
    arguments["kv_indptr"] = torch.tensor([0, 1, 3, 4, 5])
    before = arguments["out"].clone()
    with pytest.raises(hal.ArgumentError, match=message):
        getattr(attention, spec.name)(**arguments)
    assert torch.equal(arguments["out"].view(torch.int16), before.view(torch.int16))


def test_a_library_that_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors in the stand-in, each of which torch_npu's documentation might be misread as."""
    right = stand_in.npu_fused_infer_attention_score
    arguments = make_pages([40, 3], 16, 5, queries=2)

    def align_first(queries: int, keys: int, causal: bool) -> Iterator[tuple[int, int, int]]:
        return ((t, 0, t + 1 if causal else keys) for t in range(queries))

    def ignore_lengths(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Any:
        return right(q, k, v, **{**how, "actual_seq_lengths_kv": [k.shape[1]] * k.shape[0]})

    def sum_in_base_2(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Any:
        found, sums = right(q, k, v, **how)
        return found, sums / math.log(2)

    with monkeypatch.context() as m:
        m.setattr(stand_in, "visible_keys", align_first)
        assert not is_right(arguments)
    for wrong in (ignore_lengths, sum_in_base_2):
        stand_in.install(wrong)
        assert not is_right(arguments)
    stand_in.install()
    assert is_right(arguments)


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"sliding_window": 5}, "no windows where a request has several queries"),
        ({"q_heads": 256, "head_dim": 256, "bs": 1}, "fewer than 65535 elements in a row of q"),
        ({"q_heads": 258, "kv_heads": 6, "bs": 1}, "at most 256 query heads, and 64 a key/value head"),
        ({"q_heads": 65, "kv_heads": 1, "bs": 1}, "at most 256 query heads, and 64 a key/value head"),
        ({"logit_cap": 5.0}, "it caps no logits"),
    ],
)
def test_refusals(params: Arguments, why: str) -> None:
    assert supports(EXTEND, EXTEND.make(**params)) == f"torch-npu: {why}"
