"""`OpSpec`: signatures, the soundness of keys, and what a contract must not be."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import hal
from hal.ops import BUILTIN, _native, get_spec
from hal.ops._key import KEY_NAMES, key_source
from hal.ops._signature import stride_class
from hal.ops.proofs.inputs import floats, generator, odd_indices
from hal.ops.proofs.judge import Candidate, Want
from hal.ops.spec import _LATER, INDEX, OpSpec, Proof, Sample, ScaleArg, Signature, TensorArg, TensorSig, ValueArg

pytestmark = pytest.mark.usefixtures("fresh")
SPECS = [get_spec(name) for name in BUILTIN]


# --- signature and key ------------------------------------------------------------------------------


def key_of(op: OpSpec, values: Mapping[str, Any]) -> Any:
    return eval(op.key_source(), dict(KEY_NAMES), dict(values))


def variations(op: OpSpec) -> Iterator[dict[str, Any]]:
    for sample in op.samples:
        if not sample.large:
            yield op.make(**sample.params)
    # Every tensor, alone, in every other guise that a view can have; odd ones have no key, or one of their own.
    for name, arg in op.args.items():
        base = op.make()
        value = base[name]
        if isinstance(arg, TensorArg) and isinstance(value, Tensor):
            wide = torch.cat([value, value], dim=-1)
            shifted = torch.cat([value.reshape(-1)[:1], value.reshape(-1)])[1:].view(value.shape)
            for other in (
                wide[..., : value.shape[-1]],
                wide[..., ::2],
                shifted,
                value[:1].expand(value.shape),
                value[:0],
                value.to("meta"),
                torch.cat([value, value]),
                value[..., :1],
                value.unsqueeze(0),
                wide[:1, ..., ::2].expand(value.shape) if value.ndim > 1 else value,
            ):
                yield {**base, name: other}
        elif isinstance(arg, ScaleArg):
            for other in (
                0.5,
                2,
                0.0,
                True,
                torch.ones(1),
                torch.ones(()),
                torch.ones(1, 1),
                torch.ones(2)[1:],
                torch.ones(2),
            ):
                yield {**base, name: other}
        elif isinstance(arg, ValueArg):
            for other in (*arg.choices, 1, 0, 1.0, range(2), range(1, 2), None, "other"):
                yield {**base, name: other}


@pytest.mark.parametrize("op", SPECS, ids=lambda s: s.name)
def test_key_decides_signature_and_refusal(op: OpSpec) -> None:
    """Two calls with one key are one to selection, and one to the checks but for sizes and values."""
    seen: dict[Any, tuple[Any, ...]] = {}
    kinds = 0
    for values in variations(op):
        try:
            key = key_of(op, values)
            hash(key)
        except Exception:
            continue
        try:
            sig = op.sign(values)
            found: tuple[Any, ...] = (dict(sig), sig.dims, sig.device, sig.index)
        except hal.ArgumentError as e:
            found = (str(e),)
        judged = op.check_sizes is None and not eval_sizes(op, values)
        if judged:
            try:
                op.check_call(values)
                found = (*found, True)
            except hal.ArgumentError as e:
                found = (*found, e.argument)
        known = seen.setdefault((key, judged), found)
        assert known == found, key
        kinds += 1
    assert kinds > len(seen) > 5


@pytest.mark.parametrize("op", SPECS, ids=lambda s: s.name)
def test_calls_that_are_signed_alike_have_one_key(op: OpSpec) -> None:
    """What C reads tells apart all that Python does, and says that sizes agree."""
    sign = signer(op)
    read = {n: a for n, a in op.args.items() if _native.readable(a)}
    seen: dict[Any, Any] = {}
    for values in variations(op):
        signed = sign(*(values[n] for n in read))
        if signed is not None:
            assert not eval_sizes(op, values)
            key = eval(key_source(read, op.static), dict(KEY_NAMES), dict(values))
            assert seen.setdefault(signed, key) == key
    assert len(seen) > 1 or op.sizes_source() == "True"


def signer(op: OpSpec) -> Any:
    if _native._module() is None:
        pytest.skip("no C compiler, or a torch without the DLPack exchange interface")
    return _native.signer(op.args, op.static)


class Mine(Tensor):
    pass


def test_what_is_not_plain_is_not_signed() -> None:
    """Those are told apart by Python, each by what it is."""
    op = get_spec("get_last_loc")
    table, one = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    sign = signer(op)
    assert sign(table, one, one)
    two, far = torch.zeros(2, dtype=torch.int64), table.to("meta")
    for args in (
        (table, two, one),
        (table, one),
        (table, one, None),
        (table, one, 3),
        (far, one, one),
        (table.as_subclass(Mine), one, one),
        (table[:0], one, one),
        (table.expand(2, 2, 8)[0].T, one, one),
        (table[:1].expand(2, 8), one, one),
    ):
        assert sign(*args) is None
    assert torch.func.vmap(lambda t: one.new_tensor(sign(table, t, t) is None))(one[:, None]).item()

    op = get_spec("rope_kv_write")
    values = op.make()
    names = list(op.args)
    sign = signer(op)
    assert sign(*map(values.get, names))
    q = values["q"]
    imaginary = torch.zeros(*q.shape, dtype=torch.complex64).conj().imag
    assert imaginary.is_neg()
    for other in (q.float().requires_grad_(), imaginary):
        assert sign(*map({**values, "q": other}.get, names)) is None
    with torch.no_grad():
        assert sign(*map({**values, "q": q.clone().requires_grad_()}.get, names))
    with torch.autograd.forward_ad.dual_level():
        assert sign(*map(values.get, names)) is None
    traced: list[Any] = []

    def trace(x: Tensor) -> Tensor:
        traced.append(sign(*map(values.get, names)))
        return x + 1

    torch.jit.trace(trace, (torch.zeros(1),), check_trace=False)
    assert traced == [None]


def test_without_a_compiler_python_makes_every_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path))
    for cached in ("module", "_module"):
        monkeypatch.setattr(_native, cached, getattr(_native, cached).__wrapped__)
    op = get_spec("get_last_loc")
    assert _native.signer(op.args, op.static) is _native._unsigned


def eval_sizes(op: OpSpec, values: Mapping[str, Any]) -> bool:
    return bool(eval(op.sizes_source(), {}, dict(values)))


def sizes_of(op: OpSpec, params: Mapping[str, Any]) -> Any:
    return key_of(op, op.make(**params))


def test_no_batch_size_in_a_key() -> None:
    last, assign, rope, move, *_ = SPECS
    assert sizes_of(last, {"bs": 5}) == sizes_of(last, {"bs": 77, "requests": 30, "width": 9})
    assert sizes_of(assign, {"bs": 5}) == sizes_of(assign, {"bs": 77, "requests": 30, "slack": 9})
    assert sizes_of(rope, {"n": 5}) == sizes_of(rope, {"n": 9, "slots": 64, "max_positions": 99})
    assert sizes_of(rope, {"n": 5, "cache": "paged"}) == sizes_of(rope, {"n": 9, "cache": "paged", "slots": 64})
    assert sizes_of(rope, {"head_dim": 64}) != sizes_of(rope, {"head_dim": 128})
    assert sizes_of(move, {"n": 5}) == sizes_of(move, {"n": 9, "src_slots": 64, "dst_slots": 64})
    assert sizes_of(move, {"src": "list"}) != sizes_of(move, {"src": "layer_first"})


def test_signature_shows_sizes_but_is_equal_without() -> None:
    rope = get_spec("rope_kv_write")
    a, b = rope.sign(rope.make(n=3)), rope.sign(rope.make(n=4))
    assert a == b
    assert str(a) != str(b)
    assert "q=bf16[3,4,64]@cpu" in repr(a)
    assert a["q"].ndim == len(a["q"].shape) == 3
    assert a["q"].shape == (None, 4, 64)
    assert len(a) == len(rope.args)
    assert str(TensorSig(torch.float16, "cuda", (None,), "contiguous", True, 1, (7,))) == "fp16[7]@cuda:1"
    move = get_spec("kv_transfer")
    assert "src=KVPool(layer_first,bf16[2x16]@cpu)" in str(move.sign(move.make()))
    assert isinstance(a, Signature)


def test_stride_classes() -> None:
    t = torch.zeros(4, 6, 8)
    assert stride_class(t[..., :4]) == "inner"
    assert stride_class(t[..., ::2]) == "strided"
    assert stride_class(t[:1].expand(4, 6, 8)) == "overlapping"
    assert stride_class(t[:1].expand(4, 6, 8)[..., ::2]) == "strided overlapping"
    assert stride_class(t[..., ::8]) == "inner"


def test_two_accelerators_are_an_error() -> None:
    """meta stands in for the second device: it is no CPU, and this machine has it."""
    last = get_spec("get_last_loc")
    args = last.make()

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda:1")  # type: ignore[assignment]

    odd = args["prefix_lens"].as_subclass(Elsewhere)
    with pytest.raises(hal.ArgumentError, match="prefix_lens: expected a tensor on meta, like req_pool_indices") as e:
        last.sign({**args, "req_pool_indices": args["req_pool_indices"].to("meta"), "prefix_lens": odd})
    assert e.value.argument == "prefix_lens"
    with pytest.raises(hal.ArgumentError, match="the call's device") as e:
        last.check_call({**args, "prefix_lens": odd})
    assert e.value.argument == "req_to_token"


# --- OpSpec itself ----------------------------------------------------------------------------------


def doubled(x: Tensor, y: Tensor | None = None, *, table: int = 0) -> Tensor:
    """Twice x."""
    return x * 2


def made(**change: Any) -> OpSpec:
    given: dict[str, Any] = {
        "reference": doubled,
        "args": {
            "x": TensorArg("a b", (torch.float32,)),
            "y": TensorArg("b a | c b a", (torch.float32,), optional=True),
            "table": ValueArg((0, 1)),
        },
        "oracle": lambda a: {"return": Want(torch.ones_like(a["x"], dtype=torch.bool), (Candidate(a["x"] * 2),))},
        "make": lambda seed=0: {"x": torch.ones(2, 3), "y": None, "table": 0},
        "samples": (Sample("one"), Sample("two", tag="feature:more")),
        **change,
    }
    return OpSpec(**given)


def test_spec_refuses_what_does_not_fit() -> None:
    with pytest.raises(TypeError, match="are not the signature's"):
        made(args={"x": TensorArg("n", INDEX)})
    with pytest.raises(TypeError, match="one name"):
        made(samples=(Sample("one"), Sample("one")))

    def hidden(_x: Tensor) -> Tensor:
        return _x

    def chosen(backend: Tensor) -> Tensor:
        return backend

    for fn, name in ((hidden, "_x"), (chosen, "backend")):
        with pytest.raises(TypeError, match="hal's own names"):
            made(reference=fn, args={name: TensorArg("n", INDEX)})


def test_a_proof_is_the_contract_s_own_or_read_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    direct = made()
    proof = Proof(direct.oracle, direct.make, direct.samples)
    monkeypatch.setitem(sys.modules, "a_proof", SimpleNamespace(PROOF=proof))
    none = {"oracle": _LATER, "make": _LATER, "samples": _LATER}
    for where in (proof, "a_proof"):
        op = made(**none, proof=where)
        assert (op.oracle, op.make, op.samples) == (direct.oracle, direct.make, direct.samples)
        assert (op.errors, op.ragged, op.fresh, op.features) == ((), {}, None, ("more",))
    one = replace(made(**none, proof="a_proof"), samples=proof.samples[:1])
    assert (one.samples, one.make) == (proof.samples[:1], direct.make)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'make'"):
        made(make=_LATER)
    later = made(**none, proof="no_such_proof")
    with pytest.raises(ModuleNotFoundError, match="no_such_proof"):
        _ = later.make
    with pytest.raises(AttributeError, match="'OpSpec' object has no attribute 'sample'"):
        _ = later.sample  # type: ignore[attr-defined]
    assert copy(direct).samples == direct.samples


def test_spec_properties() -> None:
    op = made()
    assert (op.name, op.doc, op.features, op.mutated) == ("doubled", "Twice x.", ("more",), ())
    assert get_spec("rope_kv_write").mutated == ("q", "k", "k_cache", "v_cache")
    with pytest.raises(TypeError, match=r"doubled\(\) missing"):
        op.bind()
    assert op.bind(1)["table"] == 0


def test_sizes_that_stand_in_no_one_place_are_checked_whole() -> None:
    assert made().sizes_source() == "True"
    one = made(
        args={
            "x": TensorArg("a b", (torch.float32,)),
            "y": TensorArg("b a", (torch.float32,), optional=True),
            "table": ValueArg((0, 1)),
        }
    )
    x, y = torch.ones(2, 3), torch.ones(3, 2)
    assert not eval_sizes(one, {"x": x, "y": y, "table": 0})
    assert not eval_sizes(one, {"x": x, "y": None, "table": 0})
    assert eval_sizes(one, {"x": x, "y": torch.ones(3, 3), "table": 0})
    assert eval_sizes(one, {"x": x, "y": torch.ones(2, 2), "table": 0})
    alone = made(
        args={
            "x": TensorArg("a b", (torch.float32,)),
            "y": TensorArg("c d", (torch.float32,), optional=True),
            "table": ValueArg((0, 1)),
        }
    )
    assert alone.sizes_source() == "False"


def test_unknown_kind_of_indices() -> None:
    with pytest.raises(ValueError, match="kind of indices"):
        odd_indices(torch.zeros(2), 2, "funny", torch.int32)
    assert floats(generator(0), (0,), torch.float32, specials=True).numel() == 0


def test_unknown_builtin() -> None:
    with pytest.raises(KeyError):
        get_spec("get_lost_loc")
