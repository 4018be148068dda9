"""The contracts: reference against oracle on every sample, refusals, the bound, the soundness of keys."""

from __future__ import annotations

import ast
import bisect
import inspect
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hal
from hal.kv.pool import KVPool
from hal.ops import BUILTIN, get_spec
from hal.ops._key import KEY_NAMES
from hal.ops._signature import stride_class
from hal.ops.kv_transfer import stacked
from hal.ops.proofs.inputs import FLOAT_DTYPES, floats, generator, odd_indices
from hal.ops.proofs.judge import Candidate, Want, headroom, right, right_any, rounded, same_bits
from hal.ops.spec import (
    FLOATS,
    INDEX,
    ErrorSample,
    OpSpec,
    PoolArg,
    Sample,
    ScaleArg,
    Signature,
    TensorArg,
    TensorSig,
    ValueArg,
)
from hal.registry._dispatch import dispatcher

pytestmark = pytest.mark.usefixtures("fresh")
SPECS = [get_spec(name) for name in BUILTIN]
SAMPLES = [(s, x) for s in SPECS for x in s.samples if not x.large]
ERRORS = [(s, e) for s in SPECS for e in s.errors]


def ids(pair: tuple[OpSpec, Any]) -> str:
    return f"{pair[0].name}-{pair[1].name}"


def storages(args: Mapping[str, Any]) -> list[Tensor]:
    """The whole memory behind every tensor among the arguments, as bytes: what lies between strided rows too."""
    tensors: list[Tensor] = []
    for value in args.values():
        if isinstance(value, KVPool):
            for half in (value.k, value.v):
                tensors += half if isinstance(half, tuple) else [half] if half is not None else []
        elif isinstance(value, Tensor):
            tensors.append(value)
    return [torch.tensor([], dtype=torch.uint8).set_(t.untyped_storage()) for t in tensors]


def results(
    args: Mapping[str, Any], returned: Any, want: Mapping[str, Want]
) -> Iterator[tuple[str, Tensor, Want]]:
    for name, w in want.items():
        if w.fields:
            for half, inner in w.fields.items():
                yield f"{name}.{half}", stacked(getattr(args[name], half)), inner
        else:
            yield name, returned if name == "return" else args[name], w


@pytest.mark.parametrize("pair", SAMPLES, ids=ids)
def test_reference_on_sample(pair: tuple[OpSpec, Sample]) -> None:
    op, sample = pair
    args = op.make(**sample.params)
    want = op.oracle(args)
    names = [n for n, _, _ in results(args, None, {k: w for k, w in want.items() if k != "return"})]
    before = {
        n: t.clone() for n, t, _ in results(args, None, {k: w for k, w in want.items() if k != "return"})
    }
    memory = [s.clone() for s in storages(args)]
    owners = [t for n, t in flat(args) if n.split(".")[0] in op.mutated]
    returned = getattr(hal, op.name)(**args, backend="reference")
    changed = 0
    for name, got, w in results(args, returned, want):
        assert got.shape == w.named.shape, name
        wrong = ~right_any(got, w)
        assert not wrong.any(), (
            f"{name}: {int(wrong.sum())} wrong, the first at {wrong.nonzero()[0].tolist()}"
        )
        if name in before:
            touched = ~same_bits(got, before[name])
            assert not (touched & ~w.named).any(), f"{name}: touched where the contract names nothing"
            changed += int(touched.sum())
    assert set(names) == set(before)
    if "return" in want:
        assert returned is args["out"] if want["return"] is want.get("out") else isinstance(returned, Tensor)
    else:
        assert returned is None
    for (name, value), old, new in zip(flat(args), memory, storages(args), strict=True):
        if not shared(value, owners):
            assert torch.equal(old, new), f"{name} was written to"
    if sample.control:
        assert not changed, "a sample with a control is one that changes nothing"


