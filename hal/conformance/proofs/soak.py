"""What one call does not show: a fault in the ten thousandth, memory that grows, a write after the return."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hal.conformance._arena import POISONS, Placed
from hal.conformance._cases import spread
from hal.conformance._truths import names_nothing
from hal.conformance._verdict import Failure, Ret
from hal.conformance.execute import BOUND, DISPATCHED, Refused

if TYPE_CHECKING:
    from hal.conformance.proofs.run import Run

CALLS = {"device": 10_000, "slow": 100}
"""Of a fault in one call of 1,000, 10,000 calls miss all with a probability of 4.5e-5."""
SECONDS = 20.0
"""After which a backend whose calls are slow is let go before the last of them, though never before:"""
LEAST_CALLS = {"device": 500, "slow": 100}
DISPATCHED_EVERY = 5
AT_ONCE = 100
"""Calls between two looks at what they wrote; each has arguments of its own."""
AT_ONCE_BYTES = 1 << 26
LEAK_CALLS = {"device": 1_000, "slow": 20}
LEAK_TRIAL = 25
"""Calls that tell how long one takes: a slow backend's are fewer, and the report says how many."""
LEAK_PER_CALL = 1024
"""Bytes a call by which a process may grow, in the least of three rounds; and at least this many in a round:"""
LEAK_NOISE = 1 << 20
LATER = 1.0
"""Seconds after which what calls have left behind is looked at again."""
LATER_SAMPLES = {"device": 12, "slow": 2}


def plan(lane: str) -> dict[str, Any]:
    """How long a lane is watched, for the report."""
    kind = "device" if lane == "device" else "slow"
    calls = CALLS[kind]
    return {
        "calls": calls,
        "seconds": SECONDS,
        "one_in_a_thousand_escapes": round(0.999**calls, 6),
        "leak_calls": LEAK_CALLS[kind],
        "later_seconds": LATER,
        "later_samples": LATER_SAMPLES[kind],
    }


# --- many calls -------------------------------------------------------------------------------------


