"""Calls of a layout that was there before: started by compiled code, right, and only where nothing else differs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cpu.cases import ours
from torch import Tensor

from hal._errors import ArgumentError
from hal._remote.target import DirectTarget
from hal.backends.cpu import (
    _again,
    _blocks,
    _online,
    _pool,
    decode_attention,
    kv_write,
    mla_kv_write,
    mla_rope_kv_write,
    qk_norm_rope_kv_write,
    rope_kv_write,
)
from hal.conformance.execute import execute
from hal.ops import get_spec

OPS = (
    "decode_attention", "extend_attention", "rope_kv_write", "qk_norm_rope_kv_write", "kv_write", "mla_kv_write",
    "mla_rope_kv_write",
)  # fmt: skip
DECODE = {"bs": 3, "longest": 40, "lengths": "full", "q_heads": 4, "kv_heads": 2, "dtype": "bf16"}

pytestmark = pytest.mark.skipif(not _again.reader(), reason="this torch has no exchange interface of DLPack")


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for each call that goes the long way."""
    found: list[str] = []

    def noted(kernel: Any, *args: Any, **options: Any) -> None:
        found.append(kernel.fn.__module__.rpartition(".")[2])
        _pool.run(kernel, *args, **options)

    for module in (
        _online, _blocks, rope_kv_write, qk_norm_rope_kv_write, kv_write, mla_kv_write, mla_rope_kv_write
    ):  # fmt: skip
        monkeypatch.setattr(module, "run", noted)
    return found


def right(op: str, call: Callable[..., Any], arguments: dict[str, Any]) -> None:
    execute(get_spec(op), arguments, DirectTarget.of(op, call))


@pytest.mark.parametrize("op", OPS)
def test_it_is_started_again_and_right(op: str, new: list[str]) -> None:
    """Each sample twice: the second time with other numbers, in other memory."""
    some = [s for s in get_spec(op).samples if not s.large and "seed" not in s.params][:12]
    same = {"lengths": "full"} if op in ("decode_attention", "extend_attention") else {}  # else the seed decides sizes
    again = 0
    for sample in some:
        call = ours(op)
        right(op, call, get_spec(op).make(**{**sample.params, **same}))
        before = len(new)
        right(op, call, get_spec(op).make(**{**sample.params, **same}, seed=5))
        again += len(new) == before > 0
    assert again >= len(some) // 3, new


def _decode(**options: Any) -> dict[str, Any]:
    return get_spec("decode_attention").make(**{**DECODE, **options})


def _extend(**options: Any) -> dict[str, Any]:
    return get_spec("extend_attention").make(bs=2, longest=9, lengths="full", prefix=20, dtype="fp32", **options)


def _wider(a: dict[str, Any]) -> dict[str, Any]:
    """The same numbers, in rows that are further apart."""
    wide = torch.zeros(*a["q"].shape[:2], a["q"].shape[2] + 8, dtype=a["q"].dtype)
    wide[..., : a["q"].shape[2]] = a["q"]
    return {**a, "q": wide[..., : a["q"].shape[2]]}


def _long(name: str, a: dict[str, Any]) -> dict[str, Any]:
    return {**a, name: a[name].long()}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (_decode, lambda: _decode(dtype="fp32")),
        (_decode, lambda: _decode(bs=2)),
        (_decode, lambda: _decode(longest=80)),
        (_decode, lambda: _wider(_decode())),
        (_decode, lambda: _long("kv_indices", _decode())),
        (_decode, lambda: _long("kv_indptr", _decode())),
        (_decode, lambda: {**_decode(), "scale": 0.5}),
        (_decode, lambda: {**_decode(), "sliding_window": 7}),
        (lambda: _decode(lse=False), lambda: _decode(lse=True)),
        (lambda: _decode(lse=True), lambda: _decode(lse=False)),
        (lambda: {**(a := _decode()), "v_cache": a["k_cache"]}, _decode),
        (_extend, lambda: {**_extend(), "causal": False}),
        (_extend, lambda: {**(a := _extend()), "qo_indptr": a["qo_indptr"] - torch.tensor([0, 1, 0]).int()}),
        (_extend, lambda: {**(a := _extend()), "kv_indptr": a["kv_indptr"] - torch.tensor([0, 1, 0]).int()}),
    ],
    ids=(
        "dtype bs longest strides int64-slots int64-indptr scale window lse no-lse k-is-v causal new-tokens keys"
    ).split(),
)
def test_what_makes_a_call_new(
    first: Callable[[], dict[str, Any]], second: Callable[[], dict[str, Any]], new: list[str]
) -> None:
    op = "extend_attention" if "qo_indptr" in second() else "decode_attention"
    call = ours(op)
    a, b = first(), second()
    call(**a)
    before = len(new)
    found = call(**b).clone()
    assert len(new) > before
    assert torch.equal(ours(op)(**b), found)
    right(op, ours(op), b)


