"""What tensors may be: in memory, no element twice where an op writes, outside of autograd; and torch's defaults."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import hal
from hal._memory import overlaps
from hal.kv.pool import KVPool
from hal.ops import BUILTIN, get_spec
from hal.ops.spec import PoolArg, ScaleArg, TensorArg
from hal.registry._dispatch import dispatcher

ROOT = Path(__file__).parents[2]
FACTORIES = set(
    """
    arange as_tensor asarray bartlett_window blackman_window empty empty_permuted empty_strided eye full
    hamming_window hann_window kaiser_window linspace logspace normal ones rand randint randn randperm range
    scalar_tensor sparse_coo_tensor sparse_csr_tensor tensor tril_indices triu_indices zeros
    """.split()
)
"""torch's functions that make a tensor where and of what the defaults say."""
LEGACY = {"Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor"}


# --- defaults ---------------------------------------------------------------------------------------


def undecided(source: str) -> Iterator[tuple[int, str]]:
    """(line, call) of every allocation that leaves device or dtype to torch's defaults."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value
        if not (isinstance(owner, ast.Name) and owner.id in ("torch", "_torch")):
            continue
        named = {k.arg for k in node.keywords}
        lacks = node.func.attr in FACTORIES and not {"device", "dtype"} <= named
        if lacks or node.func.attr in LEGACY:
            yield node.lineno, ast.unparse(node)


def test_every_allocation_names_device_and_dtype() -> None:
    files = [f for root in ("hal", "backends", "registry") for f in (ROOT / root).rglob("*.py")]
    assert len(files) > 100
    found = [f"{f.relative_to(ROOT)}:{line}: {call}" for f in files for line, call in undecided(f.read_text("utf-8"))]
    assert not found, "name device= and dtype= (or use hal._host):\n" + "\n".join(found)


@pytest.mark.parametrize(
    "call",
    [
        "torch.empty(3)",
        "torch.zeros(3, dtype=torch.int64)",
        "torch.arange(3, device=x.device)",
        "torch.tensor([1.0])",
        "torch.full((2,), 1.0)",
        "torch.as_tensor(x)",
        "torch.linspace(0, 1, 5)",
        "torch.rand(3, generator=g)",
        "torch.LongTensor([1])",
    ],
)
def test_the_lint_sees(call: str) -> None:
    assert list(undecided(call))
    assert not list(undecided("torch.empty(3, dtype=d, device=x.device), torch.empty_like(x), torch.where(a, b, 0)"))


# --- tensors without memory, and with more than memory ----------------------------------------------


class Wrapper(Tensor):
    """A subclass that has no storage of its own, as DTensor has none."""

    @staticmethod
    def __new__(cls, t: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, t.shape, strides=t.stride(), dtype=t.dtype, device=t.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} of a wrapper")


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "fake": lambda t: FakeTensorMode().from_tensor(t),
    "meta": lambda t: t.to("meta"),
    "functional": torch._to_functional_tensor,
    "zero": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype, device="cpu"),
    "wrapper": Wrapper,
    "negative": torch._neg_view,
    "sparse": lambda t: t.to_sparse(),
}


def calls(op: str) -> list[tuple[str, Callable[..., Any]]]:
    """The checked ways into an op, each of which knows the kind of a good call."""
    args = get_spec(op).make()
    bound = hal.bind("cpu", backend="cpu", like={op: args}, checks="args")
    ways = [("dispatched", dispatcher(op)), ("bound", getattr(bound, op))]
    for _, fn in ways:
        with torch.no_grad():
            fn(**get_spec(op).make())
    return ways


def written(args: dict[str, Any]) -> list[bytes]:
    tensors = [t for v in args.values() for t in (v.tensors if isinstance(v, KVPool) else (v,))]
    return [
        t.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for t in tensors
        if type(t) is Tensor and t.numel() and t.device.type == "cpu"
    ]


@pytest.mark.parametrize("op", BUILTIN)
def test_a_tensor_whose_values_are_not_in_memory_is_refused(op: str) -> None:
    s = get_spec(op)
    for way, fn in calls(op):
        for kind, odd in ODD.items():
            for name, arg in s.args.items():
                args = s.make()
                value = args[name]
                if not (isinstance(arg, TensorArg) and isinstance(value, Tensor) and value.numel()):
                    continue
                if kind == "sparse" and (value.dtype not in (torch.float32, torch.int64) or not value.is_contiguous()):
                    continue
                if kind == "negative" and not value.is_floating_point():
                    continue  # torch refuses to make one
                before = written({n: v for n, v in args.items() if n != name})
                with warnings.catch_warnings(), torch.no_grad():
                    warnings.simplefilter("ignore")
                    other = odd(value)
                    with pytest.raises(hal.ArgumentError) as e:
                        fn(**{**args, name: other})
                assert e.value.argument == name, (way, kind, name, str(e.value))
                assert written({n: v for n, v in args.items() if n != name}) == before


def test_a_scale_without_memory_is_refused() -> None:
    s = get_spec("rope_kv_write")
    args = s.make(cache_dtype="e4m3", scale="tensor")
    hal.rope_kv_write(**args)
    for odd in (FakeTensorMode().from_tensor(args["k_scale"]), torch._neg_view(args["k_scale"])):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(hal.ArgumentError, match="k_scale"):
                hal.rope_kv_write(**{**args, "k_scale": odd})


def test_what_functorch_wraps_is_refused() -> None:
    args = get_spec("get_last_loc").make()
    hal.get_last_loc(**args)
    with pytest.raises(hal.ArgumentError, match="without memory"):
        torch.vmap(lambda lens: hal.get_last_loc(**{**args, "prefix_lens": lens}))(args["prefix_lens"].repeat(3, 1))


def test_a_pool_without_memory_is_refused() -> None:
    for odd in (torch.empty(2, 8, 1, 4, dtype=torch.float32, device="meta"), torch._neg_view(torch.zeros(2, 8, 1, 4))):
        with pytest.raises(hal.ArgumentError, match="k: expected tensors whose values are in memory"):
            KVPool(odd)
    with pytest.raises(hal.ArgumentError, match="resolve_conj"):
        KVPool(torch.zeros(2, 8, 1, 4, dtype=torch.complex64).conj())


# --- overlap ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((3, 4), (4, 1), False),
        ((3, 4), (1, 3), False),
        ((3, 4), (0, 1), True),
        ((1, 4), (0, 1), False),
        ((3, 4), (1, 1), True),
        ((3, 4), (3, 1), True),
        ((0, 4), (0, 1), False),
        ((), (), False),
        ((5, 2, 3), (7, 100, 2), False),
        ((5, 2, 3), (4, 100, 2), True),
    ],
)
def test_overlaps(shape: tuple[int, ...], strides: tuple[int, ...], expected: bool) -> None:
    assert overlaps(shape, strides) is expected
    places = [0]
    for n, step in zip(shape, strides, strict=True):
        places = [p + i * step for p in places for i in range(n)]
    assert (len(set(places)) < len(places)) == expected


@pytest.mark.parametrize("op", BUILTIN)
def test_a_written_argument_has_no_element_twice(op: str) -> None:
    s = get_spec(op)
    for _, fn in calls(op):
        for name, arg in s.args.items():
            args = s.make()
            t = args[name]
            if not (isinstance(arg, TensorArg) and arg.mutated and isinstance(t, Tensor) and t.ndim > 1):
                continue
            # Windows that share all but one row: no stride is 0.
            windows = t.as_strided(t.shape, (t.stride()[-2] if t.ndim > 2 else 1, *t.stride()[1:]))
            with pytest.raises(hal.ArgumentError) as e:
                fn(**{**args, name: windows})
            assert e.value.argument == name


def test_a_pool_has_no_element_twice() -> None:
    memory = torch.zeros(4096)
    with pytest.raises(hal.ArgumentError, match="no two elements in one place"):
        KVPool(memory.as_strided((2, 16, 2, 8), (16, 16, 8, 1)))


# --- gradients --------------------------------------------------------------------------------------


def graded(op: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls of an op in which one argument requires grad."""
    s = get_spec(op)
    for name, arg in s.args.items():
        args = s.make()
        value = args[name]
        if isinstance(arg, PoolArg):
            value.tensors[-1].requires_grad_()
            yield name, args
        elif isinstance(arg, TensorArg | ScaleArg) and isinstance(value, Tensor) and value.is_floating_point():
            yield name, {**args, name: value.requires_grad_()}


