# mypy: disable-error-code="no-untyped-call, unused-ignore"
# torch._dynamo has untyped functions.
"""A row of a table: build every implementation, compare it with the op's reference, capture it, time all in turn.

One that can't be built, is wrong or can't be captured is left out of its row, whose ``failed`` says why.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal import ops
from hal.bench import OURS, Row, kept, launcher, timing
from hal.ops.spec import FP8
from hal.triton import launch

Args = dict[str, Any]
"""One set of an op's arguments, by name, in its order."""
Build = Callable[[Args], Callable[[], Any]]
"""From a set of arguments a call on them. A dict that the call returns has outputs by the argument they replace."""
TOLERANCE = {torch.bfloat16: 2**-7, torch.float8_e4m3fn: 4e-2}
"""Of the norm of the difference to the reference's output, over that output's. In bf16 each of an unfused sequence's
three roundings (norm, weight, rope) and the reference's own is 1.7e-3 of it; a wrong angle or weight is far more."""
CLOSER = {"rope_kv_write": {torch.bfloat16: 3e-3}}
"""Of an op whose peers round as often as it does."""


def time_row(
    about: Row,
    impls: Mapping[str, Callable[[], Callable[[int], Any]]],
    sets: int,
    check: Callable[[str, Callable[[], Any]], None],
    *,
    per_graph: int = 96,
    rounds: int = 25,
    host: int = 300,
    host_of: Iterable[str] | None = None,
) -> Row:
    """Device and host microseconds of what can be built, is right and can be captured; why of the rest.

    Args:
        about: the fields that name the case.
        impls: implementation -> what builds its call on the i-th set of inputs.
        sets: how many there are.
        check: raises unless a call on the first set is right.
        per_graph: calls a graph.
        rounds: replays of each graph.
        host: calls whose host time is taken; 0: of none.
        host_of: whose; None: everyone's.
    """
    calls: dict[str, Callable[[int], Any]] = {}
    failed: dict[str, str] = {}
    for name, build in impls.items():
        try:
            call = build()
            first = functools.partial(call, 0)
            check(name, first)
            timing.capture(first)
        except Exception as e:  # a peer that fails must not take the others with it
            failed[name] = reason(e)
            continue
        calls[name] = call
    row = dict(about)
    if calls:
        row["device_us"] = timing.device_us(calls, sets, per_graph, rounds)
        of = {n: c for n, c in calls.items() if host_of is None or n in host_of}
        if host and of:
            row["host_us"] = timing.host_us(of, sets, host)
    if failed:
        row["failed"] = failed
    return row


def op_row(
    about: Row,
    sets: Sequence[Args],
    builds: Mapping[str, Build],
    *,
    outputs: Sequence[str] = (),
    nbytes: int = 0,
    **times: Any,
) -> Row:
    """`time_row` of an op on sets of its arguments, judged by its reference.

    Args:
        about: its ``op`` is the op.
        builds: each is given every set.
        outputs: the arguments that are compared; empty: all that the op writes.
        nbytes: what a call must move, read and written; 0: the row has no GB/s.
        times: as of `time_row`.
    """
    op = about["op"]
    before, want = expect(op, sets[0], outputs)

    def check(name: str, call: Callable[[], Any]) -> None:
        # What ran before this one has left the right rows, or rotated q once more.
        restore(sets[0], before)
        compare(name, op, sets[0], call, want)

    def every(build: Build) -> Callable[[], Callable[[int], Any]]:
        def made() -> Callable[[int], Any]:
            fns = [build(a) for a in sets]
            return lambda i: fns[i]()

        return made

    row = time_row(about, {n: every(b) for n, b in builds.items()}, len(sets), check, **times)
    if nbytes and "device_us" in row:
        gbs = {n: nbytes / us / 1e3 for n, us in row["device_us"].items()}
        row["device_gbs"] = {**gbs, "copy": ceiling()}
    return row


def table_of(cases: Iterable[Callable[[], Row]]) -> list[Row]:
    """The rows of all cases; one that can't even be made is a row that says so. `Stopped` has those until then."""
    return kept(_row_of(case) for case in cases)


def _row_of(case: Callable[[], Row]) -> Row:
    try:
        return case()
    except Exception as e:
        traceback.print_exc()
        return {**getattr(case, "keywords", {}), "failed": {OURS: reason(e)}}
    finally:
        timing.free_memory()


def reason(e: Exception) -> str:
    return f"{type(e).__name__}: {e}".splitlines()[0][:300]


@functools.cache
def ceiling() -> float:
    """GB/s of a plain copy, measured once a run."""
    return timing.copy_gbs()


# --- implementations --------------------------------------------------------------------------------


