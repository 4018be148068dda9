"""Each op, lowered, on every sample of their contracts, against float64 truth and bit for bit around it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

import hal
from hal import lowered
from hal.backends.ascend import hal_backend
from hal.kv.pool import KVPool
from hal.ops import get_spec
from hal.ops.kv_transfer import stacked
from hal.ops.proofs.judge import Want, right_any, same_bits

OPS = list(hal_backend().ops)
SAMPLES = [(op, s) for op in OPS for s in get_spec(op).samples]


def judge(op: str, args: dict[str, Any], want: dict[str, Want], before: dict[str, Any], result: Any) -> None:
    """Every named element right, every other bytewise as it was."""
    for name, w in want.items():
        if w.fields:
            for half, wanted in w.fields.items():
                out = stacked(getattr(args[name], half))
                assert bool(right_any(out, wanted).all()), f"{op}: {name}.{half}"
                assert bool((same_bits(out, before[f"{name}.{half}"]) | wanted.named).all()), (
                    f"{op}: {name}.{half} outside"
                )
            continue
        out = result if name == "return" else args[name]
        assert bool(right_any(out, w).all()), f"{op}: {name}"
        if name != "return":
            assert bool((same_bits(out, before[name]) | w.named).all()), (
                f"{op}: {name} outside what the contract names"
            )


def snapshot(args: dict[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in args.items():
        if isinstance(value, torch.Tensor):
            kept[name] = value.clone()
        elif isinstance(value, KVPool):
            for half in ("k", "v"):
                if getattr(value, half) is not None:
                    kept[f"{name}.{half}"] = stacked(getattr(value, half)).clone()
    return kept


def run(op: str, args: dict[str, Any]) -> Any:
    return getattr(import_module(f"hal.backends.ascend.{op}"), op)(**args)


@pytest.mark.parametrize(("op", "sample"), SAMPLES, ids=[f"{op}-{s.name}" for op, s in SAMPLES])
def test_sample(op: str, sample: Any) -> None:
    contract = get_spec(op)
    args = contract.make(seed=3, **sample.params)
    supports = getattr(import_module(f"hal.backends.ascend.{op}"), "supports", None)
    why = supports(contract.sign(args)) if supports else None
    if why is not None:
        assert sample.tag != "required", why
        assert why.split(":")[0] in ("fp8", "head_dim", "device_slots")
        with pytest.raises(hal.NoBackendError, match=why.split(":")[0]):
            getattr(hal, op)(**args, backend="ascend")
        return
    # What is not tensors of gigabytes is compared whole.
    before = {} if sample.large else snapshot(args)
    want = contract.oracle(args)
    result = run(op, args)
    if sample.large:
        # The bytes between far rows are no tensor's, and the tracer has seen that none was touched.
        before = {n: args[n] for n in want if n != "return" and not want[n].fields}
        before |= {f"{n}.{h}": stacked(getattr(args[n], h)) for n in want for h in want[n].fields}
    judge(op, args, want, before, result)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("seed", range(6))
def test_ragged(op: str, seed: int) -> None:
    """Shapes drawn from the op's own ranges."""
    contract = get_spec(op)
    g = torch.Generator().manual_seed(seed)

    def draw(choices: Any) -> Any:
        if isinstance(choices, tuple) and len(choices) == 2 and all(type(c) is int for c in choices):
            return int(torch.randint(choices[0], choices[1] + 1, (), generator=g))
        return choices[int(torch.randint(0, len(choices), (), generator=g))]

    args = contract.make(seed=seed, **{name: draw(c) for name, c in contract.ragged.items()})
    before, want = snapshot(args), contract.oracle(args)
    judge(op, args, want, before, run(op, args))


@pytest.mark.parametrize("op", OPS)
def test_by_name_through_hal(op: str) -> None:
    contract = get_spec(op)
    args = contract.make(seed=5, **contract.samples[0].params)
    before, want = snapshot(args), contract.oracle(args)
    with lowered.recording() as launches:
        result = getattr(hal, op)(**args, backend="ascend")
    assert launches, "the kernel did not run"
    judge(op, args, want, before, result)


@pytest.mark.parametrize("op", OPS)
def test_untraced_gives_the_same_bits(op: str) -> None:
    contract = get_spec(op)
    traced, untraced = (contract.make(seed=6, **contract.samples[0].params) for _ in range(2))
    a = run(op, traced)
    with lowered.untraced():
        b = run(op, untraced)
    for name in (n for n in contract.mutated if traced[n] is not None):
        for part in ("k", "v") if isinstance(traced[name], KVPool) else ("data",):
            assert bool(same_bits(getattr(traced[name], part), getattr(untraced[name], part)).all()), name
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)


