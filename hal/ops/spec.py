"""`OpSpec`: the one source of an op's truth, and `Signature`: what selection may know of a call.

An op's file declares its arguments once, as data. From that come the argument checks, the selection
key, the rendering in error texts, and the cases of the conformance suite.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hal import _memory
from hal._env import nearest
from hal._errors import ArgumentError
from hal.kv.pool import KVPool
from hal.ops.proofs.fresh import Fresh

if TYPE_CHECKING:
    from hal.ops.proofs.judge import Want

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INDEX = (torch.int32, torch.int64)

ROWS = ("head_dim", "v_head_dim", "rope_dim", "lora_dim")
"""Dims that are a row's elements: no kernel knows rows of none."""

SHORT: dict[torch.dtype, str] = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
    torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "i8", torch.int16: "i16",
    torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip
"""The names of dtypes in error texts and on the command line."""


# --- how an op declares its arguments ---------------------------------------------------------------


@dataclass(frozen=True)
class TensorArg:
    """A tensor argument.

    Args:
        dims: dim names, e.g. ``"n q_heads head_dim"``; several alternatives are separated by ``|``.
            A name is one size across all arguments.
        dtypes: those allowed; or the name of another argument whose dtype this one must have.
        stride: ``contiguous``; ``inner`` (last dim contiguous, the rest free); ``any``.
        optional: None is allowed.
        mutated: the op writes to it.
    """

    dims: str
    dtypes: tuple[torch.dtype, ...] | str
    stride: str = "contiguous"
    optional: bool = False
    mutated: bool = False

    @cached_property
    def alternatives(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(a.split()) for a in self.dims.split("|"))


@dataclass(frozen=True)
class PoolArg:
    """A `KVPool` argument."""

    mutated: bool = False


@dataclass(frozen=True)
class ScaleArg:
    """A float, or a one-element float32 tensor on the call's device, or None."""


@dataclass(frozen=True)
class ValueArg:
    """A plain value. `choices` lists those allowed; without, the op's own check looks at it, and all that selection
    may know of it is whether it is None, or `off`, a value that asks for nothing."""

    choices: tuple[Any, ...] = ()
    off: int | float | None = None


Arg = TensorArg | PoolArg | ScaleArg | ValueArg


