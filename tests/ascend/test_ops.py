"""The four ops, lowered, on every sample of their contracts, against float64 truth and bit for bit around it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

import hal
from hal import lowered
from hal.kvpool import KVPool
from hal.ops import BUILTIN, spec
from hal.ops._judge import Want, right_any, same_bits
from hal.ops.kv_transfer import stacked

SAMPLES = [(op, s) for op in BUILTIN for s in spec(op).samples]


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
    contract = spec(op)
    args = contract.make(seed=3, **sample.params)
    why = import_module(f"hal.backends.ascend.{op}").supports(contract.sign(args))
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


@pytest.mark.parametrize("op", BUILTIN)
@pytest.mark.parametrize("seed", range(6))
def test_ragged(op: str, seed: int) -> None:
    """Shapes drawn from the op's own ranges."""
    contract = spec(op)
    g = torch.Generator().manual_seed(seed)

    def draw(choices: Any) -> Any:
        if isinstance(choices, tuple) and len(choices) == 2 and all(isinstance(c, int) for c in choices):
            return int(torch.randint(choices[0], choices[1] + 1, (), generator=g))
        return choices[int(torch.randint(0, len(choices), (), generator=g))]

    args = contract.make(seed=seed, **{name: draw(c) for name, c in contract.ragged.items()})
    before, want = snapshot(args), contract.oracle(args)
    judge(op, args, want, before, run(op, args))


@pytest.mark.parametrize("op", BUILTIN)
def test_by_name_through_hal(op: str) -> None:
    contract = spec(op)
    args = contract.make(seed=5, **contract.samples[0].params)
    before, want = snapshot(args), contract.oracle(args)
    with lowered.recording() as launches:
        result = getattr(hal, op)(**args, backend="ascend")
    assert launches, "the kernel did not run"
    judge(op, args, want, before, result)


@pytest.mark.parametrize("op", BUILTIN)
def test_untraced_gives_the_same_bits(op: str) -> None:
    contract = spec(op)
    traced, untraced = (contract.make(seed=6, **contract.samples[0].params) for _ in range(2))
    a = run(op, traced)
    with lowered.untraced():
        b = run(op, untraced)
    if op == "kv_transfer":
        for half in ("k", "v"):
            assert bool(same_bits(getattr(traced["dst"], half), getattr(untraced["dst"], half)).all())
    elif op == "rope_kv_write":
        for name in contract.mutated:
            assert torch.equal(traced[name], untraced[name]), name
    else:
        assert torch.equal(a, b)


LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


@pytest.mark.parametrize("out", [True, False], ids=["to-host", "from-host"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "list"])
@pytest.mark.parametrize("order", ["random", "runs", "pages"])
def test_between_device_and_host(out: bool, layout: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The route of an NPU: packed by the kernel, copied in pieces. The copies are the CPU's stand-in here."""
    from hal.backends.ascend import _runtime

    # A few tokens at a time, so that a transfer is of several pieces and cuts through pages.
    monkeypatch.setattr(_runtime, "STAGING_BYTES", 4096)
    contract = spec("kv_transfer")
    here, there = ("layer_first", layout) if out else (layout, "layer_first")
    args = contract.make(
        seed=2, n=26, src=here, dst=there, order=order, layers=(1, 3), values="skip", method="direct"
    )
    before, want = snapshot(args), contract.oracle(args)
    copied = []
    copy = _runtime._copy
    monkeypatch.setattr(
        _runtime, "_copy", lambda to, source: (copied.append(to.numel()), copy(to, source))[1]
    )
    monkeypatch.setattr(_runtime, "host_is_dst", lambda src, dst: out)
    with lowered.recording() as launches:
        run("kv_transfer", args)
    assert launches
    assert copied
    judge("kv_transfer", args, want, before, None)


def test_consecutive_host_slots_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    from hal.backends.ascend import _runtime

    k = torch.randn(2, 64, 2, 16)
    pool = KVPool(k, torch.randn_like(k), layout="layer_first")
    host = KVPool.host_like(pool, slots=64)
    copies = []
    monkeypatch.setattr(_runtime, "_copy", lambda to, source: copies.append(to.copy_(source).shape))
    order = torch.randperm(64)[:40]
    hal.kv_transfer(pool, host, order, torch.arange(8, 48), method="direct", backend="ascend")
    assert len(copies) == 2  # one for k, one for v
    assert torch.equal(host.k[8:48].transpose(0, 1), k[:, order])


def test_dma_does_not_depend_on_the_page_size() -> None:
    counts = set()
    for page in (1, 16, 64):
        args = spec("kv_transfer").make(
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
        args = spec("assign_extend_cache_locs").make(**params)
        needed = 4 * int((args["end_offsets"] - args["start_offsets"]).clamp(min=0).sum())
        with lowered.recording() as launches:
            run("assign_extend_cache_locs", args)
        moved.append((launches[0].traffic["table"].bytes_read, needed))
    assert all(read == needed for read, needed in moved)
