"""Attention in one pass: shared out to threads, and each request by whoever is faster at it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cpu.cases import judge, ours, params

from hal._remote.target import DirectTarget
from hal.backends.cpu import _amx, _blocks, _online, _pool
from hal.conformance.execute import execute
from hal.ops import get_spec

OPS = ("decode_attention", "extend_attention")


@pytest.mark.parametrize("op", OPS)
def test_shared_out_it_gives_the_same_bits(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> torch.Tensor:
        found: torch.Tensor = ours(op)(**get_spec(op).make(bs=7, longest=60, slots=2000, dtype="fp32", lse=False))
        return found

    alone = run()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for bytes_ in ("SHARE", "WAKE", "GRAIN"):
            monkeypatch.setattr(_pool, bytes_, 64)
        assert torch.equal(alone, run())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("most", [0, 300, 10**9])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_requests_of_either_kind_in_one_batch(dtype: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the line is drawn between them, each request is done, once, and right."""
    found: list[Any] = []
    by_blocks = _blocks.attend

    def noted(spans: list[Any], *args: Any) -> None:
        found.extend(spans)
        by_blocks(spans, *args)

    monkeypatch.setattr(_blocks, "attend", noted)
    monkeypatch.setattr(_online, "MOST", dict.fromkeys(_online.MOST, (most, most)))
    some = {"bs": 6, "longest": 30, "prefix": 20, "dtype": dtype, "spare": 3, "lse": False, "seed": 3}
    judge("extend_attention", **some)
    assert (len(found) > 0) == (most < 10**9)
    found.clear()
    a = get_spec("extend_attention").make(**some)
    ours("extend_attention")(**a)
    new = a["qo_indptr"].diff()
    assert len(found) == int(((new > 1) & (new * a["kv_indptr"].diff() > most)).sum())


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_with_the_matrix_unit_and_without(op: str, tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without one takes the kernels of fp32 sums for bf16 too; of several blocks of keys each."""
    if tiles and not _amx.usable():
        pytest.skip("this CPU has no AMX for bf16")
    for module in (_online, _blocks):
        kernel = module.tile_kernel if tiles else module.kernel
        monkeypatch.setattr(module, "kernel_for", lambda *_, kernel=kernel: kernel)
    monkeypatch.setattr(_online, "MOST", dict.fromkeys(_online.MOST, (0, 0)))
    some: dict[str, Any] = {"bs": 2, "q_heads": 9, "kv_heads": 3, "dtype": "bf16", "slots": 800, "values": "skip"}
    more = {"longest": 330} if op == "decode_attention" else {"longest": 40, "prefix": 290}
    judge(op, **some, **more, lengths="full")


@pytest.mark.parametrize(
    ("sample", "online"),
    [
        ("fp32", True),
        ("llama3-8b-bf16", True),
        ("head-dim-80", True),
        ("head-dim-72", False),
        ("mla-fp32", True),
        ("mla-128-heads", False),
        ("logit-cap-fp32", False),
        ("e5m2-bf16-scale-none", False),
    ],
)
def test_who_does_what(sample: str, online: bool) -> None:
    a = get_spec("decode_attention").make(**params("decode_attention", sample))
    assert _online.fits(a["q"], a["k_cache"], a["v_cache"], a["logit_cap"]) == online


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("index", ["i32", "i64"])
def test_slots_in_a_row_of_one_request_that_threads_share(
    index: str, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of slots, with gaps, over the ends of pages; its keys are split, and the parts joined by whoever is last."""
    if tiles and not _amx.usable():
        pytest.skip("this CPU has no AMX for bf16")
    split: list[int] = []

    def noted(kernel: Any, variant: Any, items: int, *args: Any, call: Any) -> None:
        split.append(items)
        _pool.run(kernel, variant, items, *args, call=call)

    kernel = _online.tile_kernel if tiles else _online.kernel
    monkeypatch.setattr(_online, "kernel_for", lambda *_: kernel)
    monkeypatch.setattr(_online, "run", noted)
    monkeypatch.setattr(_online, "SHARE", 0)
    for bytes_ in ("SHARE", "WAKE", "GRAIN"):
        monkeypatch.setattr(_pool, bytes_, 64)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for bs, longest, cache in ((1, 700, "paged"), (1, 700, "slots"), (2, 150, "paged"), (3, 40, "paged")):
            spec, slots = get_spec("decode_attention"), (bs * longest // 16 + 2) * 16
            a = spec.make(
                bs=bs, longest=longest, lengths="full", slots=slots, cache=cache, q_heads=9, kv_heads=3, index=index
            )
            a["kv_indices"] = a["kv_indices"].sort().values
            a["kv_indices"][[3, 37]] = torch.tensor([-1, slots], dtype=a["kv_indices"].dtype)
            execute(spec, a, DirectTarget.of(spec.name, ours(spec.name)))
    finally:
        torch.set_num_threads(before)
    assert split == [6, 6, 6, 9]


@pytest.mark.skipif(not _amx.usable(), reason="this CPU has no AMX for bf16")
@pytest.mark.parametrize("by", [1.0, -1.0, 0.0])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 64), (128, 128), (96, 32), (32, 160)])
def test_logits_that_rise_along_the_keys(
    head_dim: int, v_head_dim: int, by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is summed so far is weighed anew as the maximum rises, whatever the scale's sign; rows are asked for too."""
    monkeypatch.setattr(_online, "NEAR_TILES", 0)
    spec = get_spec("decode_attention")
    a = spec.make(bs=2, longest=601, lengths="full", slots=1300, dtype="bf16", head_dim=head_dim, v_head_dim=v_head_dim)
    a["scale"] *= by
    for first, last in itertools.pairwise(a["kv_indptr"].tolist()):
        slots = a["kv_indices"][first:last].long()
        slots = slots[(slots >= 0) & (slots < 1300)]
        rows = a["k_cache"].view(-1, *a["k_cache"].shape[-2:])
        rows[slots] *= torch.linspace(0.1, 8.0, len(slots), dtype=rows.dtype, device="cpu").view(-1, 1, 1)
    execute(spec, a, DirectTarget.of(spec.name, ours(spec.name)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("heads", "head_dim", "v_head_dim"), [(1, 128, 128), (2, 80, 48), (3, 64, 64), (8, 128, 128)])
@pytest.mark.parametrize("op", ["decode_attention", "extend_attention"])
def test_rows_that_are_asked_for_change_no_result(
    op: str, heads: int, head_dim: int, v_head_dim: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit as without: lengths on both sides of a block's, rows of lines that are not whole, slots of no key."""
    far: list[bool] = []

    def noted(kernel: Any, variant: Any, items: int, work: int, args: tuple[Any, ...], call: Any) -> None:
        far.append(args[-4])
        _pool.run(kernel, variant, items, work, args, call=None)  # nor is it remembered, for calls to come

    monkeypatch.setattr(_online, "run", noted)
    monkeypatch.setattr(_online, "kernel_for", lambda *_: _online.kernel)
    spec = get_spec(op)
    a = spec.make(
        bs=2, slots=1300, q_heads=heads, kv_heads=1, dtype=dtype, head_dim=head_dim, v_head_dim=v_head_dim,
        index="i64", **({"longest": 601} if op == "decode_attention" else {"longest": 5, "prefix": 510}),
    )  # fmt: skip
    a["kv_indices"][[0, 37, 256]] = torch.tensor([-1, 1300, -1])
    found = []
    for near in (1 << 60, 0):
        monkeypatch.setattr(_online, "NEAR", near)
        found.append(ours(op)(**a).clone())
    assert far == [False, True]
    assert torch.equal(*found)
    execute(spec, a, DirectTarget.of(op, ours(op)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("tokens", [2, 5])
def test_tokens_of_one_request_that_threads_share(tokens: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of several tokens, of one and of none, with one head for two threads: a head's tokens come in pieces."""
    monkeypatch.setattr(_online, "SHARE", 0)
    for bytes_ in ("SHARE", "WAKE", "GRAIN"):
        monkeypatch.setattr(_pool, bytes_, 64)
    shared: list[int] = []

    def noted(kernel: Any, variant: Any, items: int, *args: Any, call: Any) -> None:
        shared.append(items)
        _pool.run(kernel, variant, items, *args, call=call)

    monkeypatch.setattr(_online, "run", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for bs, lengths in ((1, "full"), (3, "random"), (2, "full")):
            some = {"bs": bs, "longest": tokens, "prefix": 70, "lengths": lengths, "q_heads": 3, "kv_heads": 1}
            judge("extend_attention", **some, dtype=dtype)
    finally:
        torch.set_num_threads(before)
    assert max(shared) > 3  # more than there are heads of requests


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 4, 500])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tokens_that_read_keys_together(dtype: str, window: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than go together, over keys that all of them see, and such as only the first or only the last do."""
    monkeypatch.setattr(_online, "MOST", dict.fromkeys(_online.MOST, (10**9, 10**9)))
    spec = get_spec("extend_attention")
    for q_heads, kv_heads, prefix in ((3, 1, 600), (12, 2, 550)):
        a = spec.make(
            bs=2, longest=11, lengths="full", prefix=prefix, slots=1500, dtype=dtype, q_heads=q_heads, kv_heads=kv_heads
        )
        assert 128 * (a["kv_indptr"][1] - a["kv_indptr"][0]) > _online.REREAD
        a["kv_indices"][[3, 300, -2]] = -1
        a |= {"causal": causal, "sliding_window": window}
        execute(spec, a, DirectTarget.of(spec.name, ours(spec.name)))
