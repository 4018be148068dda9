"""`torch_ops`: hal's ops for `torch.compile` and `torch.export`, registered with `torch.library`.

Everything registered is generated from the op's contract: the schema with what is mutated, the fake kernel, the
function that takes the op's arguments apart into what a schema can say, and the one that puts them together again
and calls ``hal.<op>``. So a backend is chosen when the compiled code runs, by all that chooses it elsewhere.
"""

from __future__ import annotations

import threading
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hal._errors import HalError, NoBackendError
from hal.kv.pool import KVPool
from hal.ops.spec import OpSpec, PoolArg, ScaleArg, TensorArg
from hal.registry import _generate, current
from hal.registry._dispatch import Bound, dispatcher

if TYPE_CHECKING:
    from hal._api import TorchOps

NAMESPACE = "hal"
_TYPES = {bool: "bool", int: "SymInt", float: "float", str: "str"}

_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_lock = threading.Lock()
_registered: dict[str, tuple[OpSpec, Callable[..., Any]]] = {}
_dispatched: dict[str, Callable[..., Any]] = {}
"""``hal.<op>`` of each, as it was when `torch_ops` was last called: a plugin may be exchanged, a kernel not."""


def torch_ops() -> TorchOps:
    """The ops as `torch.compile` and `torch.export` know them: opaque, with no graph break, on any backend.

    The functions take the arguments of ``hal.<op>`` and give the same results. Each is one node of a graph,
    ``torch.ops.hal.<op>``, and calls ``hal.<op>`` when that runs. They work outside of compiled code too, at some
    microseconds a call more. There is no backward: call them under `torch.inference_mode` or `torch.no_grad`; with
    grad mode on, an input that requires grad or carries a tangent is an `ArgumentError`.

    Returns:
        A frozen namespace of functions by op. An op of a plugin whose arguments no schema can say raises a
        `NoBackendError` when it is asked for.

    Raises:
        HalError: a plugin was exchanged for one whose op of the same name has another schema; a process keeps
            what it has registered.

    Example:
        >>> import torch, hal
        >>> ops = hal.torch_ops()
        >>> last = torch.compile(ops.get_last_loc, fullgraph=True, backend="eager")
        >>> last(torch.tensor([[7, 8, 9]], dtype=torch.int32), torch.tensor([0]), torch.tensor([3]))
        tensor([9])
    """
    table = current()
    functions: dict[str, Callable[..., Any]] = {}
    lacking: dict[str, Exception] = {}
    with _lock:
        for op in table.op_names:
            spec = table.spec(op)
            try:
                schemas = [form.schema for form in forms(spec)]
            except TypeError as e:
                lacking[op] = NoBackendError(f"hal: torch_ops: {e}")
                continue
            known = _registered.get(op)
            if known is None or known[0] is not spec:
                if known is not None and [form.schema for form in forms(known[0])] != schemas:
                    raise HalError(f"hal: torch_ops: {op} is registered already, with another schema")
                known = _registered[op] = spec, _register(spec, define=known is None)
            functions[op] = known[1]
    return cast("TorchOps", Bound(functions, lacking))


# --- what a schema can say --------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One argument of a schema, and the expression over the op's own arguments that gives it."""

    name: str
    type: str
    value: str
    default: str | None = None

    def declared(self, kind: str = "") -> str:
        """``kind name=default``; without a kind, as Python writes it."""
        return f"{kind} {self.name}".lstrip() + ("" if self.default is None else f"={self.default}")