def flat(args: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in args.items():
        if isinstance(value, KVPool):
            for x, half in (("k", value.k), ("v", value.v)):
                for t in half if isinstance(half, tuple) else [half] if half is not None else []:
                    yield f"{name}.{x}", t
        elif isinstance(value, Tensor):
            yield name, value


def shared(t: Tensor, others: list[Tensor]) -> bool:
    return any(t.untyped_storage().data_ptr() == o.untyped_storage().data_ptr() for o in others)


@pytest.mark.parametrize("op", SPECS, ids=lambda s: s.name)
def test_controls_change_something(op: OpSpec) -> None:
    for sample in op.samples:
        if sample.control:
            control = next(s for s in op.samples if s.name == sample.control)
            named = op.oracle(op.make(**control.params)).values()
            halves = [x for w in named for x in (w.fields.values() if w.fields else [w])]
            assert any(bool(w.named.any()) for w in halves), control.name


@pytest.mark.parametrize("way", ["dispatched", "bound"])
@pytest.mark.parametrize("pair", ERRORS, ids=ids)
def test_refusal(pair: tuple[OpSpec, ErrorSample], way: str) -> None:
    op, error = pair
    args = error.make()
    if way == "bound":
        call = getattr(hal.bind("cpu", backend="reference", checks="args"), op.name)
    else:
        hal.configure(backend="reference")
        call = getattr(hal, op.name)
    before = [s.clone() for s in storages(args)]
    with pytest.raises(hal.ArgumentError) as caught:
        call(**args)
    assert (caught.value.op, caught.value.argument) == (op.name, error.argument)
    assert caught.value.expected
    assert caught.value.got
    assert all(map(torch.equal, before, storages(args)))


@pytest.mark.parametrize("way", ["dispatched", "bound"])
@pytest.mark.parametrize("op", SPECS, ids=lambda s: s.name)
def test_refused_after_a_good_call_of_the_same_kind(op: OpSpec, way: str) -> None:
    """Sizes that disagree are no part of the key, so the cached path has to see them."""
    hal.configure(backend="reference")
    space = hal if way == "dispatched" else hal.bind("cpu", backend="reference", checks="args")
    call = getattr(space, op.name)
    for error in op.errors:
        call(**op.make())
        for _ in range(2):  # what was refused is not known the next time
            with pytest.raises(hal.ArgumentError) as caught:
                call(**error.make())
            assert caught.value.argument == error.argument


@pytest.mark.parametrize("op", SPECS, ids=lambda s: s.name)
def test_bound_checks_go_by_the_key(op: OpSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of a known kind is not checked whole again: that is what made it nine times a dispatched call."""
    call = getattr(hal.bind("cpu", backend="reference", checks="args"), op.name)
    call(**op.make())
    whole: list[str] = []
    monkeypatch.setattr(OpSpec, "check_call", lambda self, values: whole.append(self.name))
    call(**op.make(seed=1))
    assert not whole or op.sizes_source() == "True"
    floats = [a for a in op.args.values() if isinstance(a, TensorArg) and a.dtypes == FLOATS]
    if floats:
        call(**op.make(dtype="fp16"))
        assert whole, "another kind"


@pytest.mark.parametrize("op", SPECS, ids=lambda s: s.name)
def test_values_are_checked_only_when_asked(op: OpSpec) -> None:
    size = "n" if "n" in inspect.signature(op.make).parameters else "bs"
    odd = op.make(**{size: 31, "values": "edge"})
    good = op.make()
    call = getattr(hal, op.name)
    hal.configure(backend="reference", checks="full")
    call(**good)
    before = [s.clone() for s in storages(odd)]
    for _ in range(2):  # of a new kind, and of a known one
        with pytest.raises(hal.ArgumentError, match="values in"):
            call(**odd)
    bound = getattr(hal.bind("cpu", backend="reference", checks="full"), op.name)
    bound(**op.make())
    for _ in range(2):
        with pytest.raises(hal.ArgumentError, match="values in"):
            bound(**odd)
    assert all(map(torch.equal, before, storages(odd)))
    hal.configure(checks="args")
    call(**odd)


@pytest.mark.parametrize("offsets", ["i32", "i64"])
def test_an_out_that_is_too_short_is_said_when_asked(offsets: str) -> None:
    args = get_spec("assign_extend_cache_locs").make(slack=-1, offsets=offsets)
    size = len(args["out"])
    hal.assign_extend_cache_locs(**args, backend="reference")
    before = args["out"].clone()
    hal.configure(checks="full")
    with pytest.raises(hal.ArgumentError, match=rf"out: expected room for the {size + 1} slots .*\[{size}\]"):
        hal.assign_extend_cache_locs(**args, backend="reference")
    assert torch.equal(args["out"], before)
    hal.assign_extend_cache_locs(**{**args, "out": torch.cat([before, before])}, backend="reference")


# --- the bound --------------------------------------------------------------------------------------

SMALL = [n for n in FLOAT_DTYPES if n != "fp32"]
BITS = {1: (torch.uint8, torch.int8), 2: (torch.int16, torch.int16)}


def finite(dtype: torch.dtype) -> list[Fraction]:
    """Every finite number of a dtype, ascending, each once."""
    n = 8 * dtype.itemsize
    patterns = torch.arange(2**n, dtype=torch.int32).to(torch.int16 if n == 16 else torch.uint8)
    values = patterns.view(dtype).to(torch.float64)
    return sorted({Fraction(float(x)) for x in values[torch.isfinite(values)]})


def nearest_even(x: Fraction, numbers: list[Fraction], dtype: torch.dtype) -> float:
    """Exact rounding by its definition: the nearer neighbour, a tie to the one with the even last bit."""
    i = bisect.bisect_left(numbers, x)
    low, high = numbers[max(i - 1, 0)], numbers[i]
    if high == x or high - x < x - low:
        return float(high)
    if x - low < high - x:
        return float(low)
    even = torch.tensor([float(low)]).to(dtype)
    odd = int(even.view(BITS[dtype.itemsize][0])[0]) & 1
    return float(high) if odd else float(low)


@pytest.mark.parametrize("name", SMALL)
def test_rounded_is_exact_at_the_boundaries(name: str) -> None:
    dtype = FLOAT_DTYPES[name]
    numbers = finite(dtype)
    step = max(1, len(numbers) // 900)
    points = [*range(1, len(numbers), step), 1, 2, len(numbers) // 2, len(numbers) // 2 + 1, len(numbers) - 1]
    xs: list[float] = []
    for i in points:
        low, high = numbers[i - 1], numbers[i]
        tie = float((low + high) / 2)
        assert Fraction(tie) == (low + high) / 2
        xs += [float(low), tie, math.nextafter(tie, -math.inf), math.nextafter(tie, math.inf)]
        # Where rounding to fp32 first would land on the tie: the case for rounding to odd.
        xs += [tie * (1 + 2.0**-40), tie * (1 - 2.0**-40)]
    got = rounded(torch.tensor(xs, dtype=torch.float64), dtype).to(torch.float64).tolist()
    want = [nearest_even(Fraction(x), numbers, dtype) for x in xs]
    assert got == want


@pytest.mark.parametrize("name", list(FLOAT_DTYPES))
def test_rounded_past_the_largest(name: str) -> None:
    dtype = FLOAT_DTYPES[name]
    top = torch.finfo(dtype).max
    x = torch.tensor([torch.inf, -torch.inf, top * 2, torch.nan, top], dtype=torch.float64)
    got = rounded(x, dtype).to(torch.float32).tolist()
    over = top if name in ("e4m3", "e5m2") else torch.inf
    assert got[:3] == [over, -over, over]
    assert math.isnan(got[3])
    assert got[4] == top


def test_rounded_leaves_float64() -> None:
    x = torch.tensor([1 + 2.0**-50], dtype=torch.float64)
    assert rounded(x, torch.float64) is x


def step(t: Tensor, by: int) -> Tensor:
    """The `by`-th next number in `t`'s dtype, for positive numbers."""
    bits = BITS[t.dtype.itemsize][0] if t.dtype.itemsize < 4 else torch.int32
    return (t.view(bits) + by).to(bits).view(t.dtype)


@pytest.mark.parametrize("name", list(FLOAT_DTYPES))
def test_right_bites_at_one_ulp(name: str) -> None:
    dtype = FLOAT_DTYPES[name]
    truth = torch.tensor([1.0, 1.1, 1.9999, 0.30001, 3.0, 100.3], dtype=torch.float64)
    best = rounded(truth, dtype)
    exact = Candidate(truth, torch.zeros_like(truth))
    assert right(best, exact).all()
    for by in (-1, 1):
        assert not right(step(best, by), exact).any()
    # Slack of half an ulp lets one neighbour in where the truth lies between, and never the second.
    between = (best.double() + step(best, 1).double()) / 2
    loose = Candidate(between, (step(best, 1).double() - best.double()) / 8)
    assert right(best, loose).all()
    assert right(step(best, 1), loose).all()
    for by in (-1, 2):
        assert not right(step(best, by), loose).any()


def test_right_on_what_is_no_number() -> None:
    truth = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0], dtype=torch.float64)
    c = Candidate(truth, torch.tensor([torch.nan, torch.inf, torch.inf, 0.0], dtype=torch.float64))
    assert right(torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0]), c).all()
    assert not right(torch.tensor([1.0, torch.nan, torch.inf, torch.nan]), c)[[0, 1, 3]].any()
    assert not right(torch.tensor([1.0, 3e38, 0.0, 2.0]), c)[[0, 3]].any()


