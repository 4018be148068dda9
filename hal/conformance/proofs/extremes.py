"""Extreme values in lengths, offsets, indptrs and slots: every pair of them, where a sum or a difference would wrap.

A kernel that subtracts before it compares is right on every value that a test draws, and on the largest ones as long
as its compiler takes a wrapped difference for what it is. LLVM need not: signed arithmetic that may be said not to wrap
makes the test for the wrap disappear. So here every ordered pair of extremes stands once in every two arguments that
describe the same thing (a start and an end, a prefix and a length, a row and a length, the two slots of a pair), and
next to each other in every single argument (the ends of a request in an indptr): once alone in a batch of three, where
what comes after it shows what it did to the sums, and once in a batch of all of them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hal._errors import ArgumentError
from hal.conformance._arena import POISONS
from hal.conformance._cases import index_arguments, spread
from hal.conformance._hands import Died
from hal.conformance._verdict import Failure
from hal.conformance.execute import Refused
from hal.conformance.proofs.fresh import is_range
from hal.ops.spec import FLOATS, INDEX, OpSpec, ValueArg

if TYPE_CHECKING:
    from hal.conformance.proofs.run import Run

VALUES: dict[torch.dtype, tuple[int, ...]] = {
    torch.int64: (-(2**63), -(2**62), -1, 0, 1, 4, 7, 2**31, 2**62, 2**63 - 1),
    torch.int32: (-(2**31), -1, 0, 1, 4, 7, 2**31 - 1),
}
PLAIN = (0, 1, 7, 2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**70)
"""For a number that is no tensor: Python's ints have no end."""
SIZE = 3
"""Requests in a batch in which a pair is alone."""
WAYS = (("bound", POISONS[1], "end"), ("dispatched", POISONS[0], "start"))
"""How it is called, the poison, and the side on which the guard page is."""
SOME = 16
"""Pairs in a batch, on a lane that stands in for a device."""
FEW = 5
"""Batches of three for every two arguments, on a lane that stands in for a device: evenly among all."""
COSTLY = 16
"""The same for attention, whose truth in float64 takes a thousand times as long as that of a list."""


def prove(run: Run) -> None:
    """All pairs; on a lane that stands in for a device a sample: `SOME` at once, and `FEW` alone. Of attention all
    pairs in batches, and `COSTLY` alone.
    """
    base, most = params(run), min(room(run), SOME) if run.slow else room(run)
    for names, dtype, apart in subjects(run, base):
        todo = list(itertools.product(VALUES[dtype], VALUES[dtype]))
        random.Random(f"{run.op}{names}{dtype}").shuffle(todo)
        for first in range(0, most if apart or run.slow else len(todo), most):
            several = batch(run, base, names, dtype, todo[first : first + most])
            call(run, several, names, WAYS[:1])
            if not run.slow:
                call(run, backwards(several), names, WAYS[1:])
        alone = list(zip(todo, [*todo[1:], todo[0]], strict=True)) if apart else []
        if run.slow:
            alone = spread(alone, FEW) if dtype == torch.int64 else []
        elif "logit_cap" in run.spec.args:
            alone = spread(alone, COSTLY)
        plainly, numbered = (f"{names} {dtype} {kind}" for kind in ("plain", "numbers"))
        for turn, (pair, other) in enumerate(alone):
            # First, or after a request that is as the contract has it; and last, after another pair.
            made = three(run, base, names, dtype, turn % 2, pair, other, turn)
            ways = WAYS[:1] if run.slow else WAYS
            asked = {**made, **plain(run.spec, turn)}
            if turn % 2 and numbered and is_allowed(run.spec, asked):
                try:
                    call(run, asked, names, ways, numbered)
                    continue
                except Refused:
                    # As features may be.
                    numbered = ""
            call(run, made, names, ways, plainly)
    run.control()


def room(run: Run) -> int:
    """How large a batch of this op may be, by its own account."""
    sizes = [run.spec.ragged[n][1] for n in first_size(run.spec)]
    return max([SIZE, *sizes])


def first_size(spec: OpSpec) -> list[str]:
    """The parameter of `make` that is the size of a batch, where there is one."""
    return list(itertools.islice((n for n, r in spec.ragged.items() if is_range(r)), 1))


def params(run: Run) -> dict[str, Any]:
    """Of the sample that has most arguments of those in question."""
    names = index_arguments(run.spec)

    def given(sample: Any) -> int:
        made = run.spec.make(**sample.params)
        return sum(isinstance(made[n], Tensor) and bool(made[n].numel()) for n in names)

    return dict(max(run.busy, key=given).params)


