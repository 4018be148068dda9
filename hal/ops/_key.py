"""Python source of what tells one dispatched call from another, and of the check of its sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hal import _memory
from hal.ops._arguments import Arg, PoolArg, ScaleArg, TensorArg, ValueArg, of_indices
from hal.ops._signature import is_scale, stride_class, tensors_of


def key_source(arguments: Mapping[str, Arg], static: frozenset[str], shaped: Collection[str] = ()) -> str:
    """Python source of a tuple that determines `sign`'s result and that of the checks, in terms of the parameters."""
    tensors, others = key_sources(arguments, static, shaped)
    return f"({tensors}, {others})"


def key_sources(arguments: Mapping[str, Arg], static: frozenset[str], shaped: Collection[str] = ()) -> tuple[str, str]:
    """`key_source` in two: a tuple of what tensors add, and one of what other arguments do.

    Lean on purpose: it is evaluated on every dispatched call. What is nearly always so (one device, contiguous,
    aligned, in memory, without a gradient) is one expression over all tensors, and is told apart by tensor only
    where it is not so. It may raise where an argument is not what the contract says; such a call has no key. It
    uses the names of `KEY_NAMES`.

    Args:
        shaped: arguments whose shapes are to be left behind, under the names that `shape_name` says.
    """
    parts: list[str] = []
    others: list[str] = []
    tensors = {n: a for n, a in arguments.items() if isinstance(a, TensorArg)}
    pools = [n for n, a in arguments.items() if isinstance(a, PoolArg)]
    names = list(tensors)
    required = [n for n in names if not tensors[n].optional]
    floats = [n for n in names if not of_indices(tensors[n])]
    ranked = sorted((n for n in required if all(tensors[n].alternatives)), key=lambda n: n not in shaped)
    for name, arg in arguments.items():
        if isinstance(arg, PoolArg):
            others.append(f"{name}.key")
        elif isinstance(arg, ScaleArg):
            others.append(f"None if {name} is None else _scale({name})")
        elif isinstance(arg, ValueArg):
            # Ranges and the like are values that no `supports` may look into.
            # The class too: 1 and 1.0 are True to a dict.
            known = f"{name} is None" if arg.off is None else f"{name}.__class__, {name} == {arg.off!r}"
            others.append(f"{name}.__class__, {name}" if arg.choices else known)
        else:
            one = _tensor_key(name, arg, static, name in shaped or name in ranked[:1])
            parts.append(f"None if {name} is None else ({', '.join(one)})" if arg.optional else ", ".join(one))
    if ranked:
        # Under torch.jit.trace a size is a tensor: what is traced has no key.
        parts.append(f"{shape_name(ranked[0])}[0].__class__")

    def every(test: str, names: Sequence[str]) -> str:
        return " and ".join(
            f"({n} is None or {test.format(n)})" if tensors[n].optional else test.format(n) for n in names
        )

    def some(test: str, names: Sequence[str]) -> str:
        return " or ".join(
            f"{n} is not None and {test.format(n)}" if getattr(arguments[n], "optional", False) else test.format(n)
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
            f"{n}.data_ptr()" if not tensors[n].optional else f"16 if {n} is None else {n}.data_ptr()" for n in names
        ]
        addresses = [f"(_at_{n} := {a})" if n in floats else a for n, a in zip(names, addresses, strict=True)]
        parts.append(f"0 in ({', '.join(addresses)},) and _memory({', '.join(names)})")
    if floats:
        bits = " | ".join(f"_at_{n}" for n in floats)
        parts.append(f"({bits}) & 15 and _alignments({', '.join(floats)})")
    real = [n for n in floats if may_be(arguments, tensors[n], "is_floating_point", "is_complex")]
    if real:
        # torch refuses to make an integer tensor with its negative bit set.
        parts.append(some("{}.is_neg()", real))
    if any(may_be(arguments, tensors[n], "is_complex") for n in real):
        parts.append(some("{}.is_conj()", real))
    for derived, to in ((real, parts), (pools, others)):
        if derived:
            grad = some("{}.requires_grad", derived)
            dual = f"_forward._current_level >= 0 and _tangents({', '.join(derived)})"
            to.append(f"_grad() and ({grad}) or {dual}")
    return tuple("(" + ", ".join([*found, ""]) + ")" for found in (parts, others))  # type: ignore[return-value]


