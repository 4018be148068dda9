"""decode_attention's parts, merged in the launch that made them, by whoever counts that all are done, or by a second.

Under TRITON_INTERPRET=1: merged in levels, or by a second launch. On a CUDA device: counters of graphs, which nobody
clears between replays. Which of both it is: by the launches that are recorded.
"""

import os
from typing import Any

import pytest
import torch
from launched import launched, same_in_graphs

from hal._remote.target import DirectTarget
from hal.conformance.execute import execute
from hal.ops import get_spec
from hal.ops.proofs.judge import right_any

pytest.importorskip("triton", reason="Triton is not installed here")

import triton
import triton.language as tl

from hal.backends.cuda._split import find, find_one

CUDA = torch.cuda.is_available()
HOPPER = CUDA and torch.cuda.get_device_capability()[0] == 9
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LONG = {"bs": 3, "longest": 1500, "lengths": "full", "slots": 4800, "kv_heads": 2, "q_heads": 10, "dtype": "bf16"}


@triton.jit
def chunk_kernel(indptr, to, nnz, bs, programs, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    chunk, _, _, _ = find(indptr, tl.arange(0, BLOCK), 0, nnz, bs, programs, 0, 128, 0, False)
    tl.store(to, chunk)


@triton.jit
def found_kernel(  # type: ignore[no-untyped-def]
    indptr, to, nnz, window, SHORTEST: tl.constexpr, FEW_PARTS: tl.constexpr, WINDOW: tl.constexpr,
    LONGER: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """What each part of the only request finds, of 20 programs."""
    c = tl.program_id(0)
    if ONE:
        chunk, request, before, part = find_one(indptr, c, nnz, 20, window, SHORTEST, FEW_PARTS, WINDOW, LONGER)
    else:
        each = tl.arange(0, 32)
        chunk, request, before, part = find(indptr, each, c, nnz, 1, 20, window, SHORTEST, FEW_PARTS, WINDOW, LONGER)
    tl.store(to + 4 * c, chunk)
    tl.store(to + 4 * c + 1, tl.minimum(request, 1))
    tl.store(to + 4 * c + 2, tl.where(request < 1, before, 0))
    tl.store(to + 4 * c + 3, tl.where(request < 1, part, 0))


@triton.jit
def parts_kernel(indptr, to, nnz, bs, programs, window, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    c = tl.program_id(0)
    chunk, request, before, part = find(indptr, tl.arange(0, 16), c, nnz, bs, programs, window, 16, 0, WINDOW)
    tl.store(to + 4 * c, chunk)
    tl.store(to + 4 * c + 1, request)
    tl.store(to + 4 * c + 2, before)
    tl.store(to + 4 * c + 3, part)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Parts of 16 keys, merged three at a time, two at once."""
    from hal.backends.cuda import decode_attention as module

    module._plans.clear()
    deep = {most: form._replace(per_sm=1, at_once=0) for most, form in module.DEEP.items()}
    for name, value in {"DEEP": deep, "SHORTEST": 16, "TOGETHER": 3 * 8 * 32, "AT_ONCE": 2 * 8 * 32}.items():
        monkeypatch.setattr(module, name, value)
    yield module
    module._plans.clear()


@pytest.mark.skipif(not INTERPRETED or CUDA, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("change", [{"bs": 1, "kv_heads": 1, "q_heads": 5}, {"bs": 2, "values": "skip"}], ids=str)
def test_merged_in_levels(module: Any, change: dict[str, Any]) -> None:
    args = get_spec("decode_attention").make(**{**LONG, "longest": 400, "head_dim": 32, **change})
    wants = get_spec("decode_attention").oracle(args)
    result = module.decode_attention(**args)
    assert [step.run.static.get("TOGETHER") for plan in module._plans.values() for step in plan.steps] == [3, 3]
    assert bool(right_any(result, wants["return"]).all())
    assert bool(right_any(args["lse"], wants["lse"]).all())


@pytest.mark.skipif(not INTERPRETED or CUDA, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(("bs", "head_dim"), [(20, 64), (60, 64), (20, 80)])
def test_merged_by_a_second_launch(module: Any, monkeypatch: pytest.MonkeyPatch, bs: int, head_dim: int) -> None:
    """A program has all requests to look at, more than at once, and of each its own parts, more than at once; by either
    form, and of lines that are no whole pieces."""
    from hal.backends.cuda import _merge

    monkeypatch.setattr(module, "WHOLE", 8)
    monkeypatch.setattr(_merge, "FEW_MERGED", 1)
    monkeypatch.setattr(_merge, "FEW", _merge.FEW._replace(rows=2, programs=1))
    monkeypatch.setattr(_merge, "AT_ONCE", 2 * 16)
    change = {
        "bs": bs,
        "longest": 80,
        "lengths": "ragged",
        "kv_heads": 1,
        "q_heads": 5,
        "dtype": "fp32",
        "head_dim": head_dim,
        "slots": 8192,
    }
    args = get_spec("decode_attention").make(**{**LONG, **change})
    wants = get_spec("decode_attention").oracle(args)
    result = module.decode_attention(**args)
    steps = [step for plan in module._plans.values() for step in plan.steps][2:]
    ranges = [("q", -1, 51), ("q", 51, _merge.UNBOUNDED // 5)] if head_dim == 64 else [("q", -1, _merge.UNBOUNDED // 5)]
    assert [(step.run.kernel.name, step.where[1]) for step in steps] == [("merge_kernel", each) for each in ranges]
    assert bool(right_any(result, wants["return"]).all())
    assert bool(right_any(args["lse"], wants["lse"]).all())


WIDE = ((16, 1, 128), (64, 8, 128), (16, 2, 256), (8, 1, 256))
"""Query heads, key heads and head_dim, whose parts one program would take long to merge."""


def made(heads: tuple[int, int, int], bs: int, longest: int, **change: Any) -> dict[str, Any]:
    q_heads, kv_heads, head_dim = heads
    form = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": "bf16", "lengths": "full"}
    return get_spec("decode_attention").make(**{**form, "bs": bs, "longest": longest, "slots": bs * longest, **change})


@pytest.mark.skipif(CUDA and not HOPPER, reason="needs no GPU, or a Hopper GPU")
def test_of_few_long_requests_wide_parts_are_merged_by_a_second_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.backends.cuda import decode_attention as module

    monkeypatch.setattr(module, "_sms", lambda device: 132)

    def merged(heads: tuple[int, int, int], bs: int, longest: int, **change: Any) -> bool:
        args = made(heads, bs, longest, **change)
        if CUDA:
            args = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in args.items()}
        names = [run.kernel.name for run in launched("decode_attention", args)]
        assert names[0] == "decode_attention_kernel"
        assert names[1:] in ([], ["merge_kernel"])
        return len(names) == 2

    assert all(merged(heads, 1, 2100) for heads in WIDE)
    assert not any(merged(heads, 1, 500) for heads in WIDE)
    assert [merged((16, 1, 128), bs, 1500) for bs in (1, 2, 8, 9)] == [False, False, True, False]
    assert [merged((16, 2, 256), bs, 600) for bs in (1, 2, 8, 9)] == [True, False, True, False]
    assert [merged((64, 4, 128), bs, 3000) for bs in (1, 2, 3)] == [True, True, False]
    assert not merged((64, 8, 128), 2, 3000)
    assert not any(merged(heads, 1, 3000) for heads in ((32, 8, 128), (64, 8, 64), (16, 8, 256)))
    assert not merged((16, 1, 128), 1, 3000, sliding_window=2047)
    assert merged((16, 1, 128), 1, 3000, sliding_window=2048)


@pytest.mark.skipif(not INTERPRETED or CUDA, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("change", [{"bs": 1}, {"bs": 3, "values": "skip"}, {"bs": 2, "sliding_window": 300}], ids=str)
def test_right_where_parts_are_merged_so(module: Any, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    few = {most: form._replace(per_sm=1, at_once=2) for most, form in module.DEEP.items()}
    form = {"DEEP": few, "_sms": lambda device: 12, "TOGETHER": 3 * 8 * 128, "APART": {128: (2, 100)}, "WIDE_APART": 0}
    for name, value in form.items():
        monkeypatch.setattr(module, name, value)
    args = get_spec("decode_attention").make(**{**LONG, "longest": 400, "head_dim": 128, **change})
    wants = get_spec("decode_attention").oracle(args)
    assert [run.kernel.name for run in launched("decode_attention", args)][1:] == ["merge_kernel"]
    result = module.decode_attention(**args)
    assert bool(right_any(result, wants["return"]).all())
    assert bool(right_any(args["lse"], wants["lse"]).all())


@pytest.mark.skipif(not HOPPER or INTERPRETED, reason="needs a Hopper GPU")
@pytest.mark.parametrize("heads", WIDE, ids=str)
@pytest.mark.parametrize("change", [{}, {"bs": 5, "longest": 6000, "lengths": "ragged", "logit_cap": 5.0}], ids=str)
def test_right_and_the_same_in_graphs(heads: tuple[int, int, int], change: dict[str, Any]) -> None:
    from hal.backends.cuda import decode_attention as module

    args = made(heads, **{"bs": 1, "longest": 5000, **change})
    spec = get_spec("decode_attention")
    execute(spec, args, DirectTarget.of(spec.name, module.decode_attention, "cuda"))
    same_in_graphs(module.decode_attention, args)


@pytest.mark.skipif(not INTERPRETED or CUDA, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("bs", [2, 34, 40, 65])
def test_equal_requests_are_parts_that_run_at_once(bs: int) -> None:
    """40 requests over 66 programs in 2 parts each would be a second wave of 14; as one part each they are none."""
    indptr = 3000 * torch.arange(bs + 1, dtype=torch.int32, device="cpu")
    chunk = torch.zeros(1, dtype=torch.int32, device="cpu")
    chunk_kernel[(1,)](indptr, chunk, 3000 * bs, bs, 66, BLOCK=128)
    even = -(-3000 * bs // 66)
    assert even <= int(chunk) <= 2 * even
    assert bs * -(-3000 // int(chunk)) <= 66


@pytest.mark.skipif(not INTERPRETED or CUDA, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("begin", "end", "window"),
    [(0, 0, 0), (0, 1, 0), (3, 700, 0), (0, 1024, 0), (0, 3000, 90), (5, 9000, 0), (700, 3, 0), (-4, 10**6, 0)],
)
@pytest.mark.parametrize("longer", [0, 4])
def test_one_request_finds_what_one_of_many_does(begin: int, end: int, window: int, longer: int) -> None:
    indptr = torch.tensor([begin, end], dtype=torch.int32, device="cpu")
    form = {"SHORTEST": 64, "FEW_PARTS": 8, "WINDOW": window > 0, "LONGER": longer}
    found = [torch.zeros(21, 4, dtype=torch.int32, device="cpu") for _ in range(2)]
    for one in range(2):
        found_kernel[(21,)](indptr, found[one], 100_000, window, **form, ONE=bool(one))
    assert torch.equal(*found)


def _some_long(bs: int) -> torch.Tensor:
    """Some long, some empty, some that end before they begin."""
    g = torch.Generator().manual_seed(bs)
    lengths = torch.randint(0, 40, (bs,), generator=g)
    lengths[torch.randint(0, bs, (1 + bs // 6,), generator=g)] = 700
    lengths[bs // 2] = -5 if bs > 2 else 300
    return lengths


BATCHES = {
    **{f"{bs}-some-long": _some_long(bs) for bs in (1, 2, 7, 16, 17, 40)},
    "alike": torch.full((14,), 100),
    "all-long": torch.full((5,), 200),
    "all-short": torch.full((40,), 3),
}
MORE_PARTS = {
    "more-parts-than-programs": torch.tensor([1, 1, *[100] * 6, 2, *[100] * 5, 0, 1]),
    "the-same-of-more-than-at-once": torch.tensor([1, 1, *[100] * 6, 2, *[100] * 5, *[0] * 8, 1]),
}
BATCHES |= MORE_PARTS


@pytest.mark.skipif(not INTERPRETED or CUDA, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize("batch", BATCHES)
def test_each_part_has_one_program(batch: str, window: int) -> None:
    """By one look at all requests, and by more; and parts of requests that have several come first, where they fit."""
    lengths = BATCHES[batch]
    bs = len(lengths)
    indptr = torch.cat([torch.tensor([9]), 9 + lengths.cumsum(0)]).int()
    programs = 12
    found = torch.zeros(bs + programs, 4, dtype=torch.int32, device="cpu")
    parts_kernel[(bs + programs,)](indptr, found, int(indptr.max()), bs, programs, window, WINDOW=window > 0)
    seen = [min(n, window + 1) if window else n for n in lengths.clamp(0).tolist()]
    chunk = int(found[0, 0])
    assert (found[:, 0] == chunk).all()
    parts = [max(1, -(-n // chunk)) for n in seen]
    want = {(r, sum(parts[:r]), sum(parts[:r]) + i) for r, many in enumerate(parts) for i in range(many)}
    # Where a request is one part, nobody asks how many are before it: any number is as good as another.
    alone = {r for r, many in enumerate(parts) if many == 1}
    some = [tuple(row[1:]) for row in found.tolist() if row[1] < bs]
    assert len(some) == len(want)
    assert {row for row in some if row[0] not in alone} == {row for row in want if row[0] not in alone}
    assert [row[0] for row in some if row[0] in alone] == sorted(alone)
    assert all(before == part for r, before, part in some if r in alone)
    split = sum(many for many in parts if many > 1)
    if batch in MORE_PARTS:
        assert window or split > programs
    if split <= programs:
        assert not {r for r, _, _ in some[:split]} & alone


@pytest.mark.skipif(not INTERPRETED or CUDA, reason="needs TRITON_INTERPRET=1")
def test_few_parts_are_shorter_than_many() -> None:
    """64 keys each while that is no more than 8 parts; then more, up to 128; then as many parts as programs."""

    def keys_of_a_part(keys: int) -> int:
        indptr = torch.tensor([0, keys], dtype=torch.int32, device="cpu")
        found = torch.zeros(1, 4, dtype=torch.int32, device="cpu")
        form = {"SHORTEST": 64, "FEW_PARTS": 8, "WINDOW": False, "LONGER": 0}
        found_kernel[(1,)](indptr, found, keys, 0, **form, ONE=True)
        return int(found[0, 0])

    assert [keys_of_a_part(n) for n in (100, 512, 768, 1024, 2048, 20 * 200)] == [64, 64, 96, 128, 128, 200]


@pytest.mark.skipif(not CUDA or INTERPRETED, reason="needs a CUDA device")
def test_graphs_have_counters_of_their_own() -> None:
    from hal.backends.cuda import decode_attention as module

    args = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in get_spec("decode_attention").make(**{**LONG, "head_dim": 128}).items()
    }
    want = module.decode_attention(**{**args, "out": None, "lse": None})
    graphs, outs, streams = [], [], [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        out, graph = torch.zeros_like(want), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):
                module.decode_attention(**{**args, "out": out, "lse": None})
        graphs.append(graph)
        outs.append(out)
    assert len({t.data_ptr() for t in module._plans._captured.values()}) >= 3
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = module.decode_attention(**{**args, "out": None, "lse": None})
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for out in (*outs, eager))
        for out in outs:
            out.zero_()
    assert not any(bool(t.any()) for t in module._plans._captured.values())
