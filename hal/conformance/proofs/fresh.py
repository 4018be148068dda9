"""Inputs that nobody knew before the run: drawn from the run's seed, with sizes far beyond those of the samples.

Each parameter that an op calls wide is the wide one in a case of its own, so that a limit on it alone is hit for
certain; then every two of them together, shrunk to what a machine can do; then combinations at random. Several wide
ones are drawn again where they ask for too much memory. The same seed, op and lane draw the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from random import Random
from typing import TYPE_CHECKING, Any

from hal.conformance._arena import POISONS
from hal.conformance._truths import names_nothing
from hal.conformance._verdict import Failure
from hal.conformance.execute import BOUND, DISPATCHED, Refused
from hal.ops.proofs.fresh import Fresh, Wide
from hal.ops.spec import OpSpec

if TYPE_CHECKING:
    from hal.conformance.proofs.run import Run

PAIRS, MIXED = "pairs", "mixed"
MOST = {"device": 600_000, "slow": 100_000}
"""Elements to which two wide parameters together shrink."""
HELD = 2**28
"""Bytes of arguments and truth for which several wide parameters may ask, in every lane: with its copies of them a case
takes up to about 1 GB."""
EACH = 16
"""Bytes of them to an element of `Fresh.size`, where an op does not say: a truth in float64, and its slack."""
SLOWER = 32
"""By how much a range is smaller in a lane in which a program instance takes a millisecond."""
MIXES = {"device": 6, "slow": 2}
PAIRS_OF = {"device": 1000, "slow": 3}
TRIES = 25
"""Draws that may be refused, or may ask for nothing, until one does not."""


def speed(lane: str) -> str:
    return "device" if lane == "device" else "slow"


def names(spec: OpSpec) -> list[str]:
    """The cases of one op: its wide parameters, then pairs of them, then mixtures."""
    if spec.fresh is None:
        return [MIXED] if spec.ragged else []
    return [*spec.fresh.wide, *([PAIRS] if len(spec.fresh.wide) > 1 else []), MIXED]


def reach(spec: OpSpec, name: str, lane: str) -> tuple[int, int] | list[Any]:
    """Where the wide parameter `name` is drawn from: smaller in a slow lane, and still beyond `OpSpec.ragged`."""
    assert spec.fresh is not None
    sizes, step = spec.fresh.wide[name].sizes, spec.fresh.wide[name].step
    if lane == "device" or isinstance(sizes, list):
        return sizes
    usual = spec.ragged.get(name)
    beyond = usual[1] + 1 if isinstance(usual, tuple) and isinstance(usual[1], int) else 1
    low = -(-max(sizes[0] // SLOWER, min(sizes[0], beyond)) // step) * step
    return low, max(sizes[1] // SLOWER // step * step, low)


def plan(specs: Mapping[str, OpSpec], lane: str) -> dict[str, Any]:
    """What is drawn on a lane, for the report."""
    kind = speed(lane)
    return {
        "scale": "full" if kind == "device" else f"ranges / {SLOWER}: lane {lane}",
        "reach": {
            op: {name: reach(s, name, lane) for name in s.fresh.wide} for op, s in specs.items() if s.fresh is not None
        },
        "elements_of_pairs": MOST[kind],
        "bytes_held": HELD,
        "pairs": "all" if kind == "device" else PAIRS_OF[kind],
        "mixed": MIXES[kind],
    }


def is_range(r: Any) -> bool:
    """An inclusive range of ints, as opposed to a list of choices."""
    return isinstance(r, tuple) and len(r) == 2 and all(type(x) is int for x in r)


def one(rng: Random, source: Any) -> Any:
    """A value: from an inclusive range, from choices, or the only one."""
    if is_range(source):
        return rng.randint(*source)
    return rng.choice(source) if isinstance(source, tuple | list) else source


def draw(spec: OpSpec, rng: Random, wide: Sequence[str], lane: str) -> dict[str, Any]:
    """Parameters of `OpSpec.make`, those in `wide` far beyond the samples; several of them shrink to fit."""
    fresh = spec.fresh or Fresh({}, lambda p: 0)
    sources = {**spec.ragged, **fresh.beside}
    for name in wide:
        sources |= fresh.wide[name].beside
    params = {name: one(rng, source) for name, source in sources.items()}
    ranges = {name: reach(spec, name, lane) for name in wide}
    params |= {name: round_to_step(fresh.wide[name], one(rng, source)) for name, source in ranges.items()}
    shrinking = [n for n, r in ranges.items() if isinstance(r, tuple)]
    while len(wide) > 1 and fresh.size(settle(params)) > MOST[speed(lane)]:
        large = [n for n in shrinking if params[n] > max(20, 2 * fresh.wide[n].step)]
        if not large:
            break
        params |= {n: round_to_step(fresh.wide[n], params[n] * 3 // 4) for n in large}
    return params


def settle(params: Mapping[str, Any]) -> dict[str, Any]:
    """`params` with what is a function of the others."""
    return {name: value(params) if callable(value) else value for name, value in params.items()}


def round_to_step(wide: Wide, value: Any) -> Any:
    return max(value // wide.step, 1) * wide.step if isinstance(wide.sizes, tuple) else value


def mix(spec: OpSpec, rng: Random, lane: str) -> dict[str, Any]:
    """Some of the wide parameters, each anywhere between usual and wide."""
    fresh = spec.fresh
    if fresh is None:
        return draw(spec, rng, (), lane)
    some = [n for n in fresh.wide if rng.random() < 0.5]
    params = draw(spec, rng, some, lane)
    for name in some:
        if isinstance(params[name], int) and isinstance(reach(spec, name, lane), tuple):
            params[name] = round_to_step(fresh.wide[name], round(params[name] ** rng.random()))
    return params


def held(spec: OpSpec, params: Mapping[str, Any]) -> int:
    """About how many bytes the arguments that `params` make have, and their truth."""
    if spec.fresh is None:
        return 0
    return EACH * spec.fresh.size(params) if spec.fresh.held is None else spec.fresh.held(params)


def fitting(spec: OpSpec, once: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What `once` draws, settled: the first that is within `HELD`, or the smallest, as a loop must end."""
    drawn = []
    for _ in range(TRIES):
        drawn.append(settle(once()))
        if held(spec, drawn[-1]) <= HELD:
            return drawn[-1]
    return min(drawn, key=partial(held, spec))