def subjects(run: Run, base: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], torch.dtype, bool]]:
    """Which two arguments a pair goes to, as what, and whether alone as well; twice the same one: neighbours in it.

    Where the entries of a batch have nothing to do with one another, all index tensors are as long as it is, and a pair
    that stands beside others is as good as alone.
    """
    made = make_sized(run, base, SIZE)
    there = [n for n in index_arguments(run.spec) if isinstance(made[n], Tensor)]
    ragged = len({t.shape for t in made.values() if isinstance(t, Tensor) and t.ndim == 1 and t.dtype in INDEX}) > 1
    for dtype in VALUES:
        for a, b in itertools.combinations_with_replacement(there, 2):
            if made[a].shape == made[b].shape and (a != b or made[a].shape[0] != SIZE):
                yield (a, b), dtype, ragged and made[a].shape[0] in (SIZE, SIZE + 1)
        if len(there) == 1 and made[there[0]].shape[0] == SIZE:
            yield (there[0], there[0]), dtype, False


def make_sized(run: Run, base: Mapping[str, Any], size: int, seed: int = 0) -> dict[str, Any]:
    """Arguments as the op makes them. What lies in slots that are not listed is a number here: now they may be."""
    made = run.make(**{**base, **dict.fromkeys(first_size(run.spec), size), "seed": seed})
    for t in made.values():
        if isinstance(t, Tensor) and t.dtype in FLOATS:
            t.nan_to_num_(0.5, 2.0, -2.0)
    return made


def batch(
    run: Run, base: Mapping[str, Any], names: tuple[str, str], dtype: torch.dtype, pairs: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Arguments with all pairs in one call, as many as fit."""
    made = make_sized(run, base, len(pairs))
    a, b = names
    if a == b:
        return {**made, a: fill(made[a], dtype, enumerate(itertools.chain(*pairs)))}
    return {
        **made,
        a: fill(made[a], dtype, enumerate(x for x, _ in pairs)),
        b: fill(made[b], dtype, enumerate(y for _, y in pairs)),
    }


def backwards(made: Mapping[str, Any]) -> dict[str, Any]:
    return {n: v.flip(0) if isinstance(v, Tensor) and v.dtype in INDEX and v.ndim == 1 else v for n, v in made.items()}


def three(
    run: Run,
    base: Mapping[str, Any],
    names: tuple[str, str],
    dtype: torch.dtype,
    at: int,
    pair: tuple[int, int],
    other: tuple[int, int],
    turn: int,
) -> dict[str, Any]:
    """Arguments of a batch of three with `pair` in place `at`, and `other` in the last."""
    made = make_sized(run, base, SIZE, seed=turn)
    a, b = names
    if a == b:
        made[a] = fill(made[a], dtype, [(at, pair[0]), (at + 1, pair[1]), (at + 2, other[1])])
    else:
        made[a] = fill(made[a], dtype, [(at, pair[0]), (2, other[0])])
        made[b] = fill(made[b], dtype, [(at, pair[1]), (2, other[1])])
    return made


def plain(spec: OpSpec, turn: int) -> dict[str, int]:
    """A value for each number that asks for something, as a window's width does."""
    numbers = [n for n, a in spec.args.items() if isinstance(a, ValueArg) and type(a.off) is int]
    return dict.fromkeys(numbers, PLAIN[turn // 2 % len(PLAIN)])


def is_allowed(spec: OpSpec, made: Mapping[str, Any]) -> bool:
    """Does the contract take such arguments? Of a number some take an int64 alone."""
    try:
        spec.check_call(made)
    except ArgumentError:
        return False
    return True


def fill(t: Tensor, dtype: torch.dtype, values: Iterable[tuple[int, int]]) -> Tensor:
    """`t` as `dtype`, with these in place of what it has there."""
    limits = torch.iinfo(torch.int32)
    out = (t.clamp(limits.min, limits.max) if dtype == torch.int32 else t).to(dtype, copy=True)
    for i, x in values:
        if i < out.shape[0]:
            out[i] = x
    return out


def call(
    run: Run, made: dict[str, Any], names: tuple[str, str], ways: Sequence[tuple[str, int, str]], like: str = ""
) -> None:
    """A call each way, judged. `like`: calls of this name have one launcher, since looking for it takes longer."""
    wants = run.spec.oracle(made)
    shown = ", ".join(f"{n}={made[n][: SIZE + 1].tolist()}" for n in dict.fromkeys(names))
    for how, poison, side in ways:
        try:
            run.execute(made, wants, how, poison, side=side if run.device == "cpu" else "", like=like)
        except Failure as e:
            raise Failure(f"with {shown}: {e}") from None
        except Died as e:
            raise Died(f"{how} call with {shown}: {e}", e.crashed) from None