@dataclass(frozen=True)
class Form:
    """One overload of an op.

    An op that writes to `out` or, where that is None, returns a new tensor has two: ``default``, which writes to
    nothing, and ``into``; no schema says "this argument or a new tensor". What a schema calls a result is new: an
    argument that the op returns is returned by the function around it.
    """

    spec: OpSpec
    overload: str = ""
    without: tuple[str, ...] = ()
    result: TensorArg | None = None

    @property
    def name(self) -> str:
        return self.spec.name + (f".{self.overload}" if self.overload else "")

    @property
    def parts(self) -> list[Part]:
        return [p for name in self.spec.args for p in self._parts(name)]

    @property
    def schema(self) -> str:
        return f"{self.name}({self._list(lambda p: p.declared(p.type))}, str? backend=None) -> " + (
            "Tensor" if self.result else "()"
        )

    @property
    def call(self) -> str:
        """The arguments of a call of it, from those of the op."""
        return f"{self._list(lambda p: p.value, lambda p: f'{p.name}={p.value}')}, backend=backend"

    @property
    def parameters(self) -> str:
        """The same as Python writes it, without the types."""
        return f"{self._list(lambda p: p.declared())}, backend=None"

    def _list(self, show: Callable[[Part], str], keyword: Callable[[Part], str] | None = None) -> str:
        """Every part; those after a star by `keyword`, without the star, where it is given."""
        parameters = self.spec.signature.parameters
        before = [n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
        after = [n for n in parameters if n not in before]
        shown = [show(p) for n in before for p in self._parts(n)] + ([] if keyword else ["*"])
        return ", ".join(shown + [(keyword or show)(p) for n in after for p in self._parts(n)])

    def _parts(self, name: str) -> list[Part]:
        arg = self.spec.args[name]
        alias = f"({name}!)" if getattr(arg, "mutated", False) else ""
        default: Any = self.spec.signature.parameters[name].default
        shown = None if default is self.spec.signature.empty else _literal(default)
        if isinstance(arg, TensorArg):
            if name in self.without:
                return []
            if arg.optional and not (self.overload and name == self.spec.returns):
                return [Part(name, f"Tensor{alias}?", name, shown)]
            return [Part(name, f"Tensor{alias}", name)]
        if isinstance(arg, ScaleArg):
            return [
                Part(name, "Tensor?", f"{name} if isinstance({name}, _Tensor) else None", shown),
                Part(f"{name}_value", "float?", f"None if isinstance({name}, _Tensor) else {name}", shown),
            ]
        if isinstance(arg, PoolArg):
            halves = (f"{name}_k", f"{name}_v")
            return [
                *(Part(h, f"Tensor({h}!)[]" if alias else "Tensor[]", f"_half({name}.{h[-1]})") for h in halves),
                Part(f"{name}_layout", "str", f"{name}.layout"),
                Part(f"{name}_page_size", "SymInt", f"{name}.page_size"),
                # A list of one layer is no tensor of one layer.
                Part(f"{name}_list", "bool", f"isinstance({name}.k, tuple)"),
            ]
        kind, optional = self._kind(name)
        if kind is range:
            return [Part(name, f"SymInt[]{optional}", f"_ends({name})", shown)]
        return [Part(name, _TYPES[kind] + optional, name, shown)]

    def _kind(self, name: str) -> tuple[Any, str]:
        """The type of a plain value, and ``?`` where it may be None."""
        try:
            hint = typing.get_type_hints(self.spec.reference).get(name)
        except NameError as e:
            raise TypeError(f"{self.spec.name}: the annotation of {name}: {e}") from None
        kinds = set(typing.get_args(hint) or [hint])
        kind, *more = kinds - {types.NoneType}
        if more or kind not in (*_TYPES, range):
            raise TypeError(
                f"{self.spec.name}: {name} is a {getattr(hint, '__name__', hint)}; a schema knows "
                "bool, int, float, str and range"
            )
        return kind, "?" if len(kinds) > 1 else ""

    def together(self, name: str) -> str:
        """The expression over the schema's arguments that gives one of the op's."""
        arg = self.spec.args[name]
        if name in self.without:
            return "None"
        if isinstance(arg, ScaleArg):
            return f"{name}_value if {name} is None else {name}"
        if isinstance(arg, PoolArg):
            return f"_pool({name}_k, {name}_v, {name}_layout, {name}_page_size, {name}_list)"
        if not isinstance(arg, TensorArg) and self._kind(name)[0] is range:
            return f"None if {name} is None else range(*{name})"
        return name


def _literal(default: Any) -> str:
    """A default, as schemas and Python both write it."""
    return f'"{default}"' if isinstance(default, str) else repr(default)


def forms(spec: OpSpec) -> list[Form]:
    """The overloads of an op.

    Raises:
        TypeError: an argument's type is none that a schema has, or the contract leaves open what a result is.
    """
    returns = spec.returns
    own = spec.args[returns] if isinstance(returns, str) else None
    if isinstance(returns, TensorArg):
        found = [Form(spec, result=returns)]
    elif isinstance(own, TensorArg) and own.optional:
        # Inductor can't take an op that returns a tensor and has but Nones for what it writes to.
        without = tuple(n for n in spec.mutated if getattr(spec.args[n], "optional", False))
        found = [Form(spec, without=without, result=own), Form(spec, overload="into")]
    else:
        found = [Form(spec)]
    for form in found:
        _ = form.parts, form.result and _empty(spec, form.result)
    return found


def _empty(spec: OpSpec, made: TensorArg) -> str:
    """The expression for a new tensor of the sizes and the dtype that the contract says."""
    tensors = {n: a for n, a in spec.args.items() if isinstance(a, TensorArg) and not a.optional}
    like = made.dtypes if isinstance(made.dtypes, str) else next(iter(tensors))
    if not isinstance(made.dtypes, str) and len(made.dtypes) != 1:
        raise TypeError(f"{spec.name}: the contract names {len(made.dtypes)} dtypes for its result")
    sizes = [d if d.isdigit() else _size(spec, tensors, d) for d in made.alternatives[0]]
    dtype = f"{like}.dtype" if isinstance(made.dtypes, str) else f"_torch.{str(made.dtypes[0]).removeprefix('torch.')}"
    return f"_torch.empty(({', '.join(sizes)},), dtype={dtype}, device={like}.device)"


def _size(spec: OpSpec, tensors: Mapping[str, TensorArg], dim: str) -> str:
    """The expression for a size, by a tensor that has it in one place whatever its rank."""
    for name, arg in tensors.items():
        if all(dim in a for a in arg.alternatives):
            for end in (False, True):
                where = {a.index(dim) - (len(a) if end else 0) for a in arg.alternatives}
                if len(where) == 1:
                    return f"{name}.shape[{where.pop()}]"
    raise TypeError(f"{spec.name}: the contract does not say where {dim}, a size of its result, is from")


# --- what is generated ------------------------------------------------------------------------------

_FUNCTION = """
def {name}({parameters}backend=None):
    {either}{call}
    return {returned}
"""
_EITHER = """if {none}:
        return _new({call})
    if {returns} is None:
        {returns} = {empty}
    """
_KERNEL = """
def kernel({parameters}):
    {keep}(_run[{name!r}]({values}, backend=backend))
"""
_FAKE = """
def fake({parameters}):
    return {empty}
"""


def _register(spec: OpSpec, define: bool) -> Callable[..., Any]:
    """Defines the op's overloads, unless they are, and returns the function around them."""
    _dispatched[spec.name] = dispatcher(spec.name)
    for form in forms(spec) if define else ():
        _library.define(form.schema, tags=(torch.Tag.pt2_compliant_tag,))
        kernel = _KERNEL.format(
            name=spec.name,
            parameters=form.parameters,
            keep="return " if form.result else "" if spec.returns else "_nothing",
            values=", ".join(
                f"{n}={form.together(n)}" if p.kind is p.KEYWORD_ONLY else form.together(n)
                for n, p in spec.signature.parameters.items()
            ),
        )
        run = _generate.define(kernel, "kernel", "torch_ops", _run=_dispatched, _pool=_pool, _nothing=_nothing)
        _library.impl(form.name, run, "CompositeExplicitAutograd")
        _library.impl(form.name, _guard_autograd(form), "Autograd")
        fake = _FAKE.format(parameters=form.parameters, empty=form.result and _empty(spec, form.result))
        torch.library.register_fake(
            f"{NAMESPACE}::{form.name}", _generate.define(fake, "fake", "torch_ops", _torch=torch), lib=_library
        )
    return _around(spec, forms(spec))


def _guard_autograd(form: Form) -> Callable[..., Any]:
    """The kernel that autograd meets: without it, gradients and tangents would be dropped in silence, in compiled
    code and under torch.func too, where the op itself never sees them."""
    names = [name for name in form.spec.args for _ in form._parts(name)]
    of = {p.name: name for name in form.spec.args for p in form._parts(name)}
    overload = getattr(getattr(torch.ops.hal, form.spec.name), form.overload or "default")

    def guarded(*args: Any, **kwargs: Any) -> Any:
        # An export computes nothing: what it makes is asked again when it runs.
        if (torch.is_grad_enabled() or forward_ad._current_level >= 0) and not torch.compiler.is_exporting():
            given = [*zip(names, args, strict=False), *((of.get(n, n), v) for n, v in kwargs.items())]
            for name, value in given:
                for t in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(t, Tensor):
                        form.spec.check_untracked(name, t)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args, **kwargs)

    return guarded


