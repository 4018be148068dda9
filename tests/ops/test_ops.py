"""The contracts: refusals on the cached path, checks of values, stubs and docstrings."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hal
from hal.kv.pool import KVPool
from hal.ops import BUILTIN, get_spec
from hal.ops.spec import FLOATS, OpSpec, PoolArg, Sample, TensorArg
from hal.registry._dispatch import dispatcher

pytestmark = pytest.mark.usefixtures("fresh")
SPECS = [get_spec(name) for name in BUILTIN]


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


@pytest.mark.parametrize("op", SPECS, ids=lambda s: s.name)
def test_what_changes_nothing_has_a_control_that_does(op: OpSpec) -> None:
    def changes(sample: Sample) -> bool:
        wants = op.oracle(op.make(**sample.params)).values()
        return any(bool(x.named.any()) for w in wants for x in (w, *w.fields.values()) if not x.free)

    samples = {s.name: s for s in op.samples}
    for sample in op.samples:
        if sample.control or (os.environ.get("CI_ALL") and not op.core):
            assert changes(samples[sample.control] if sample.control else sample), sample.name


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
            assert (caught.value.op, caught.value.argument) == (op.name, error.argument)
            assert caught.value.expected
            assert caught.value.got


@pytest.mark.parametrize("op", SPECS, ids=lambda s: s.name)
def test_bound_checks_go_by_the_key(op: OpSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of a known kind is not checked whole again: that is what made it nine times a dispatched call."""
    call = getattr(hal.bind("cpu", backend="reference", checks="args"), op.name)
    call(**op.make())
    whole: list[str] = []
    check = OpSpec.check_call
    monkeypatch.setattr(OpSpec, "check_call", lambda self, values: whole.append(self.name) or check(self, values))
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
        assert str(inspect.signature(dispatcher(op.name))).startswith(str(op.signature).rpartition(")")[0].rstrip())


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