def draws(spec: OpSpec, case: str, rng: Random, lane: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(what it is, tries) of a case, the tries for where some are refused or ask for nothing."""
    kind = speed(lane)
    if case == MIXED:
        for i in range(MIXES[kind]):
            yield f"mixture {i + 1}", [fitting(spec, partial(mix, spec, rng, lane)) for _ in range(TRIES)]
        return
    wide: list[tuple[str, ...]] = [(case,)]
    if case == PAIRS and spec.fresh is not None:
        wide = list(combinations(spec.fresh.wide, 2))
        wide = rng.sample(wide, min(len(wide), PAIRS_OF[kind]))
    for some in wide:
        once = partial(draw, spec, rng, some, lane)
        tries = [fitting(spec, once) if len(some) > 1 else settle(once()) for _ in range(TRIES)]
        yield " and ".join(some), tries


def fresh(run: Run) -> None:
    rng = Random(f"{run.seed} {run.case.id} {run.caller.lane}")
    for what, tries in draws(run.spec, run.case.name, rng, run.caller.lane):
        refused = ""
        for params in tries:
            params["seed"] = rng.randrange(2**31)
            try:
                wants = run.prove(params, ((rng.choice((BOUND, DISPATCHED)), rng.choice(POISONS)),))
            except Refused as e:
                refused = str(e)
                continue
            except Failure as e:
                raise Failure(f"beyond the samples, {what} wide ({show_params(params)}): {e}") from None
            if not names_nothing(wants):
                break
        else:
            if refused:
                raise Refused(refused)
            raise TypeError(f"{run.op}: {what}: none of {TRIES} draws asks for anything")


def show_params(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in params.items())