def ours(op: str) -> Build:
    """cuda's launcher, called as engines call it; what is no argument of the op is left out."""
    parameters = inspect.signature(ops.get_spec(op).reference).parameters.values()

    def build(a: Args) -> Callable[[], Any]:
        given = [p for p in parameters if p.name in a]
        return functools.partial(
            launcher("cuda", op),
            *(a[p.name] for p in given if p.kind is not p.KEYWORD_ONLY),
            **{p.name: a[p.name] for p in given if p.kind is p.KEYWORD_ONLY},
        )

    return build


def positional(fn: Callable[..., Any], *names: str) -> Build:
    """`fn` of these arguments, or of all."""
    return lambda a: functools.partial(fn, *(a[n] for n in names or a))


def compiled(fn: Callable[..., Any], *names: str) -> Build:
    """`fn` of these arguments through torch.compile, for exactly these sizes."""
    torch._dynamo.reset()
    return positional(torch.compile(fn, dynamic=False), *names)


# --- launches ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launched:
    """One launch of a kernel, not started: to be bound again with other constants, and started with these arguments."""

    kernel: launch.Kernel
    static: dict[str, Any]
    grid: Any
    args: tuple[Any, ...]

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by the kernel's names for them."""
        return dict(zip((p.name for p in self.bind().args), self.args, strict=True))

    def bind(self, **change: Any) -> launch.Launch:
        return self.kernel.bind(**{**self.static, **change})


def record_launches(call: Callable[[], Any]) -> list[Launched]:
    """What `call` launches, after a first call of it, which is started: what it asks of the device is known then."""
    call()
    made: list[Launched] = []

    def record(bound: launch.Launch, grid: Any, *args: Any) -> None:
        made.append(Launched(bound.kernel, bound.static, grid, args))

    before, launch.Launch.recorder = launch.Launch.recorder, record
    launch.forget()
    try:
        call()
        made.clear()  # among them some that were not due, made ready alone
        call()
    finally:
        launch.Launch.recorder = before
        launch.forget()
    return made


# --- what an op writes, and whether it is right -----------------------------------------------------


def _rows(a: Args) -> Tensor:
    """The slots that a call may touch."""
    touched: Tensor = torch.cat([a["src_slots"], a["dst_slots"]]).unique() if "pool" in a else a["slots"]
    return touched


def _bytes(t: Tensor) -> Tensor:
    """As something that torch can index, which fp8 is not."""
    return t.view(torch.uint8) if t.dtype in FP8 else t


def _is_cache(name: str) -> bool:
    return name.endswith("cache")


def read(op: str, a: Args, outputs: Sequence[str] = ()) -> dict[str, Tensor]:
    """Copies of what a call may change, of caches the rows of its slots."""
    if "pool" in a:
        return {half: getattr(a["pool"], half)[:, _rows(a)] for half in ("k", "v")}
    return {
        name: _bytes(a[name])[a["slots"]].view(a[name].dtype) if _is_cache(name) else a[name].clone()
        for name in outputs or ops.get_spec(op).mutated
    }


def restore(a: Args, saved: Mapping[str, Tensor]) -> None:
    for name, was in saved.items():
        if "pool" in a:
            getattr(a["pool"], name)[:, _rows(a)] = was
        elif _is_cache(name):
            _bytes(a[name])[a["slots"]] = _bytes(was)
        else:
            a[name].copy_(was)


def expect(op: str, a: Args, outputs: Sequence[str] = ()) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(before, after): what the reference makes of it. The arguments are left as they were."""
    before = read(op, a, outputs)
    spec = ops.get_spec(op)
    result = spec.reference(**{name: a[name] for name in a if name in spec.args})
    want = read(op, a, outputs) or {"return": result}
    restore(a, before)
    same = [name for name in before if torch.equal(_bytes(want[name]), _bytes(before[name]))]
    if same:
        raise AssertionError(f"{op}: these inputs change nothing in {', '.join(same)}: nothing would be checked")
    return before, want


def compare(name: str, op: str, a: Args, call: Callable[[], Any], want: Mapping[str, Tensor]) -> None:
    """Raises unless the call's outputs are the reference's.

    Bit for bit where bytes move and of integers, else within `TOLERANCE`.
    """
    returned = call()
    got = {"return": returned} if "return" in want else read(op, a, [n for n in want if n in a])
    got |= returned if isinstance(returned, dict) else {}
    for part, right in want.items():
        if (op in ("kv_move", "kv_write", "mla_kv_write") and right.dtype not in FP8) or not right.is_floating_point():
            if not torch.equal(got[part], right):
                raise AssertionError(f"{op}: {name}: wrong rows in {part}")
            continue
        truth = right.double()
        error = float((got[part].double() - truth).norm() / truth.norm())
        if not error < {**TOLERANCE, **CLOSER.get(op, {})}[right.dtype]:
            raise AssertionError(f"{op}: {name}: {part} is off by {error:.2g}")