def test_another_number_of_threads_makes_it_new(new: list[str]) -> None:
    call, a, before = ours("decode_attention"), _decode(), torch.get_num_threads()
    call(**a)
    torch.set_num_threads(before + 1)
    try:
        call(**a)
    finally:
        torch.set_num_threads(before)
    assert len(new) == 2
    call(**a)
    assert len(new) == 2


def test_a_step_that_is_one_token_longer_is_no_new_call(new: list[str]) -> None:
    """Or the first layer of every step would go the long way; what is done is as if it were the only call."""
    call = ours("decode_attention")
    for longest in (33, 34, 35, 36):
        a = _decode(bs=1, longest=longest)
        found = call(**a).clone()
        right("decode_attention", call, a)
        assert len(new) == 1
        _again.forget()
        assert torch.equal(call(**a), found)
        new.pop()


def test_the_oldest_is_forgotten(new: list[str]) -> None:
    call = ours("decode_attention")
    calls = [_decode(bs=bs) for bs in range(1, _again.ENTRIES + 2)]
    for a in calls:
        call(**a)
    new.clear()
    for a in calls[1:]:
        call(**a)
    assert not new
    call(**calls[0])
    assert new


def test_a_tensor_elsewhere_is_refused_as_ever() -> None:
    call, a = ours("decode_attention"), _decode()
    call(**a)
    for name in ("q", "k_cache", "kv_indices", "out"):
        with pytest.raises(ArgumentError, match="expected CPU tensors"):
            call(**{**a, "out": torch.empty_like(a["q"]), name: a["q" if name == "out" else name].to("meta")})


def test_a_tensor_of_no_memory_is_no_known_call() -> None:
    """Of a tracer's tensors torch says their sizes, and that they lie in memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    call, a = ours("decode_attention"), {**_decode(lse=False), "out": torch.empty(3, 4, 64, dtype=torch.bfloat16)}
    call(**a)
    tensors = tuple(a[n] for n in ("q", "k_cache", "v_cache", "kv_indptr", "kv_indices", "out", "lse"))
    numbers = a["scale"], a["sliding_window"], a["logit_cap"]
    assert decode_attention.calls.start(tensors, numbers, grows=4) is None
    with FakeTensorMode() as mode:
        fake = tuple(mode.from_tensor(t) if isinstance(t, Tensor) else t for t in tensors)
        assert decode_attention.calls.start(fake, numbers, grows=4) is not None


def test_without_torchs_interface_every_call_goes_the_long_way(monkeypatch: pytest.MonkeyPatch, new: list[str]) -> None:
    monkeypatch.setattr(_again, "reader", lambda: 0)
    memo = _again.Memo()
    monkeypatch.setattr("hal.backends.cpu.decode_attention.calls", memo)
    call, a = ours("decode_attention"), _decode()
    for _ in range(2):
        right("decode_attention", call, a)
    assert len(new) >= 2
    assert not any(memo.memory)


def test_threads_of_python_that_call_at_once() -> None:
    """They share what is remembered, and neither memory to work in nor keys that are split."""
    call, before = ours("decode_attention"), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        calls = [_decode(bs=1, longest=1500, slots=1600, q_heads=3, kv_heads=1, seed=seed) for seed in range(4)]
        wanted = [call(**a).clone() for a in calls]
        same: list[bool] = []

        def many(a: dict[str, Any], want: Tensor) -> None:
            same.extend(torch.equal(call(**{**a, "out": torch.empty_like(want)}), want) for _ in range(300))

        threads = [threading.Thread(target=many, args=given) for given in zip(calls, wanted, strict=True)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        torch.set_num_threads(before)
    assert same == [True] * 1200


def test_a_kernel_without_memory_says_so() -> None:
    call, a = ours("decode_attention"), _decode()
    call(**a)
    failing = _pool.Kernel(_fails, "i64 int int", shared=True)
    memo = decode_attention.calls
    caller, _ = failing.block((), (0, 0, 0))
    entry = memo.next * _again.ENTRY
    memo.memory[entry + _again.CALLER] = caller
    memo.memory[entry + _again.GIVEN] = failing.block((), (0, 0, 0))[1][0]
    with pytest.raises(MemoryError):
        call(**a)
    _again.forget()


def _fails(counter, grain, n):  # type: ignore[no-untyped-def]
    raise MemoryError


def test_a_child_has_none_of_its_parents_calls() -> None:
    call, a = ours("decode_attention"), _decode()
    call(**a)
    memo = decode_attention.calls
    assert any(memo.memory[i * _again.ENTRY + _again.LENGTH] for i in range(_again.ENTRIES))
    pid = os.fork()
    if not pid:
        os._exit(any(memo.memory[i * _again.ENTRY + _again.LENGTH] for i in range(_again.ENTRIES)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
