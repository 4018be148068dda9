"""What an op's call of one kind starts, found by one key: from the arguments to the launches at once.

A launcher says once how the launches of a call follow from its arguments (a `Plan`): which arguments a kernel gets, and
which numbers follow from lengths. On a device ``_plans.c`` does that for every later call of the kind, without Python;
here is what it does, for calls of a new kind, other lanes, and machines without a C compiler. A dispatched call was
read before (``hal/ops/_call.c``), and what was read is handed on.

The key of a call has all that a plan may depend on: of a tensor device, dtype, alignment, sizes but the first, strides,
and which earlier argument begins where it does; of an int or bool its value; of a float its sign. So a plan may use the
first sizes, pointers and floats only by naming them.

Example:
    >>> @plans                                                                    # doctest: +SKIP
    ... def _copy(src, dst):
    ...     run = copy.bind(BLOCK=1024, num_warps=4)
    ...     return Plan((Step(run, length("src", per=1024), ("src", "dst", length("src"))),))
    >>> @_copy.launcher                                                           # doctest: +SKIP
    ... def copied(src, dst):
    ...     return _copy.start(src, dst)
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hal.ops import _native
from hal.triton import launch

Launcher = TypeVar("Launcher", bound=Callable[..., Any])
MOST = 2**31 - 2**10
"""The longest that an argument may be whose plans are remembered: what is a tile past it is still an int32."""
ANY = 2**62
"""More than any length: of a range that has no end."""
LIMIT = 4096
"""Kinds of calls that are remembered of an op, forgotten all at once."""
STEPS = 16
"""Launches that a plan has at most: ``_plans.c`` has room for so many."""
COUNTERS = 2048
"""fp32 zeros in front of each scratch, by which the programs of a launch count each other."""
CAPTURES = 256
"""Captured graphs, of a device, that get counters which nobody needs to clear."""


OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "*": operator.mul,
    "/": operator.floordiv,
    "u": lambda a, b: -(-a // b),
    "<": min,
    ">": max,
    "s": operator.lshift,
    "g": lambda a, b: (a // b).bit_length() - 1,
}
"""What ``_plans.c`` does with two numbers, of which none is negative but in sums."""


@dataclass(frozen=True)
class Size:
    """A number that follows from lengths; a tensor's length is its first size."""

    of: int | str | tuple[str, Size, Size] = 0
    """A constant, the length of an argument, or one of `OPERATIONS` on two others."""

    def _with(self, op: str, other: int | Size) -> Size:
        return Size((op, self, other if isinstance(other, Size) else Size(other)))

    def __add__(self, other: int | Size) -> Size:
        return self._with("+", other)

    def times(self, other: int | Size) -> Size:
        return self if other == 1 else self._with("*", other)

    def per(self, other: int | Size) -> Size:
        """Divided, rounded up."""
        return self if other == 1 else self._with("u", other)

    def within(self, other: int | Size) -> Size:
        """How often it fits into `other`."""
        return (other if isinstance(other, Size) else Size(other))._with("/", self)

    def at_least(self, other: int | Size) -> Size:
        return self._with(">", other)

    def at_most(self, other: int | Size) -> Size:
        return self._with("<", other)

    def log2(self) -> Size:
        """Rounded down, of a number that is not 0."""
        return self._with("g", 1)

    def doubled(self, times: Size) -> Size:
        return self._with("s", times)

    def value(self, lengths: Mapping[str, int]) -> int:
        if isinstance(self.of, tuple):
            op, a, b = self.of
            return OPERATIONS[op](a.value(lengths), b.value(lengths))
        return lengths[self.of] if isinstance(self.of, str) else self.of


def length(argument: str, *, by: int = 1, per: int = 1, times: int = 1) -> Size:
    """times * ceil(length * by / per)"""
    return Size(argument).times(by).per(per).times(times)


@dataclass(frozen=True)
class Scratch:
    """A pointer to the plan's scratch, behind its first `elements`."""

    elements: Size


@dataclass(frozen=True)
class Counters:
    """A pointer to `COUNTERS` zeros, which a launch leaves as zeros: no other's programs run while it counts."""


