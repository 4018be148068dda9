"""`OpSpec`: the one source of an op's truth.

An op's file declares its arguments once, as data. From that come the argument checks, the selection
key, the rendering in error texts, and the cases of the conformance suite.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hal._env import nearest
from hal.ops import _checks, _key
from hal.ops import _signature as _sig
from hal.ops._arguments import FLOATS, FP8, INDEX, SHORT, Arg, PoolArg, ScaleArg, TensorArg, ValueArg, describe, dims_of
from hal.ops._key import KEY_NAMES as KEY_NAMES
from hal.ops._key import shape_name as shape_name
from hal.ops._signature import PoolSig, Signature, TensorSig

if TYPE_CHECKING:
    from hal.ops.proofs.fresh import Fresh
    from hal.ops.proofs.judge import Want

__all__ = [
    "FLOATS",
    "FP8",
    "INDEX",
    "SHORT",
    "Arg",
    "ErrorSample",
    "OpSpec",
    "PoolArg",
    "PoolSig",
    "Proof",
    "Sample",
    "ScaleArg",
    "Signature",
    "TensorArg",
    "TensorSig",
    "ValueArg",
    "describe",
]


@dataclass(frozen=True)
class Sample:
    """One input of the conformance suite: parameters for `OpSpec.make`.

    Args:
        name: unique within the op.
        params: keyword arguments for `OpSpec.make`.
        tag: ``required``, or ``feature:<name>``.
        control: for a no-op sample (nothing may be written), the name of the non-empty sample beside it.
        large: far more than the others, as offsets beyond 2^31 elements, or very many keys; runs once, alone, and only
            where memory allows.
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


@dataclass(frozen=True)
class Proof:
    """What the conformance suite needs beyond the contract.

    Args:
        oracle: arguments before the call -> what each mutated argument, and ``"return"``, must be.
        make: ``make(seed=0, **params)`` -> arguments by name, on the CPU.
        samples: the inputs of the conformance suite.
        errors: inputs that must be refused.
        ragged: parameter of `make` -> inclusive int range or choices, for property tests.
        fresh: how inputs are drawn anew in every run, with sizes far beyond the samples'.
    """

    oracle: Callable[[Mapping[str, Any]], dict[str, Want]]
    make: Callable[..., dict[str, Any]]
    samples: Sequence[Sample]
    errors: Sequence[ErrorSample] = ()
    ragged: Mapping[str, tuple[int, int] | Sequence[Any]] = field(default_factory=dict)
    fresh: Fresh | None = None

    def __post_init__(self) -> None:
        names = [s.name for s in self.samples]
        if len(set(names)) != len(names):
            raise TypeError(f"two samples have one name: {max(names, key=names.count)}")


_PROVEN = tuple(f.name for f in fields(Proof))
_LATER: Any = object()


def _later() -> Any:
    """The default of a field of `OpSpec` that is its proof's unless it is given."""
    return _LATER


@dataclass(frozen=True, eq=False)
class OpSpec:
    """The contract of one op.

    Args:
        reference: plain torch, any device, never syncs. Its signature is the op's, its docstring the
            op's documentation.
        args: every parameter, in the signature's order.
        oracle, make, samples, errors: as in `Proof`; read from `proof` where they are not given.
        static: dim names that selection may know.
        check: the rules that `args` can't say, on metadata alone; gets the arguments and the dims.
        check_sizes: those of them that hold of dynamic sizes; run on every checked call.
        check_values: reads index values (HAL_CHECKS=full); raises on one out of range.
        ragged, fresh: as in `Proof`.
        core: a backend must have it to be certified.
        returns: None; the name of a mutated argument, which is returned itself (a new tensor like it where it may be
            None and is); or a `TensorArg` for a new tensor, its dims those of arguments, or numbers.
        proof: a `Proof`, or the name of a module that has it as ``PROOF``, imported when something first reads one of
            its fields: an engine that only calls the op never loads samples.
    """

    reference: Callable[..., Any]
    args: Mapping[str, Arg]
    oracle: Callable[[Mapping[str, Any]], dict[str, Want]] = field(default_factory=_later)
    make: Callable[..., dict[str, Any]] = field(default_factory=_later)
    samples: Sequence[Sample] = field(default_factory=_later)
    errors: Sequence[ErrorSample] = field(default_factory=_later)
    static: frozenset[str] = frozenset()
    check: Callable[[Mapping[str, Any], Mapping[str, int]], None] | None = None
    check_sizes: Callable[..., None] | None = None
    check_values: Callable[[Mapping[str, Any]], None] | None = None
    ragged: Mapping[str, tuple[int, int] | Sequence[Any]] = field(default_factory=_later)
    fresh: Fresh | None = field(default_factory=_later)
    core: bool = False
    returns: str | TensorArg | None = None
    proof: Proof | str | None = None

    def __post_init__(self) -> None:
        if list(self.args) != list(self.signature.parameters):
            raise TypeError(f"{self.name}: args {list(self.args)} are not the signature's {self.signature}")
        if isinstance(self.returns, str) and self.returns not in self.mutated:
            raise TypeError(f"{self.name}: returns {self.returns!r}, which is no mutated argument")
        reserved = [n for n in self.args if n.startswith("_") or n == "backend"]
        if reserved:
            raise TypeError(f"{self.name}: parameter {reserved[0]}: hal's own names, as are all that start with _")
        given = {name: value for name in _PROVEN if (value := vars(self).pop(name)) is not _LATER}
        if self.proof is None:
            object.__setattr__(self, "proof", Proof(**given))
        vars(self).update(given)

    if not TYPE_CHECKING:  # type checkers know every field

        def __getattr__(self, name: str) -> Any:
            if name not in _PROVEN:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            proof = self.proof if isinstance(self.proof, Proof) else import_module(self.proof).PROOF
            vars(self).update({n: getattr(proof, n) for n in _PROVEN if n not in vars(self)})
            return vars(self)[name]

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

    def sign(self, values: Mapping[str, Any]) -> Signature:
        """The `Signature` of a call; an error if it has tensors on two accelerators."""
        return _sig.sign(self.name, self.args, self.static, values)

    @staticmethod
    def dims_of(arg: Arg, ndim: int) -> tuple[str, ...]:
        """The names of an argument's dims where it has so many; none: that is no rank of its own."""
        return dims_of(arg, ndim)

    def key_source(self, shaped: Collection[str] = ()) -> str:
        """Python source of a tuple that determines `sign`'s result and that of the checks; see `hal.ops._key`."""
        return _key.key_source(self.args, self.static, shaped)

    def sizes_source(self, shape: Callable[[str], str] = "{}.shape".format) -> str:
        """Python source of an expression that is true where the dynamic sizes of a call disagree."""
        return _key.sizes_source(self.args, self.static, shape)

    def check_call(self, values: Mapping[str, Any]) -> Signature:
        """Every rule on metadata: types, dtypes, ranks, sizes, strides, devices, the op's own.

        Returns:
            `sign`'s result, which the check needs itself.

        Raises:
            ArgumentError: naming the first argument that breaks the contract.
        """
        return _checks.check_call(self, values)

    def check_untracked(self, name: str, t: Tensor) -> None:
        """Raises an `ArgumentError` where autograd would lose what it follows of `t`."""
        _checks.check_untracked(self.name, name, t)