def may_be(arguments: Mapping[str, Arg], arg: TensorArg, *kinds: str) -> bool:
    """Whether one of an argument's dtypes is such a one, e.g. ``is_complex``."""
    if isinstance(arg.dtypes, str):
        like = arguments[arg.dtypes]
        return not isinstance(like, TensorArg) or may_be(arguments, like, *kinds)
    return any(getattr(d, kind) for d in arg.dtypes for kind in kinds)


def _tensor_key(name: str, arg: TensorArg, static_names: frozenset[str], shaped: bool) -> list[str]:
    """Dtype, rank and static dims of one tensor."""
    static = {(a, i) for a in arg.alternatives for i, d in enumerate(a) if d in static_names}
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


def size_groups(arguments: Mapping[str, Arg], static: frozenset[str]) -> list[list[tuple[str, int]]] | None:
    """The (argument, dim) that have one dynamic size, first one that is always there if any is; None: no place of a
    size says so much."""
    groups: dict[tuple[tuple[str, int], ...], list[tuple[str, int]]] = {}
    for name, arg in arguments.items():
        for i in range(min(map(len, arg.alternatives)) if isinstance(arg, TensorArg) else 0):
            where = tuple((a[i], i) for a in arg.alternatives)  # type: ignore[union-attr]
            if len(set(where)) == 1 and where[0][0] not in static:
                groups.setdefault(((where[0][0], -1),), []).append((name, i))
            elif where[0][0] not in static:
                groups.setdefault(where, []).append((name, i))
    owners: dict[str, set[Any]] = {}
    for where in groups:
        for d, _ in where:
            owners.setdefault(d, set()).add(where)
    if any(len(found) > 1 for found in owners.values()):
        return None
    return [sorted(places, key=lambda p: getattr(arguments[p[0]], "optional", False)) for places in groups.values()]


def sizes_source(
    arguments: Mapping[str, Arg], static: frozenset[str], shape: Callable[[str], str] = "{}.shape".format
) -> str:
    """Python source of an expression that is true where the dynamic sizes of a call disagree.

    `shape` names a shape, given an argument's name.

    A size that stands in no one place (its tensor may have several ranks) is told by the whole check instead,
    unless all that have it are alike in that.
    """
    groups = size_groups(arguments, static)
    if groups is None:
        return "True"
    tests = []
    for (first, i), *rest in groups:
        for name, j in rest:
            absent = [f"{n} is None or " for n in (first, name) if getattr(arguments[n], "optional", False)]
            tests.append(f"({''.join(absent)}{shape(first)}[{i}] == {shape(name)}[{j}])")
    return f"not ({' and '.join(tests)})" if tests else "False"


def shape_name(argument: str) -> str:
    """What the shape of an argument is called in the source of a key."""
    return f"_shape_{argument}"


def scale_key(scale: Any) -> Any:
    """The part of a scale that selection and checks may know."""
    if isinstance(scale, Tensor):
        flaw = not scale.data_ptr() or scale.is_neg() or _memory.tracked(scale) is not None
        return (scale.dtype, scale.device, scale.numel() == 1, flaw)
    return (type(scale), scale == 0, is_scale(scale))


def _devices(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(None if t is None else t.device for t in tensors)


def _strides(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(t is None or t.is_contiguous() or stride_class(t) for t in tensors)


def _alignments(*tensors: Tensor | None) -> tuple[bool, ...]:
    return tuple(t is None or not t.data_ptr() & 15 for t in tensors)


def _in_memory(*tensors: Tensor | None) -> tuple[bool, ...]:
    return tuple(t is None or t.data_ptr() != 0 or t.numel() == 0 for t in tensors)


def _tangents(*values: Any) -> bool:
    return any(_memory.tracked(t) is not None for value in values for t in tensors_of(value))


KEY_NAMES: dict[str, Any] = {
    "_devices": _devices,
    "_strides": _strides,
    "_alignments": _alignments,
    "_memory": _in_memory,
    "_scale": scale_key,
    "_tangents": _tangents,
    "_grad": torch.is_grad_enabled,
    "_forward": torch.autograd.forward_ad,
}
"""What `OpSpec.key_source` refers to."""