@pytest.mark.parametrize("op", BUILTIN)
def test_an_input_that_requires_grad(op: str) -> None:
    ways = [*calls(op), ("torch_ops", getattr(hal.torch_ops(), op))]
    for way, fn in ways:
        for name, args in graded(op):
            before = written(args)
            with pytest.raises(hal.ArgumentError, match="requires grad, with grad mode on") as e:
                fn(**args)
            # A schema has no pools: there the first of its tensors is named.
            assert e.value.argument == name, way
            assert written(args) == before
            with torch.no_grad():
                fn(**args)
            with torch.inference_mode():
                fn(**get_spec(op).make())


def test_a_tensor_scale_that_requires_grad() -> None:
    args = get_spec("rope_kv_write").make(cache_dtype="e4m3", scale="tensor")
    hal.rope_kv_write(**args)
    args["k_scale"].requires_grad_()
    with pytest.raises(hal.ArgumentError, match="k_scale"):
        hal.rope_kv_write(**args)


@pytest.mark.parametrize("library", [False, True])
def test_a_tangent_is_not_dropped(library: bool) -> None:
    fn = hal.torch_ops().rope_kv_write if library else hal.rope_kv_write
    args = get_spec("rope_kv_write").make(dtype="fp32")
    fn(**args)

    def turned(q: Tensor) -> Tensor:
        fn(**{**args, "q": q})
        return q

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(args["q"].clone(), torch.ones_like(args["q"]))
        for mode in (torch.enable_grad(), torch.no_grad()):
            with mode, pytest.raises(hal.ArgumentError, match="tangent"):
                turned(dual)
        fn(**args)
        fn(**args)
    with pytest.raises(Exception, match=r"tangent|without memory"):
        torch.func.jvp(turned, (args["q"],), (torch.ones_like(args["q"]),))