class Step(NamedTuple):
    """One launch of a plan."""

    run: launch.Launch
    grid: Size
    """Programs, in one dimension; where there are none, nothing is started."""
    args: tuple[Any, ...]
    """Of the kernel: names of the call's arguments, `Size`, `Scratch`, `Counters`, constants. Numbers go as floats."""
    where: tuple[tuple[str, int, int], ...] = ()
    """(argument, low, high): started only where low < its length <= high; at most three."""


RESULT = "return"
"""What a kernel's arguments call the tensor that a plan allocates."""


class Result(NamedTuple):
    """A new contiguous tensor like an argument; `last`: its last size, if not the argument's (which is contiguous)."""

    like: str
    last: int = -1
    dtype: torch.dtype | None = None
    """If not the argument's."""


class Plan(NamedTuple):
    """What a call starts: at most `STEPS` launches, one after the other."""

    steps: tuple[Step, ...]
    scratch: Size | None = None
    """Elements of fp32 scratch that they share: one a device and stream, kept; a captured graph gets its own."""
    returns: str | Result | None = None
    """An argument, by its name, or a new tensor."""
    as_graph: Size | None = None
    """Where it is above 0, several launches that share scratch are begun at once (``_graphs.c``): less of the host, and
    more of a device that is busy. For calls that the host takes longer for than the device."""


