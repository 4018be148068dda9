"""The ops under torch.library: what torch's own checks say, compiled and exported models, selection inside of them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from plugins import Plugins
from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import hal
from hal import _torch_ops as _library
from hal.kv.pool import KVPool
from hal.ops import BUILTIN, get_spec
from hal.ops.spec import FP8, OpSpec, PoolArg, Sample, TensorArg

pytestmark = pytest.mark.usefixtures("fresh")
UTILS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
COMPILER = shutil.which("g++") or shutil.which("clang++")


class Recorder(TorchDispatchMode):
    """What is called of the namespace ``hal``, with which arguments. It is not run: a second run of an op that writes
    what is there already would look as if it wrote nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "hal":
            return func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}))
        return torch.empty(0) if func._schema.returns else None


def recorded(op: str, arguments: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    with Recorder() as seen:
        getattr(hal.torch_ops(), op)(**arguments)
    (call,) = seen.calls
    return call


def chosen(s: OpSpec) -> list[Sample]:
    """Every required sample, and one of each feature."""
    first = {x.tag: x for x in reversed(s.samples) if x.tag != "required"}
    return [x for x in s.samples if not x.large and x.tag == "required"] + list(first.values())


def tensors(value: Any) -> list[Tensor]:
    """All tensors among arguments: those of pools and lists too."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, KVPool):
        return tensors([value.k, value.v])
    if isinstance(value, Mapping):
        return tensors(list(value.values()))
    return [t for v in value for t in tensors(v)] if isinstance(value, list | tuple) else []


def image(t: Tensor) -> bytes:
    return t.detach().contiguous().view(torch.uint8).numpy().tobytes() if t.numel() else b""


def writes_what_it_says(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What test_schema proves, for fp8, which torch can't compare on the CPU: the rest is bytewise as it was, and no
    result aliases an argument."""
    declared = func._schema.arguments
    given = {a.name: v for a, v in zip(declared, args, strict=False)} | kwargs
    mutated = {a.name for a in declared if a.alias_info is not None and a.alias_info.is_write}
    kept = {n: tensors(v) for n, v in given.items() if n not in mutated}
    before = {n: [image(t) for t in ts] for n, ts in kept.items()}
    found = func(*args, **kwargs)
    assert {n: [image(t) for t in ts] for n, ts in kept.items()} == before
    own = {t.untyped_storage().data_ptr() for t in tensors(given) if t.numel()}
    assert found is None or not found.numel() or found.untyped_storage().data_ptr() not in own


@pytest.mark.parametrize("op", BUILTIN)
def test_opcheck(op: str) -> None:
    """All of torch's checks, on what the function around the op really passes: one call of each overload and choice of
    arguments. What values make of it is the suite's to say."""
    s = get_spec(op)
    seen = set()
    for sample in chosen(s):
        func, args, kwargs = recorded(op, s.make(**sample.params))
        fp8 = any(t.dtype in FP8 for t in tensors([args, kwargs]))
        form = (func, fp8, *(v is None for v in (*args, *kwargs.values())))
        if form in seen:
            continue
        seen.add(form)
        if fp8:
            writes_what_it_says(func, args, kwargs)
        try:
            told = opcheck(func, args, kwargs, test_utils=UTILS[fp8:])
        except Exception as e:
            raise AssertionError(f"{op}: sample {sample.name}: {e}") from e
        assert set(told.values()) == {"SUCCESS"}


@pytest.mark.parametrize("op", BUILTIN)
def test_schema_says_what_is_written(op: str) -> None:
    s = get_spec(op)
    for form in _library.forms(s):
        func = getattr(getattr(torch.ops.hal, op), form.overload or "default", None) if hal.torch_ops() else None
        assert func is not None
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        pools = {n for n, a in s.args.items() if isinstance(a, PoolArg)}
        halves = {f"{n}_{x}" for n in pools & set(s.mutated) for x in "kv"}
        assert written == set(s.mutated) - pools - set(form.without) | halves
        assert (len(func._schema.returns) == 1) == (form.result is not None)


@pytest.mark.parametrize("op", BUILTIN)
def test_same_as_the_dispatched_op_compiled_or_not(op: str) -> None:
    """Bit by bit, arguments and results; in one graph; the argument that is returned is the argument itself."""
    s, ops = get_spec(op), hal.torch_ops()
    fn = getattr(ops, op)
    # Dynamo takes each sample for a new kind of call; a few of each op, the same for every backend.
    for sample in chosen(s)[:3]:
        torch._dynamo.reset()
        arguments = [s.make(**sample.params) for _ in range(3)]
        calls = (getattr(hal, op), fn, torch.compile(fn, fullgraph=True, backend="aot_eager"))
        found = [call(**a, backend="reference") for call, a in zip(calls, arguments, strict=True)]
        images = [[image(t) for t in (*tensors(a), *tensors([r]))] for a, r in zip(arguments, found, strict=True)]
        assert images[1] == images[0], sample.name
        assert images[2] == images[0], sample.name
        if isinstance(s.returns, str) and arguments[0][s.returns] is not None:
            assert found[1] is arguments[1][s.returns]
            assert found[2].data_ptr() == arguments[2][s.returns].data_ptr()


@pytest.mark.parametrize("kind", ["one", "list", "mla"])
def test_pools_in_a_compiled_function(kind: str) -> None:
    """A `KVPool` stays one to the caller: of one tensor, of a list of layers, and MLA's without a v."""
    ops = hal.torch_ops()

    def halves(make: Any) -> Any:
        return [make(8, 2, 4) for _ in range(2)] if kind == "list" else make(2, 8, 2, 4)

    def pool(make: Any) -> KVPool:
        return KVPool(halves(make), None if kind == "mla" else halves(make))

    src, dst, wanted = pool(torch.randn), pool(torch.zeros), pool(torch.zeros)

    def move(slots: Tensor, to: KVPool) -> Tensor:
        ops.kv_transfer(src, to, slots, slots + 1, layers=range(1, 2))
        ops.kv_transfer(src, to, slots + 1, slots + 2)
        return slots * 2

    torch._dynamo.reset()
    slots = torch.tensor([0, 4])
    assert torch.compile(move, fullgraph=True, backend="aot_eager")(slots, dst).tolist() == [0, 8]
    hal.kv_transfer(src, wanted, slots, slots + 1, layers=range(1, 2))
    hal.kv_transfer(src, wanted, slots + 1, slots + 2)
    assert all(map(torch.equal, tensors(dst), tensors(wanted)))
    assert any(float(t.abs().sum()) > 0 for t in tensors(dst))


# --- selection, errors, other people's ops ----------------------------------------------------------

TABLE, ROW = torch.tensor([[7, 8, 9]], dtype=torch.int32), torch.tensor([0])


def test_selection_is_made_when_compiled_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    @hal.register("get_last_loc", backend="mine")
    def get_last_loc(req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor) -> Tensor:
        return torch.full_like(prefix_lens, 70)

    ops = hal.torch_ops()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def last(lens: Tensor) -> Tensor:
        return ops.get_last_loc(TABLE, ROW, lens)

    length = torch.tensor([3])
    assert last(length).tolist() == [9]
    with hal.use("get_last_loc=mine"):
        assert last(length).tolist() == [70]
    assert ops.get_last_loc(TABLE, ROW, length, backend="mine").tolist() == [70]
    monkeypatch.setenv("HAL_BACKEND", "mine")
    hal.reload()
    assert last(length).tolist() == [70]
    monkeypatch.setenv("HAL_BACKEND", "cuda")
    hal.reload()
    with pytest.raises(hal.NoBackendError, match="no backend for get_last_loc"):
        last(length)


def test_bad_arguments_raise_what_the_op_raises() -> None:
    ops = hal.torch_ops()
    with pytest.raises(hal.ArgumentError, match="get_last_loc: req_to_token: expected dtype i32"):
        ops.get_last_loc(TABLE.long(), ROW, ROW)
    pool = KVPool(torch.zeros(4, 8, 2))
    with pytest.raises(hal.ArgumentError, match="kv_transfer: layers: expected a range with step 1"):
        ops.kv_transfer(pool, KVPool(torch.zeros(4, 8, 2)), ROW, ROW, layers=range(0, 4, 2))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'prefix_lens'"):
        ops.get_last_loc(TABLE, ROW)
    with pytest.raises(AttributeError, match="did you mean get_last_loc"):
        ops.get_lost_loc(TABLE, ROW, ROW)


def test_functions_look_like_the_ops() -> None:
    import inspect

    ops = hal.torch_ops()
    assert list(ops) == list(BUILTIN)
    for op in BUILTIN:
        assert inspect.signature(getattr(ops, op)) == inspect.signature(getattr(hal, op))
        assert getattr(ops, op).__doc__ == get_spec(op).doc
    assert getattr(hal.torch_ops(), op) is getattr(ops, op)


OWN = """
import torch
from hal.ops.spec import OpSpec, Sample, TensorArg, ValueArg
from hal.registry import hookimpl

def {name}(x: torch.Tensor, by: {type} = {default}) -> torch.Tensor:
    '''`x` times `by`.'''
    return x * by

@hookimpl
def hal_ops():
    return [OpSpec(
        {name}, args={{"x": TensorArg("n", (torch.float32,)), "by": ValueArg()}}, oracle=lambda a: {{}},
        make=lambda seed=0: {{"x": torch.ones(3), "by": {default}}}, samples=(Sample("one"),), {more}
    )]
"""


def own(plugins: Plugins, plugin: str, name: str, type: str = "int", default: str = "2", more: str = "") -> None:
    plugins.add(plugin, OWN.format(name=name, type=type, default=default, more=more))
    plugins.load()


def test_op_of_a_plugin(plugins: Plugins) -> None:
    own(plugins, "acme_one", "lib_scale", more='returns=TensorArg("n", "x"),')
    ops = hal.torch_ops()
    assert ops.lib_scale(torch.ones(2), 5).tolist() == [5, 5]
    func, args, kwargs = recorded("lib_scale", {"x": torch.ones(4)})
    assert set(opcheck(func, args, kwargs).values()) == {"SUCCESS"}


def test_op_of_a_plugin_that_no_schema_can_say(plugins: Plugins) -> None:
    own(plugins, "acme_two", "lib_odd", type="dict", default="{}")
    ops = hal.torch_ops()
    with pytest.raises(hal.NoBackendError, match="lib_odd: by is a dict; a schema knows bool, int, float, str and"):
        _ = ops.lib_odd
    assert callable(ops.get_last_loc)


def test_result_that_a_contract_does_not_name(plugins: Plugins) -> None:
    own(plugins, "acme_three", "lib_silent")
    with pytest.raises(hal.HalError, match="returned a Tensor; its OpSpec must say so"):
        hal.torch_ops().lib_silent(torch.ones(2))


def test_plugin_exchanged_for_one_with_another_schema(plugins: Plugins) -> None:
    own(plugins, "acme_four", "lib_change")
    _ = hal.torch_ops().lib_change
    (plugins.root / "hal_acme_four-1.2.dist-info" / "entry_points.txt").write_text("")
    own(plugins, "acme_five", "lib_change", type="float", default="0.5")
    with pytest.raises(hal.HalError, match="lib_change is registered already, with another schema"):
        hal.torch_ops()


@pytest.mark.parametrize(
    ("returns", "reason"),
    [
        (TensorArg("m", "x"), "does not say where m, a size of its result, is from"),
        (TensorArg("n", (torch.int32, torch.int64)), "names 2 dtypes for its result"),
    ],
)
def test_results_that_a_contract_leaves_open(returns: TensorArg, reason: str) -> None:
    def lib_open(x: Tensor) -> Tensor:
        return x

    s = OpSpec(
        lib_open,
        args={"x": TensorArg("n", (torch.float32,))},
        oracle=lambda a: {},
        make=dict,
        samples=(),
        returns=returns,
    )
    with pytest.raises(TypeError, match=reason):
        _library.forms(s)


def test_an_op_returns_what_it_writes() -> None:
    def lib_wrong(x: Tensor) -> Tensor:
        return x

    with pytest.raises(TypeError, match="returns 'x', which is no mutated argument"):
        OpSpec(
            lib_wrong,
            args={"x": TensorArg("n", (torch.float32,))},
            oracle=lambda a: {},
            make=dict,
            samples=(),
            returns="x",
        )