def test_same_bits() -> None:
    a = torch.tensor([0.0, torch.nan, 1.0])
    assert same_bits(a, a.clone()).all()
    assert same_bits(a, torch.tensor([-0.0, torch.nan, 1.0])).tolist() == [False, True, True]
    with pytest.raises(TypeError, match="comparing"):
        same_bits(a, a.double())


def test_right_any_takes_one_candidate_and_ignores_the_unnamed() -> None:
    one, two = torch.tensor([1, 1, 1]), torch.tensor([2, 2, 2])
    want = Want(torch.tensor([True, True, False]), (Candidate(one), Candidate(two)))
    assert right_any(torch.tensor([1, 2, 9]), want).all()
    assert right_any(torch.tensor([3, 2, 9]), want).tolist() == [False, True, True]


def test_headroom() -> None:
    named = torch.ones(2, dtype=torch.bool)
    truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    exact = Want(named, (Candidate(truth, torch.zeros(2, dtype=torch.float64)),))
    assert headroom(torch.tensor([1.0, 2.0]), exact) == 0.0
    assert headroom(torch.tensor([1.0, 2.0]), Want(named, (Candidate(torch.tensor([1, 2])),))) == 0.0
    half = 2.0**-24
    assert (
        headroom(
            torch.tensor([1.0, 2.0]),
            Want(named, (Candidate(truth + half, torch.zeros(2, dtype=torch.float64)),)),
        )
        == 1.0
    )
    off = Want(named, (Candidate(truth, torch.full((2,), 0.5, dtype=torch.float64)),))
    assert 0.4 < headroom(torch.tensor([1.2, 2.0]), off) < 0.5
    assert headroom(torch.tensor([torch.inf, 2.0]), exact) == 0.0
    assert (
        headroom(
            torch.tensor([448.0]).to(torch.float8_e4m3fn),
            Want(named[:1], (Candidate(truth[:1] * 1e4, truth[:1] * 0),)),
        )
        == 0.0
    )


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
                wide[..., : value.shape[-1]], wide[..., ::2], shifted, value[:1].expand(value.shape), value[:0],
                value.to("meta"), torch.cat([value, value]), value[..., :1], value.unsqueeze(0),
                wide[:1, ..., ::2].expand(value.shape) if value.ndim > 1 else value,
            ):  # fmt: skip
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