def _around(spec: OpSpec, found: Sequence[Form]) -> Callable[..., Any]:
    """The function that has the op's own signature. Dynamo traces it, so it is plain code."""
    overloads = [getattr(getattr(torch.ops.hal, spec.name), f.overload or "default") for f in found]
    first, last = found[0], found[-1]
    returns = spec.returns if isinstance(spec.returns, str) else None
    either = ""
    if first is not last and first.result:
        none = " and ".join(f"{n} is None" for n in first.without)
        either = _EITHER.format(none=none, call=first.call, returns=returns, empty=_empty(spec, first.result))
    source = _FUNCTION.format(
        name=spec.name,
        parameters=_generate.parameters(spec),
        either=either,
        call=("_found = " if last.result else "") + f"_op({last.call})",
        returned="_found" if last.result else returns,
    )
    names = {"_op": overloads[-1], "_new": overloads[0], "_half": _half, "_ends": _ends}
    fn = _generate.define(source, spec.name, "torch_ops", **names, _torch=torch, _Tensor=Tensor)
    fn.__doc__, fn.__signature__ = spec.doc, dispatcher(spec.name).__signature__  # type: ignore[attr-defined]
    return fn


def _nothing(found: object) -> None:
    """A result that the contract does not name would be lost."""
    if found is not None:
        raise HalError(f"hal: torch_ops: the op returned a {type(found).__name__}; its OpSpec must say so (`returns`)")


# --- pools and ranges, apart and together -----------------------------------------------------------


def _half(half: Tensor | tuple[Tensor, ...] | None) -> list[Tensor]:
    return list(half) if isinstance(half, tuple) else [] if half is None else [half]


def _pool(k: list[Tensor], v: list[Tensor], layout: str, page_size: int, listed: bool) -> KVPool:
    if listed:
        return KVPool(k, v or None, layout, page_size)
    return KVPool(k[0], v[0] if v else None, layout, page_size)


def _ends(layers: range | None) -> list[int] | None:
    return None if layers is None else [layers.start, layers.stop, layers.step]