# --- what selection sees ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSig:
    """What selection sees of a tensor. ``shape`` has None for every dim that is not static."""

    dtype: torch.dtype
    device: str
    shape: tuple[int | None, ...]
    stride: str
    """``contiguous``; ``inner`` (last dim contiguous); ``overlapping`` (so too, and several elements may lie in one
    place, as where it is expanded); ``strided``; ``strided overlapping``."""
    aligned: bool
    """The data start on a 16-byte boundary. Of index tensors nobody may ask that: False."""
    index: int | None = None
    example: tuple[int, ...] = field(default=(), compare=False)
    """The sizes of the call that was shown, for error texts alone: `supports` must not read them."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __str__(self) -> str:
        where = self.device if self.index is None else f"{self.device}:{self.index}"
        return f"{SHORT.get(self.dtype, str(self.dtype))}[{','.join(map(str, self.example))}]@{where}"


@dataclass(frozen=True)
class PoolSig:
    """What selection sees of a `KVPool`."""

    layout: str
    device: str
    dtype: torch.dtype
    page_size: int
    row_shape: tuple[int, ...]
    v_row_shape: tuple[int, ...] | None
    num_layers: int
    list_of_layers: bool
    pinned: bool

    def __str__(self) -> str:
        row = "x".join(map(str, self.row_shape))
        return f"KVPool({self.layout},{SHORT.get(self.dtype, str(self.dtype))}[{row}]@{self.device})"


class Signature(Mapping[str, Any]):
    """A call as selection sees it: dtypes, device types, ranks, static dims, stride and alignment
    classes, keyword values. Never a batch size, a number of tokens or of slots.

    ``sig["q"]`` is a `TensorSig`, `PoolSig`, None, or a plain value. A scale is ``"float"`` or a
    `TensorSig` ``[1]``, and a value without listed choices, such as a range of layers, is ``"given"`` (or ``"off"``).
    ``sig.dims`` has the static dims by name. ``sig.device`` is the call's device type.
    """

    __slots__ = ("_args", "device", "dims", "index", "op")

    def __init__(
        self, op: str, args: Mapping[str, Any], device: str, index: int | None, dims: Mapping[str, int]
    ):
        self.op = op
        self._args = dict(args)
        self.device = device
        self.index = index
        self.dims = dict(dims)

    def __getitem__(self, name: str) -> Any:
        return self._args[name]

    def __iter__(self) -> Any:
        return iter(self._args)

    def __len__(self) -> int:
        return len(self._args)

    def __str__(self) -> str:
        shown = [f"{n}={v}" for n, v in self._args.items() if isinstance(v, TensorSig | PoolSig)]
        return f"{self.op}({', '.join(shown)})"

    __repr__ = __str__


# --- the op -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One input of the conformance suite: parameters for `OpSpec.make`.

    Args:
        name: unique within the op.
        params: keyword arguments for `OpSpec.make`.
        tag: ``required``, or ``feature:<name>``.
        control: for a no-op sample (nothing may be written), the name of the non-empty sample beside it.
        large: offsets beyond 2^31 elements; runs only where memory allows.
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    tag: str = "required"
    control: str | None = None
    large: bool = False


@dataclass(frozen=True)
class ErrorSample:
    """An input that must raise `ArgumentError` naming `argument`, with nothing written."""

    name: str
    argument: str
    make: Callable[[], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class OpSpec:
    """The contract of one op.

    Args:
        reference: plain torch, any device, never syncs. Its signature is the op's, its docstring the
            op's documentation.
        args: every parameter, in the signature's order.
        oracle: arguments before the call -> what each mutated argument, and ``"return"``, must be.
        make: ``make(seed=0, **params)`` -> arguments by name, on the CPU.
        samples: the inputs of the conformance suite.
        errors: inputs that must be refused.
        static: dim names that selection may know.
        check: the rules that `args` can't say, on metadata alone; gets the arguments and the dims.
        check_sizes: those of them that hold of dynamic sizes; run on every checked call.
        check_values: reads index values (HAL_CHECKS=full); raises on one out of range.
        ragged: parameter of `make` -> inclusive int range or choices, for property tests.
        fresh: how inputs are drawn anew in every run, with sizes far beyond the samples'.
        core: a backend must have it to be certified.
        returns: None; the name of a mutated argument, which is returned itself (a new tensor like it where it may be
            None and is); or a `TensorArg` for a new tensor, its dims those of arguments, or numbers.
    """

    reference: Callable[..., Any]
    args: Mapping[str, Arg]
    oracle: Callable[[Mapping[str, Any]], dict[str, Want]]
    make: Callable[..., dict[str, Any]]
    samples: Sequence[Sample]
    errors: Sequence[ErrorSample] = ()
    static: frozenset[str] = frozenset()
    check: Callable[[Mapping[str, Any], Mapping[str, int]], None] | None = None
    check_sizes: Callable[..., None] | None = None
    check_values: Callable[[Mapping[str, Any]], None] | None = None
    ragged: Mapping[str, tuple[int, int] | Sequence[Any]] = field(default_factory=dict)
    fresh: Fresh | None = None
    core: bool = False
    returns: str | TensorArg | None = None

    def __post_init__(self) -> None:
        if list(self.args) != list(self.signature.parameters):
            raise TypeError(f"{self.name}: args {list(self.args)} are not the signature's {self.signature}")
        if isinstance(self.returns, str) and self.returns not in self.mutated:
            raise TypeError(f"{self.name}: returns {self.returns!r}, which is no mutated argument")
        reserved = [n for n in self.args if n.startswith("_") or n == "backend"]
        if reserved:
            raise TypeError(
                f"{self.name}: parameter {reserved[0]}: hal's own names, as are all that start with _"
            )
        names = [s.name for s in self.samples]
        if len(set(names)) != len(names):
            raise TypeError(f"{self.name}: two samples have one name")

    @property
    def name(self) -> str:
        return self.reference.__name__

    @cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.reference)

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.reference) or ""

    @property
    def features(self) -> tuple[str, ...]:
        """The optional features that the samples name, sorted."""
        return tuple(sorted({s.tag.removeprefix("feature:") for s in self.samples if s.tag != "required"}))

    @property
    def mutated(self) -> tuple[str, ...]:
        return tuple(n for n, a in self.args.items() if isinstance(a, TensorArg | PoolArg) and a.mutated)

    def bind(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Arguments by name, defaults filled in; a `TypeError` like Python's own otherwise."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as e:
            near = {k: nearest(k, self.args) for k in kwargs if k not in self.args}
            meant = "".join(f"; {k}: did you mean {n}?" for k, n in near.items() if n)
            raise TypeError(f"{self.name}() {e}{meant}") from None
        bound.apply_defaults()
        return dict(bound.arguments)

    # --- signature and key ---

    def sign(self, values: Mapping[str, Any]) -> Signature:
        """The `Signature` of a call; an error if it has tensors on two accelerators."""
        dims: dict[str, int] = {}
        sig: dict[str, Any] = {}
        accel: dict[tuple[str, int | None], str] = {}
        for name, arg in self.args.items():
            value = values[name]
            if isinstance(arg, PoolArg) and isinstance(value, KVPool):
                sig[name] = PoolSig(value.layout, value.device.type, *value.key[2:])
                found = value.device
            elif isinstance(value, Tensor):
                sig[name] = self._tensor_sig(arg, value, dims)
                found = value.device
            else:
                sig[name] = value
                if value is not None and isinstance(arg, ScaleArg):
                    sig[name] = "float"
                elif value is not None and isinstance(arg, ValueArg) and not arg.choices:
                    # Of what is no number at all, == may say anything.
                    asked = arg.off is None or type(value) not in (int, float) or value != arg.off
                    sig[name] = "given" if asked else "off"
                continue
            if found.type != "cpu":
                accel.setdefault((found.type, found.index), name)
        if len(accel) > 1:
            (a, first), (b, second) = list(accel.items())[:2]
            raise ArgumentError(
                self.name, second, f"a tensor on {_place(a)}, like {first}", f"one on {_place(b)}"
            )
        device, index = next(iter(accel), ("cpu", None))
        return Signature(self.name, sig, device, index, dims)

    def _tensor_sig(self, arg: Arg, t: Tensor, dims: dict[str, int]) -> TensorSig:
        if not isinstance(arg, TensorArg):
            return TensorSig(t.dtype, t.device.type, (1,), "contiguous", True, t.device.index, (1,))
        names = self.dims_of(arg, t.ndim)
        for d, size in zip(names, t.shape, strict=False):
            if d in self.static:
                dims.setdefault(d, size)
        shape = tuple(
            n if i < len(names) and names[i] in self.static else None for i, n in enumerate(t.shape)
        )
        stride = "contiguous" if t.is_contiguous() else stride_class(t)
        aligned = not self._of_indices(arg) and not t.data_ptr() & 15
        return TensorSig(t.dtype, t.device.type, shape, stride, aligned, t.device.index, tuple(t.shape))

    @staticmethod
    def _of_indices(arg: TensorArg) -> bool:
        return not isinstance(arg.dtypes, str) and set(arg.dtypes) <= set(INDEX)

    @staticmethod
    def dims_of(arg: Arg, ndim: int) -> tuple[str, ...]:
        if not isinstance(arg, TensorArg):
            return ()
        return next((a for a in arg.alternatives if len(a) == ndim), ())

    def key_source(self, shaped: Collection[str] = ()) -> str:
        """Python source of a tuple that determines `sign`'s result and that of the checks, in terms of the parameters.

        Lean on purpose: it is evaluated on every dispatched call. What is nearly always so (one device, contiguous,
        aligned, in memory, without a gradient) is one expression over all tensors, and is told apart by tensor only
        where it is not so. It may raise where an argument is not what the contract says; such a call has no key. It
        uses the names of `KEY_NAMES`.

        Args:
            shaped: arguments whose shapes are to be left behind, under the names that `shape_name` says.
        """
        parts: list[str] = []
        tensors = {n: a for n, a in self.args.items() if isinstance(a, TensorArg)}
        pools = [n for n, a in self.args.items() if isinstance(a, PoolArg)]
        names = list(tensors)
        required = [n for n in names if not tensors[n].optional]
        floats = [n for n in names if not self._of_indices(tensors[n])]
        ranked = sorted((n for n in required if all(tensors[n].alternatives)), key=lambda n: n not in shaped)
        for name, arg in self.args.items():
            if isinstance(arg, PoolArg):
                parts.append(f"{name}.key")
            elif isinstance(arg, ScaleArg):
                parts.append(f"None if {name} is None else _scale({name})")
            elif isinstance(arg, ValueArg):
                # Ranges and the like are values that no `supports` may look into.
                # The class too: 1 and 1.0 are True to a dict.
                known = f"{name} is None" if arg.off is None else f"{name}.__class__, {name} == {arg.off!r}"
                parts.append(f"{name}.__class__, {name}" if arg.choices else known)
            else:
                one = self._tensor_key(name, arg, name in shaped or name in ranked[:1])
                parts.append(
                    f"None if {name} is None else ({', '.join(one)})" if arg.optional else ", ".join(one)
                )
        if ranked:
            # Under torch.jit.trace a size is a tensor: what is traced has no key.
            parts.append(f"{shape_name(ranked[0])}[0].__class__")

        def every(test: str, names: Sequence[str]) -> str:
            return " and ".join(
                f"({n} is None or {test.format(n)})" if tensors[n].optional else test.format(n) for n in names
            )

        def some(test: str, names: Sequence[str]) -> str:
            return " or ".join(
                f"{n} is not None and {test.format(n)}"
                if getattr(self.args[n], "optional", False)
                else test.format(n)
                for n in names
            )

        if required:
            rest = [n for n in names if n != required[0]]
            same = every("{}.device == _place", rest) or "True"
            elsewhere = f"((_place := {required[0]}.device), {same} or _devices({', '.join(rest)}))"
            parts.append(f"{every('{}.is_cpu', names)} or {elsewhere}")
        elif names:
            parts.append(f"_devices({', '.join(names)})")
        if names:
            parts.append(f"{every('{}.is_contiguous()', names)} or _strides({', '.join(names)})")
            # No address: empty, or a tensor without memory.
            addresses = [
                f"{n}.data_ptr()" if not tensors[n].optional else f"16 if {n} is None else {n}.data_ptr()"
                for n in names
            ]
            addresses = [
                f"(_at_{n} := {a})" if n in floats else a for n, a in zip(names, addresses, strict=True)
            ]
            parts.append(f"0 in ({', '.join(addresses)},) and _memory({', '.join(names)})")
        if floats:
            bits = " | ".join(f"_at_{n}" for n in floats)
            parts.append(f"({bits}) & 15 and _alignments({', '.join(floats)})")
        real = [n for n in floats if self._may_be(tensors[n], "is_floating_point", "is_complex")]
        if real:
            # torch refuses to make an integer tensor with its negative bit set.
            parts.append(some("{}.is_neg()", real))
        if any(self._may_be(tensors[n], "is_complex") for n in real):
            parts.append(some("{}.is_conj()", real))
        derived = real + pools
        if derived:
            grad = some("{}.requires_grad", derived)
            dual = f"_forward._current_level >= 0 and _tangents({', '.join(derived)})"
            parts.append(f"_grad() and ({grad}) or {dual}")
        return "(" + ", ".join(parts) + ",)"

    def _may_be(self, arg: TensorArg, *kinds: str) -> bool:
        """Whether one of an argument's dtypes is such a one, e.g. ``is_complex``."""
        if isinstance(arg.dtypes, str):
            like = self.args[arg.dtypes]
            return not isinstance(like, TensorArg) or self._may_be(like, *kinds)
        return any(getattr(d, kind) for d in arg.dtypes for kind in kinds)

    def _tensor_key(self, name: str, arg: TensorArg, shaped: bool) -> list[str]:
        """Dtype, rank and static dims of one tensor."""
        static = {(a, i) for a in arg.alternatives for i, d in enumerate(a) if d in self.static}
        left = set(static)
        if not static and not shaped:
            return [f"{name}.dtype", f"{name}.ndim"]
        shape = shape_name(name)
        # A place counted from the front or from the back, where it is static in every rank.
        longest = max(map(len, arg.alternatives))
        keys = []
        for at in (*range(longest), *range(-1, -longest - 1, -1)):
            there = {(a, at % len(a)) for a in arg.alternatives if -len(a) <= at < len(a)}
            if len(there) == len(arg.alternatives) and there <= static and there & left:
                left -= there
                keys.append(f"{shape}[{at}]")
        # What no such place covers: a slice, since it is empty where the rank is too low.
        keys += [f"{shape}[{i}:{i + 1}]" for i in sorted({i for _, i in left})]
        return [f"{name}.dtype", f"len({shape} := {name}.shape)", *keys]

    def sizes_source(self, shape: Callable[[str], str] = "{}.shape".format) -> str:
        """Python source of an expression that is true where the dynamic sizes of a call disagree.

        `shape` names a shape, given an argument's name.

        A size that stands in no one place (its tensor may have several ranks) is told by the whole check instead,
        unless all that have it are alike in that.
        """
        groups: dict[tuple[tuple[str, int], ...], list[tuple[str, int]]] = {}
        for name, arg in self.args.items():
            for i in range(min(map(len, arg.alternatives)) if isinstance(arg, TensorArg) else 0):
                where = tuple((a[i], i) for a in arg.alternatives)  # type: ignore[union-attr]
                if len(set(where)) == 1 and where[0][0] not in self.static:
                    groups.setdefault(((where[0][0], -1),), []).append((name, i))
                elif where[0][0] not in self.static:
                    groups.setdefault(where, []).append((name, i))
        owners: dict[str, set[Any]] = {}
        for where in groups:
            for d, _ in where:
                owners.setdefault(d, set()).add(where)
        if any(len(found) > 1 for found in owners.values()):
            return "True"
        tests = []
        for places in groups.values():
            # One that is always there goes first: every other one is compared with it.
            (first, i), *rest = sorted(places, key=lambda p: getattr(self.args[p[0]], "optional", False))
            for name, j in rest:
                absent = [
                    f"{n} is None or " for n in (first, name) if getattr(self.args[n], "optional", False)
                ]
                tests.append(f"({''.join(absent)}{shape(first)}[{i}] == {shape(name)}[{j}])")
        return f"not ({' and '.join(tests)})" if tests else "False"

    # --- checks ---

    def check_call(self, values: Mapping[str, Any]) -> Signature:
        """Every rule on metadata: types, dtypes, ranks, sizes, strides, devices, the op's own.

        Returns:
            `sign`'s result, which the check needs itself.

        Raises:
            ArgumentError: naming the first argument that breaks the contract.
        """
        dims: dict[str, tuple[int, str]] = {}
        if torch._C._is_tracing():
            raise ArgumentError(
                self.name, next(iter(self.args)),
                "a call outside of torch.jit.trace, which records nothing of what an op does (hal.torch_ops has ops "
                "for torch.compile and torch.export)", "a call that is being traced",
            )  # fmt: skip
        for name, arg in self.args.items():
            for t in _tensors(values[name]):
                self._check_memory(name, t)
            self._check_one(name, arg, values, dims)
        sig = self.sign(values)
        if not any(isinstance(a, PoolArg) for a in self.args.values()):
            for name, arg in self.args.items():
                v = values[name]
                if (
                    isinstance(v, Tensor)
                    and isinstance(arg, TensorArg | ScaleArg)
                    and v.device.type != sig.device
                ):
                    raise ArgumentError(
                        self.name, name, f"a tensor on {_place((sig.device, sig.index))}, the call's device",
                        f"one on {v.device}",
                    )  # fmt: skip
        for d in ROWS:
            size, name = dims.get(d, (1, ""))
            if not size:
                raise ArgumentError(
                    self.name, name, f"rows of at least one element ({d})", describe(values[name])
                )
        if self.check is not None:
            self.check(values, {d: size for d, (size, _) in dims.items()})
        if self.check_sizes is not None:
            self.check_sizes(*values.values())
        return sig

    def _check_memory(self, name: str, t: Tensor) -> None:
        why = _memory.flaw(t)
        if why is not None:
            raise ArgumentError(self.name, name, "a dense tensor whose values are in memory", why)
        self.check_untracked(name, t)

    def check_untracked(self, name: str, t: Tensor) -> None:
        """Raises an `ArgumentError` where autograd would lose what it follows of `t`."""
        why = _memory.tracked(t)
        if why is not None:
            raise ArgumentError(
                self.name, name, "no gradient to track, since ops have no backward (torch.no_grad(), "
                "torch.inference_mode(), or detach() it)", why,
            )  # fmt: skip

    def _check_one(
        self, name: str, arg: Arg, values: Mapping[str, Any], dims: dict[str, tuple[int, str]]
    ) -> None:
        value = values[name]

        def bad(expected: str, got: str) -> ArgumentError:
            return ArgumentError(self.name, name, expected, got)

        if isinstance(arg, PoolArg):
            if not isinstance(value, KVPool):
                raise bad("a hal.KVPool", _type(value))
        elif isinstance(arg, ScaleArg):
            if isinstance(value, Tensor):
                if value.dtype != torch.float32 or value.numel() != 1:
                    raise bad("a float or a one-element float32 tensor", describe(value))
            elif value is not None and not _is_scale(value):
                raise bad("a float, a one-element float32 tensor, or None", _type(value))
        elif isinstance(arg, ValueArg):
            if arg.choices and not any(
                value is c or (type(value) is type(c) and value == c) for c in arg.choices
            ):
                raise bad("one of " + ", ".join(map(repr, arg.choices)), repr(value))
        elif value is None:
            if not arg.optional:
                raise bad("a tensor", "None")
        elif not isinstance(value, Tensor):
            raise bad("a tensor", _type(value))
        else:
            self._check_tensor(name, arg, value, values, dims)

    def _check_tensor(
        self,
        name: str,
        arg: TensorArg,
        t: Tensor,
        values: Mapping[str, Any],
        dims: dict[str, tuple[int, str]],
    ) -> None:
        def bad(expected: str, got: str) -> ArgumentError:
            return ArgumentError(self.name, name, expected, got)

        if isinstance(arg.dtypes, str):
            like = values[arg.dtypes]
            if isinstance(like, Tensor) and t.dtype != like.dtype:
                raise bad(f"{SHORT.get(like.dtype, like.dtype)}, the dtype of {arg.dtypes}", describe(t))
        elif t.dtype not in arg.dtypes:
            raise bad("dtype " + " or ".join(SHORT[d] for d in arg.dtypes), describe(t))
        names = self.dims_of(arg, t.ndim)
        if not names:
            want = " or ".join("[" + ", ".join(a) + "]" for a in arg.alternatives)
            raise bad(want, describe(t))
        for i, (d, size) in enumerate(zip(names, t.shape, strict=True)):
            known = dims.setdefault(d, (size, name))
            if known[0] != size:
                raise bad(
                    f"[{', '.join(names)}] with {d} = {known[0]}, as in {known[1]}",
                    f"{describe(t)} (dim {i})",
                )
        if arg.stride == "contiguous" and not t.is_contiguous():
            raise bad("a contiguous tensor (hal never copies one for you)", describe(t))
        if arg.stride == "inner" and not t.is_contiguous() and "strided" in stride_class(t):
            raise bad("a contiguous last dim", describe(t))
        if arg.mutated and not t.is_contiguous() and "overlapping" in stride_class(t):
            raise bad("no two elements in one place, since the op writes here", describe(t))