class plans(dict[Any, Plan]):
    """The plans of one op by their keys; made of the function that makes one of a call's arguments, the op's in order.

    ``start`` is called with the arguments by position.
    """

    def __init__(self, make: Callable[..., Plan]) -> None:
        self.make = make
        self.names = tuple(inspect.signature(make).parameters)
        self._scratch: dict[tuple[int, int], Tensor] = {}
        self._outgrown: list[Tensor] = []
        """Earlier scratch: a captured graph may still write to it."""
        self._spare: dict[int, list[Tensor]] = {}
        """Counters of graphs to come, by device; and of those that were captured, by capture and stream."""
        self._captured: dict[tuple[int, int], Tensor] = {}
        helper = launch._helper() if launch.lane() == "device" else None
        self.native: Any = helper and helper.Plans(self._start, len(self.names))
        """The plans of ``_plans.c``, where there are."""
        self.start: Callable[..., Any] = self.native or partial(self._start, None)
        launch.keeps(self)

    def launcher(self, fn: Launcher) -> Launcher:
        """Makes `fn` known as that which does nothing but start these plans, so that what was read may be handed on."""
        if self.native is not None:
            _native.hand_over(fn, self.native.handed)
        return fn

    def clear(self) -> None:
        if self.native is not None:
            self.native.forget()
        super().clear()

    def _start(self, call: Any, *args: Any) -> Any:
        given = dict(zip(self.names, args, strict=True))
        lengths = {n: a.shape[0] if a.ndim else 1 for n, a in given.items() if isinstance(a, Tensor)}
        key = key_of(args) if call is None else call.key
        # A launcher may refuse what is too long, and says so in making the plan.
        plan = self.get(key) if max(lengths.values()) <= MOST else None
        new = plan is None
        if plan is None:
            plan = self.make(*args)
            if len(plan.steps) > STEPS:
                raise ValueError(f"a plan of at most {STEPS} launches was expected, not of {len(plan.steps)}")
        if isinstance(plan.returns, Result):
            like = given[plan.returns.like]
            shape = like.shape if plan.returns.last < 0 else (*like.shape[:-1], plan.returns.last)
            given[RESULT] = torch.empty(shape, dtype=plan.returns.dtype or like.dtype, device=like.device)
        scratch = None
        if plan.scratch is not None:
            scratch = self._workspace(args[0].device, COUNTERS + plan.scratch.value(lengths))

        def value(of: Any) -> Any:
            if isinstance(of, str):
                return float(given[of]) if isinstance(given[of], int) else given[of]
            if isinstance(of, Scratch):
                return scratch[COUNTERS + of.elements.value(lengths) :]  # type: ignore[index]
            if isinstance(of, Counters):
                return counters
            return of.value(lengths) if isinstance(of, Size) else of

        started: list[tuple[Step, int]] = []
        others: list[tuple[Step, int]] = []
        reached = False
        for step in plan.steps:
            within = all(low < lengths[name] <= high for name, low, high in step.where)
            reached |= within
            programs = step.grid.value(lengths)
            (started if within and programs else others).append((step, programs))
        counters = scratch
        if scratch is not None and any(isinstance(of, Counters) for step, _ in started for of in step.args):
            counters = self._counters(scratch)
        if new and reached:
            # All at once: a request must not wait for the compiler because more tokens came.
            for step, _ in others:
                step.run.prepare(*map(value, step.args))
            if len(self) >= LIMIT:
                self.clear()
            self[key] = plan
        for step, programs in started:
            step.run.start((programs, 1, 1), *map(value, step.args))
        if call is not None and launch.lane() == "device" and all(step.run.native is not None for step in plan.steps):
            self._teach(plan, call)
        return given.get(RESULT if isinstance(plan.returns, Result) else plan.returns or "")

    def _teach(self, plan: Plan, call: Any) -> None:
        """Has ``_plans.c`` do the same from now on."""
        at = {name: i for i, name in enumerate((*self.names, RESULT))}
        numbers: list[tuple[str, int, int]] = []
        places: dict[Size, int] = {}

        def number(size: Size) -> int:
            """Where among the numbers of the plan it is."""
            if size not in places:
                if isinstance(size.of, tuple):
                    op, a, b = size.of
                    made = op, number(a), number(b)
                else:
                    made = ("l", at[size.of], 0) if isinstance(size.of, str) else ("n", size.of, 0)
                places[size] = len(numbers)
                numbers.append(made)
            return places[size]

        def source(of: Any) -> Any:
            if isinstance(of, str):
                return "a", at[of]
            if isinstance(of, Counters | Scratch):
                return "w", number(of.elements + COUNTERS if isinstance(of, Scratch) else Size())
            return ("s", number(of)) if isinstance(of, Size) else of

        steps = tuple(
            (
                step.run.native,
                tuple((at[name], low, high) for name, low, high in step.where),
                number(step.grid),
                tuple(map(source, step.args)),
            )
            for step in plan.steps
        )
        for (device, stream), found in self._scratch.items():
            self.native.lend(device, stream, found.numel(), found.data_ptr())
        returns = plan.returns if isinstance(plan.returns, Result) else Result(plan.returns or "", 0)
        scratch = -1 if plan.scratch is None else number(plan.scratch + COUNTERS)
        as_graph = -1 if plan.as_graph is None else number(plan.as_graph)
        like = at.get(returns.like, -1)
        self.native.learn(call, tuple(numbers), steps, scratch, as_graph, like, returns.last, returns.dtype)

    def _workspace(self, device: torch.device, size: int) -> Tensor:
        """fp32 scratch of at least `size` elements, zeros if it is kept."""
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return torch.empty(size, dtype=torch.float32, device=device)
        at = (device.index, launch._stream(device.index))
        found = self._scratch.get(at)
        if found is None or found.numel() < size:
            if found is not None:
                self._outgrown.append(found)
            room = 1 << (size - 1).bit_length()
            found = self._scratch[at] = torch.zeros(room, dtype=torch.float32, device=device)
        if device.index not in self._spare:
            spare = torch.zeros(CAPTURES, COUNTERS, dtype=torch.float32, device=device)
            # Graphs will be replayed on streams that don't wait for this one. Once a device, beside the compiler.
            made = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
            made.record(torch.cuda.current_stream(device))
            made.synchronize()
            self._spare[device.index] = list(spare.unbind())
        return found

    def _counters(self, scratch: Tensor) -> Tensor:
        """Zeros for a launch with this scratch: in front of it; while a graph is captured, some that only it has."""
        if scratch.is_cuda and not torch.cuda.is_current_stream_capturing():
            return scratch
        spare = self._spare.get(scratch.device.index, []) if scratch.is_cuda else []
        capture = launch._capture(scratch.device.index) if scratch.is_cuda else None
        if capture is not None and capture not in self._captured and spare:
            self._captured[capture] = spare.pop()
        if capture in self._captured:
            return self._captured[capture]
        scratch[:COUNTERS].zero_()
        return scratch


def key_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What tells one kind of calls from another."""
    first: dict[int, int] = {}
    parts: list[Any] = []
    for i, a in enumerate(args):
        if isinstance(a, Tensor):
            at = a.data_ptr()
            where = a.get_device(), a.dtype, at & 15 == 0, first.setdefault(at, i)
            parts.append((where, a.shape[1:], a.stride()))
        else:
            parts.append((a.__class__, (a > 0, a < 0, a == 0) if isinstance(a, float) else a))
    return tuple(parts)
