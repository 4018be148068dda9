"""Several calls: equal ones, ones of other sizes in turn, and eight threads of them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from torch import Tensor

from hal.conformance._arena import POISONS, Placed
from hal.conformance._cases import spread
from hal.conformance._result import NOT_APPLICABLE, Skip
from hal.conformance._truths import names_nothing
from hal.conformance._verdict import Failure, Ret
from hal.conformance.execute import BOUND, DISPATCHED
from hal.conformance.proofs.fresh import is_range
from hal.ops.proofs.judge import Want, same_bits

if TYPE_CHECKING:
    from hal.conformance.proofs.run import Run


def determinism(run: Run) -> None:
    arguments, wants = run.example(run.sample().params)
    first: list[Tensor] | None = None
    for turn in range(3 if run.slow else 5):
        placed = run.place(arguments, POISONS[1])
        said = run.ask(placed)
        ret = Ret.of(said["ret"], placed)
        run.judge(wants, placed, ret)
        if not said["deterministic"]:
            raise Skip(NOT_APPLICABLE, "not declared deterministic")
        now = [b.values() for b in placed.all()] + ([] if ret.values is None else [ret.values])
        if first is None:
            first = now
        for a, b in zip(first, now, strict=True):
            if not bool(same_bits(a, b).all()):
                raise Failure(f"nondeterministic, though declared deterministic: call {turn + 1} has other bits")
    if names_nothing(wants):
        run.control()


def sequence(run: Run) -> None:
    """Sizes of every class that a launcher may specialise on — 1, a multiple of 16, neither — in turn,
    back to earlier ones, and the empty batch between, all with one signature but for what is drawn."""
    base = dict(run.busy[0].params)
    sizes = [n for n, r in run.spec.ragged.items() if is_range(r)]
    worst = 0
    for name in sizes[:1] if run.slow else sizes:
        low, high = run.spec.ragged[name]
        order = (16, 1, 17, 16, low, 2) if run.slow else (16, 1, 17, 16, 2, 33, low, 48, 15, high, 1, 5)
        for turn, size in enumerate(order):
            if low <= size <= high:
                run.prove({**base, name: size, "seed": turn}, ways=((BOUND, POISONS[turn % 2]),))
                worst += 1
    if not worst:
        raise TypeError(f"{run.op}: nothing is ragged")
    for sample in (*spread(run.busy, 1 if run.slow else 5), run.busy[0]):
        for how in (BOUND, DISPATCHED):
            run.prove(sample.params, ways=((how, POISONS[1]),))


def threads(run: Run) -> None:
    count, rounds = (4, 1) if run.slow else (8, 8)
    base = dict(run.busy[0].params)
    sizes = [n for n, r in run.spec.ragged.items() if is_range(r)]
    if sizes:
        low, high = run.spec.ragged[sizes[0]]
        base[sizes[0]] = max(low, min(high, 5 if run.slow else 48))
    work: list[tuple[Placed, dict[str, Want]]] = []
    for turn, i in itertools.product(range(rounds), range(count)):
        arguments, wants = run.example({**base, "seed": 100 * i + turn})
        work.append((run.place(arguments, POISONS[turn % 2]), wants))
    said = run.do("threads", *(placed for placed, _ in work), count=count)
    for n, ((placed, wants), one) in enumerate(zip(work, said["calls"], strict=True)):
        if one["outcome"] != "returned":
            raise Failure(f"race between threads: thread {n % count} raised {one['type']}: {one['text']}")
        try:
            run.judge(wants, placed, Ret.of(one["ret"], placed))
        except Failure as e:
            raise Failure(f"race between threads: right alone, but wrong among {count} threads: {e}") from None