class ArgumentCopies:
    """The same arguments many times over, side by side, so that one copy restores and one comparison judges all."""

    def __init__(self, run: Run, arguments: dict[str, Any], most: int) -> None:
        arena = run.caller.arena
        begin = arena.take(0)
        self.placed = [run.place(arguments, POISONS[1])]
        stride = arena.take(0) - begin
        count = max(2, min(most, AT_ONCE_BYTES // stride))
        self.placed += [run.place(arguments, POISONS[1]) for _ in range(count - 1)]
        raw = arena.memory.raw(begin, begin + count * stride)
        self.words = raw.view(torch.int64).view(count, stride // 8)
        self.before = self.words[0].clone()

    def restore(self) -> None:
        self.words.copy_(self.before)


def soak(run: Run) -> None:
    """Equal calls, each restored before and compared after, bit for bit, with the first, which is judged in full."""
    sample = run.busy[0]
    arguments, wants = run.example(sample.params)
    if names_nothing(wants):
        raise TypeError(f"{run.op}: {sample.name} writes nothing")
    kind = "slow" if run.slow else "device"
    calls, least = CALLS[kind], LEAST_CALLS[kind]
    copies = ArgumentCopies(run, arguments, min(AT_ONCE, calls - 1))
    first = copies.placed[0]
    said = run.ask(first)
    own = Ret.of(said["ret"], first)
    run.judge(wants, first, own)
    image = copies.words[0].clone()
    done, begin = 1, time.monotonic()
    while done < calls:
        if done >= least and time.monotonic() - begin > SECONDS:
            run.note = f"{done:,} calls of {calls:,}: as many as {SECONDS:g} s allow"
            return
        copies.restore()
        placed = copies.placed[: calls - done]
        hows = ["bound" if (done + i + 1) % DISPATCHED_EVERY else "dispatched" for i in range(len(placed))]
        # The first time they are told where the arguments lie.
        answers = run.do("many", *(placed if done == 1 else ()), hows=hows)["calls"]
        after = copies.words.clone()
        same = (after == image).all(dim=1).tolist()
        for i, (one, how, answer) in enumerate(zip(placed, hows, answers, strict=True)):
            turn = done + i + 1
            if answer["outcome"] != "returned":
                raise Failure(_late(how, turn, f"raised {answer['type']}: {answer['text']}"))
            ret = Ret.of(answer["ret"], one)
            if same[i] and alike(ret, own):
                continue
            try:
                run.judge(wants, one, ret)
            except Failure as e:
                raise Failure(_late(how, turn, str(e))) from None
            if said["deterministic"]:
                what = "right, but with other bits than the first, though declared deterministic"
                raise Failure(_late(how, turn, what))
        done += len(placed)


def _late(how: str, turn: int, what: str) -> str:
    return f"after {turn - 1:,} right calls, the equal {how} call {turn:,} is not: {what}"


def alike(a: Ret, b: Ret) -> bool:
    """The same kind of thing, with the same bits; an argument that is returned is looked at where it lies."""
    if (a.kind, a.names, a.dtype, a.shape, a.device) != (b.kind, b.names, b.dtype, b.shape, b.device):
        return False
    if a.values is None or b.values is None:
        return a.values is b.values
    return torch.equal(a.values.view(-1).view(torch.uint8), b.values.view(-1).view(torch.uint8))


# --- memory -----------------------------------------------------------------------------------------


def leak(run: Run) -> None:
    sample = run.busy[0]
    run.prove(sample.params, ways=((BOUND, POISONS[1]),))
    placed = run.place(run.example(sample.params)[0])
    for _ in range(2):  # the first is also whatever happens once
        begin = time.monotonic()
        run.do("repeat", placed, calls=LEAK_TRIAL, dispatched_every=DISPATCHED_EVERY)
        slow = (time.monotonic() - begin) / LEAK_TRIAL
    calls = LEAK_CALLS["slow" if run.slow else "device"]
    if slow * calls > SECONDS:
        planned, calls = calls, min(calls, max(LEAK_TRIAL, int(SECONDS / slow)))
        run.note = f"memory after {calls:,} calls instead of {planned:,}: one takes {slow * 1e3:.0f} ms"
    room = max(LEAK_NOISE, calls * LEAK_PER_CALL)
    limits = {
        "tensors alive": calls // 4,
        "Python objects alive": max(calls // 2, 64),
        "bytes of memory": room,
        "bytes of address space": 8 * room,
        "open files": 4,
        "threads": 4,
        "mappings": max(calls // 20, 16),
        "bytes of device memory": 0,
    }

    def after_some() -> list[int]:
        said = run.do("repeat", placed, calls=calls, dispatched_every=DISPATCHED_EVERY)
        return [int(n) for n in said["census"]]

    before, grown = after_some(), ""
    # What is kept from every call grows in every round; a cache that fills, or the interpreter's own growth, in one.
    for _ in range(3):
        now = after_some()
        over = [
            f"{b - a:,} more {what}"
            for (what, limit), a, b in zip(limits.items(), before, now, strict=True)
            if b - a > limit
        ]
        if not over:
            return
        before, grown = now, ", ".join(over)
    raise Failure(f"allocation grows: {grown} after {calls:,} equal calls, three times in a row")


# --- later ------------------------------------------------------------------------------------------


def later(run: Run, wait: Callable[[float], None] = time.sleep) -> None:
    """All samples first, then one pause, then all that they left: results, inputs, guard zones, as they were."""
    kept: list[tuple[str, Placed, Tensor | None]] = []
    for turn, sample in enumerate(spread(run.busy, LATER_SAMPLES["slow" if run.slow else "device"])):
        arguments, wants = run.example(sample.params)
        placed = run.place(arguments, POISONS[turn % 2])
        try:
            ret = run.call(placed, (BOUND, DISPATCHED)[turn % 2], keep=True)
        except Refused as e:
            raise Refused(f"{sample.name}: {e}") from None
        run.judge(wants, placed, ret)
        kept.append((sample.name, placed.snapshot(), ret.values))
    wait(LATER)
    again = run.do("again", *(placed for _, placed, _ in kept))["calls"]
    for (name, placed, then), one in zip(kept, again, strict=True):
        changed = [c for b in placed.all() if (c := b.changes(None)) is not None]
        now = Ret.of(one["ret"], placed).values
        if then is not None and (now is None or not torch.equal(_bytes(now), _bytes(then))):
            changed.append("return: other elements than when it was returned")
        if changed:
            raise Failure(f"{name}: right when the call returned, and {LATER:g} s later no more: {changed[0]}")


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)