def stride_class(t: Tensor) -> str:
    """`TensorSig.stride` of a tensor that is not contiguous."""
    shape, strides = t.shape, t.stride()
    inner = shape and (strides[-1] == 1 or shape[-1] == 1)
    if _memory.overlaps(shape, strides):
        return "overlapping" if inner else "strided overlapping"
    return "inner" if inner else "strided"


def shape_name(argument: str) -> str:
    """What the shape of an argument is called in the source of a key."""
    return f"_shape_{argument}"


def scale_key(scale: Any) -> Any:
    """The part of a scale that selection and checks may know."""
    if isinstance(scale, Tensor):
        flaw = not scale.data_ptr() or scale.is_neg() or _memory.tracked(scale) is not None
        return (scale.dtype, scale.device, scale.numel() == 1, flaw)
    return (type(scale), scale == 0, _is_scale(scale))


def _is_scale(value: Any) -> bool:
    """A float, whatever its value, or an int that is one."""
    return type(value) is float or isinstance(value, float) or _memory.finite(value)


def _tensors(value: Any) -> tuple[Tensor, ...]:
    """The tensors of one argument."""
    if isinstance(value, KVPool):
        return value.tensors
    return (value,) if isinstance(value, Tensor) else ()


def _devices(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(None if t is None else t.device for t in tensors)


def _strides(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(t is None or t.is_contiguous() or stride_class(t) for t in tensors)


def _alignments(*tensors: Tensor | None) -> tuple[bool, ...]:
    return tuple(t is None or not t.data_ptr() & 15 for t in tensors)


def _in_memory(*tensors: Tensor | None) -> tuple[bool, ...]:
    return tuple(t is None or t.data_ptr() != 0 or t.numel() == 0 for t in tensors)


def _tangents(*values: Any) -> bool:
    return any(_memory.tracked(t) is not None for value in values for t in _tensors(value))


KEY_NAMES: dict[str, Any] = {
    "_devices": _devices, "_strides": _strides, "_alignments": _alignments, "_memory": _in_memory,
    "_scale": scale_key, "_tangents": _tangents, "_grad": torch.is_grad_enabled, "_forward": torch.autograd.forward_ad,
}  # fmt: skip
"""What `OpSpec.key_source` refers to."""


def describe(t: Tensor) -> str:
    """``bf16[64,32,128]@cpu``, with the strides where they are not the plain ones."""
    text = f"{SHORT.get(t.dtype, str(t.dtype))}[{','.join(map(str, t.shape))}]@{t.device}"
    return text if t.is_contiguous() else f"{text} strides {tuple(t.stride())}"


def _type(value: Any) -> str:
    return "None" if value is None else f"{type(value).__name__} {_memory.shown(value):.60}"


def _place(place: tuple[str, int | None]) -> str:
    return place[0] if place[1] is None else f"{place[0]}:{place[1]}"