def test_compiled_code_drops_no_gradient() -> None:
    fn, args = hal.torch_ops().rope_kv_write, get_spec("rope_kv_write").make(dtype="fp32")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def turned(q: Tensor) -> Tensor:
        fn(**{**args, "q": q})
        return q * 2

    with torch.no_grad():
        turned(args["q"].clone())
    with pytest.raises(Exception, match="fake tensor call") as e:
        turned(args["q"].clone().requires_grad_() * 1)
    assert "requires grad" in str(e.value) or isinstance(e.value.__cause__, hal.ArgumentError)


@pytest.mark.parametrize("op", BUILTIN)
def test_a_trace_is_refused(op: str) -> None:
    for _, fn in calls(op):
        args = get_spec(op).make()
        pool = args.get("dst") or args.get("pool")
        tensor = pool.tensors[0] if pool else next(v for v in args.values() if isinstance(v, Tensor))

        def traced(x: Tensor, fn: Any = fn, args: dict[str, Any] = args) -> Tensor:
            fn(**args)
            return x + 1

        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(hal.ArgumentError, match=r"outside of torch\.jit\.trace"):
                torch.jit.trace(traced, (tensor.float(),), check_trace=False)


# --- numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [10**400, -(10**400), 10**5000], ids=["large", "small", "unprintable"])
@pytest.mark.parametrize("way", [0, 1])
def test_an_int_that_is_no_float_is_an_argument_error(number: int, way: int) -> None:
    cases = [
        ("decode_attention", "scale", {}),
        ("decode_attention", "logit_cap", {}),
        ("decode_attention", "sliding_window", {}),
        ("extend_attention", "scale", {}),
        ("decode_attention", "k_scale", {"cache_dtype": "e4m3", "scales": "float"}),
        ("qk_norm_rope_kv_write", "eps", {}),
        ("rope_kv_write", "k_scale", {"cache_dtype": "e4m3", "scale": "float"}),
        ("kv_write", "v_scale", {"cache_dtype": "e4m3", "scale": "float"}),
        ("mla_kv_write", "kv_scale", {"cache_dtype": "e4m3", "scale": "float"}),
    ]
    for op, name, params in cases:
        args = get_spec(op).make(**params)
        bound = hal.bind("cpu", backend="cpu", like={op: args}, checks="args")
        fn = (dispatcher(op), getattr(bound, op))[way]
        fn(**{**args, name: 3})  # known as an int
        with pytest.raises(hal.ArgumentError) as e:
            fn(**{**args, name: number})
        assert e.value.argument == name
        assert len(str(e.value)) < 300


# --- devices that are not there ---------------------------------------------------------------------


def absent() -> str:
    return "cuda" if not torch.cuda.is_available() else f"cuda:{torch.cuda.device_count()}"


def test_binding_to_a_device_that_is_not_there() -> None:
    for device in (absent(), "xpu", "npu" if hasattr(torch, "npu") else "mps"):
        for backend in (None, "reference"):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with pytest.raises(hal.SelectionError, match="this machine has"):
                    hal.bind(device, backend=backend)


@pytest.mark.skipif(torch.cuda.is_available(), reason="explains for a CUDA device that is not there")
def test_explaining_for_a_device_that_is_not_there() -> None:
    s = get_spec("get_last_loc")
    sig = s.sign(s.make())
    sig.device = "cuda"
    with pytest.raises(hal.SelectionError, match="this machine has no cuda device"):
        hal.explain("get_last_loc", sig)