def eval_sizes(op: OpSpec, values: Mapping[str, Any]) -> bool:
    return bool(eval(op.sizes_source(), {}, dict(values)))


def sizes_of(op: OpSpec, params: Mapping[str, Any]) -> Any:
    return key_of(op, op.make(**params))


def test_no_batch_size_in_a_key() -> None:
    last, assign, rope, move, *_ = SPECS
    assert sizes_of(last, {"bs": 5}) == sizes_of(last, {"bs": 77, "requests": 30, "width": 9})
    assert sizes_of(assign, {"bs": 5}) == sizes_of(assign, {"bs": 77, "requests": 30, "slack": 9})
    assert sizes_of(rope, {"n": 5}) == sizes_of(rope, {"n": 9, "slots": 64, "max_positions": 99})
    assert sizes_of(rope, {"n": 5, "cache": "paged"}) == sizes_of(
        rope, {"n": 9, "cache": "paged", "slots": 64}
    )
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
    with pytest.raises(
        hal.ArgumentError, match="prefix_lens: expected a tensor on meta, like req_pool_indices"
    ) as e:
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
        "oracle": lambda a: {
            "return": Want(torch.ones_like(a["x"], dtype=torch.bool), (Candidate(a["x"] * 2),))
        },
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


def test_spec_properties() -> None:
    op = made()
    assert (op.name, op.doc, op.features, op.mutated) == ("doubled", "Twice x.", ("more",), ())
    assert get_spec("rope_kv_write").mutated == ("q", "k", "k_cache", "v_cache")
    with pytest.raises(TypeError, match=r"doubled\(\) missing"):
        op.bind()
    assert op.bind(1)["table"] == 0