def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The (destination, source) pairs of each call of the runtime's batch copy, as they are made."""
    seen: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    copy = torch._foreach_copy_

    def spy(to: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool) -> None:
        # What torch_npu doesn't look at: it copies numel() elements from data_ptr(), whatever the strides.
        for pair in zip(to, sources, strict=True):
            assert all(t.is_contiguous() for t in pair)
            assert pair[0].shape == pair[1].shape
        assert non_blocking
        seen.append(list(zip(to, sources, strict=True)))
        copy(to, sources, non_blocking)

    monkeypatch.setattr(torch, "_foreach_copy_", spy)
    return seen


LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


@pytest.mark.parametrize("out", [True, False], ids=["to-host", "from-host"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "list"])
@pytest.mark.parametrize("order", ["random", "runs", "pages"])
def test_between_device_and_host(out: bool, layout: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The route of an NPU: packed by the kernel, copied in pieces. The copies are the CPU's stand-in here."""
    from hal.backends.ascend import _runtime

    # A few tokens at a time, so that a transfer is of several pieces and cuts through pages.
    monkeypatch.setattr(_runtime, "STAGING_BYTES", 4096)
    contract = get_spec("kv_transfer")
    here, there = ("layer_first", layout) if out else (layout, "layer_first")
    args = contract.make(
        seed=2, n=26, src=here, dst=there, order=order, layers=(1, 3), values="skip", method="direct"
    )
    before, want = snapshot(args), contract.oracle(args)
    copied = batches(monkeypatch)
    monkeypatch.setattr(_runtime, "host_is_dst", lambda src, dst: out)
    with lowered.recording() as launches:
        run("kv_transfer", args)
    assert launches
    assert copied
    judge("kv_transfer", args, want, before, None)


def pools() -> tuple[KVPool, KVPool]:
    k = torch.randn(2, 64, 2, 16)
    pool = KVPool(k, torch.randn_like(k), layout="layer_first")
    return pool, KVPool.host_like(pool, slots=64)


def test_consecutive_host_slots_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, host = pools()
    seen = batches(monkeypatch)
    order = torch.randperm(64)[:40]
    hal.kv_transfer(pool, host, order, torch.arange(8, 48), method="direct", backend="ascend")
    assert [len(batch) for batch in seen] == [2]  # one for k, one for v
    assert torch.equal(host.k[8:48].transpose(0, 1), pool.k[:, order])


def test_scattered_host_slots_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the runtime's costs as much as a small copy: 20 runs of k and of v go in one."""
    pool, host = pools()
    seen = batches(monkeypatch)
    there = torch.arange(0, 60, 3)
    hal.kv_transfer(pool, host, torch.arange(20), there, method="direct", backend="ascend")
    assert [len(batch) for batch in seen] == [40]
    assert torch.equal(host.k[there].transpose(0, 1), pool.k[:, :20])


def test_a_batch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.backends.ascend import _runtime

    monkeypatch.setattr(_runtime, "BATCH", 16)
    pool, host = pools()
    seen = batches(monkeypatch)
    there = torch.arange(0, 60, 3)
    hal.kv_transfer(pool, host, torch.arange(20), there, method="direct", backend="ascend")
    assert [len(batch) for batch in seen] == [16, 16, 8]
    assert torch.equal(host.v[there].transpose(0, 1), pool.v[:, :20])


def test_dma_does_not_depend_on_the_page_size() -> None:
    counts = set()
    for page in (1, 16, 64):
        args = get_spec("kv_transfer").make(
            n=64, src_page=page, dst_page=page, src_slots=64, dst_slots=64, order="random"
        )
        with lowered.recording() as launches:
            run("kv_transfer", args)
        counts.add(sum(t.copies_in + t.copies_out for launch in launches for t in launch.traffic.values()))
    assert len(counts) == 1


def test_cost_is_linear_in_the_output() -> None:
    """Reads of the table do not grow with the skew: as many bytes as the output takes."""
    moved = []
    for params in ({"bs": 64, "longest": 60}, {"bs": 64, "longest": 4000, "skew": True, "width": 4000}):
        args = get_spec("assign_extend_cache_locs").make(**params)
        needed = 4 * int((args["end_offsets"] - args["start_offsets"]).clamp(min=0).sum())
        with lowered.recording() as launches:
            run("assign_extend_cache_locs", args)
        moved.append((launches[0].traffic["table"].bytes_read, needed))
    assert all(read == needed for read, needed in moved)