def test_sizes_that_stand_in_no_one_place_are_checked_whole() -> None:
    assert made().sizes_source() == "True"
    one = made(args={"x": TensorArg("a b", (torch.float32,)), "y": TensorArg("b a", (torch.float32,), optional=True),
                     "table": ValueArg((0, 1))})  # fmt: skip
    x, y = torch.ones(2, 3), torch.ones(3, 2)
    assert not eval_sizes(one, {"x": x, "y": y, "table": 0})
    assert not eval_sizes(one, {"x": x, "y": None, "table": 0})
    assert eval_sizes(one, {"x": x, "y": torch.ones(3, 3), "table": 0})
    assert eval_sizes(one, {"x": x, "y": torch.ones(2, 2), "table": 0})
    alone = made(args={"x": TensorArg("a b", (torch.float32,)), "y": TensorArg("c d", (torch.float32,), optional=True),
                       "table": ValueArg((0, 1))})  # fmt: skip
    assert alone.sizes_source() == "False"


def test_unknown_kind_of_indices() -> None:
    with pytest.raises(ValueError, match="kind of indices"):
        odd_indices(torch.zeros(2), 2, "funny", torch.int32)
    assert floats(generator(0), (0,), torch.float32, specials=True).numel() == 0


def test_unknown_builtin() -> None:
    with pytest.raises(KeyError):
        get_spec("get_lost_loc")


# --- stubs ------------------------------------------------------------------------------------------


def test_stubs_are_the_contracts() -> None:
    tree = ast.parse((Path(hal.__file__).parent / "_api.pyi").read_text())
    stubs = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert set(stubs) == set(BUILTIN)
    for op in SPECS:
        reference = ast.parse(inspect.getsource(op.reference)).body[0]
        assert isinstance(reference, ast.FunctionDef)
        stub = stubs[op.name]
        assert stub.args.kwonlyargs[-1].arg == "backend"
        assert ast.unparse(stub.args.kwonlyargs[-1].annotation) == "str | None"
        stub.args.kwonlyargs.pop()
        stub.args.kw_defaults.pop()
        assert ast.unparse(stub.args) == ast.unparse(reference.args)
        assert ast.unparse(stub.returns) == ast.unparse(reference.returns)
        assert str(inspect.signature(dispatcher(op.name))).startswith(
            str(op.signature).rpartition(")")[0].rstrip()
        )


def test_every_argument_is_documented() -> None:
    for op in SPECS:
        for name in op.args:
            assert f"\n    {name}: " in op.doc or f"\n    {name}:" in op.doc, f"{op.name}: {name}"
        for part in ("Raises:", "Example:", "Source:"):
            assert part in op.doc, f"{op.name}: {part}"
    assert isinstance(get_spec("kv_transfer").args["src"], PoolArg)


def test_functions_of_torch_that_ops_call_are_settled() -> None:
    """Each elementwise function that MKL computes is called once alone before it can be called by two threads."""
    from hal.ops import _torch

    vector = {"acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "exp", "exp2", "expm1"}
    vector |= {"log", "log10", "log1p", "log2", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh"}
    called = set()
    for folder in ("ops", "demo", "conformance", "bench"):
        for file in (Path(hal.__file__).parent / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    owner = node.func.value
                    if not (isinstance(owner, ast.Name) and owner.id in ("math", "np", "tl")):
                        called.add(node.func.attr)
    assert called & vector
    assert called & vector <= {*_torch.SETTLED}
