"""The proofs: each takes a case and a target, and says what came of it.

A proof never trusts a call that does nothing: a case whose contract names no element runs a control
beside it that names some.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hal._errors import HalError
from hal._remote.target import Target
from hal._remote.wire import Task
from hal.conformance import _extremes, _inputs
from hal.conformance._arena import POISONS, Placed, Room, bits, place
from hal.conformance._cases import spread
from hal.conformance._fresh import fresh
from hal.conformance._hands import Caller, Died, caller_of
from hal.conformance._result import (
    FAILED,
    NOT_APPLICABLE,
    NOT_RUN,
    PASSED,
    REFUSED,
    Case,
    Result,
)
from hal.conformance._soak import later, leak, soak
from hal.conformance._verdict import Failure, Ret, judge
from hal.kv.pool import KVPool
from hal.ops.proofs.judge import Candidate, Want, same_bits
from hal.ops.spec import OpSpec, PoolArg, Sample

BOUND, DISPATCHED = "bound", "dispatched"
WAYS = ((BOUND, POISONS[0]), (BOUND, POISONS[1]), (DISPATCHED, POISONS[1]))


class Refused(Exception):
    """`supports` said no; the text is its reason."""


class Outcome(Exception):
    """The suite, not the backend, decides that a case does not apply or could not run."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


@dataclass
class Run:
    """A backend and the case being proven on it.

    Args:
        target: the process that it runs in; or the backend itself, to call it in this one.
        examples: how many shapes Hypothesis draws.
        fixed: draw the same shapes every time (when certifying).
        imports: modules that register the backend, for the snippet.
        seed: what inputs that are drawn anew in every run are drawn from.
        around: what every call stands in, as `hal._remote.around` has it.
    """

    target: Target | Caller
    spec: OpSpec
    case: Case
    examples: int = 60
    fixed: bool = True
    imports: Sequence[str] = ()
    seed: int = 0
    around: tuple[str, Any] | None = None
    room: dict[str, float] = field(default_factory=dict)
    failing: dict[str, Any] | None = None
    note: str = ""
    """What whoever reads of a pass should know."""
    trying: bool = False
    """Something is being tried whose crash would be no failure."""

    @cached_property
    def caller(self) -> Caller:
        return caller_of(self.target)

    @property
    def op(self) -> str:
        return self.spec.name

    @property
    def device(self) -> str:
        """The type of the device that the backend is judged on."""
        return self.caller.device

    @cached_property
    def outputs(self) -> frozenset[str]:
        return pure_outputs(self.spec)

    @cached_property
    def written(self) -> frozenset[str]:
        return frozenset(self.spec.mutated)

    @property
    def slow(self) -> bool:
        """A lane that stands in for a device: a call takes a thousand times as long, so repetitions are fewer."""
        return self.caller.lane != "device"

    def sample(self, name: str | None = None) -> Sample:
        wanted = self.case.sample if name is None else name
        return next(s for s in self.spec.samples if s.name == wanted)

    @cached_property
    def busy(self) -> list[Sample]:
        """Required samples in which something is to be written."""
        return [s for s in self.spec.samples if s.tag == "required" and not s.large and s.control is None]

    def make(self, **params: Any) -> dict[str, Any]:
        self.failing = params
        return self.spec.make(**params)

    def made(self, params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Want]]:
        """The arguments that `params` make, and what must come of them; kept, as many proofs use one sample."""
        self.failing = dict(params)
        return TRUTHS.get(self.spec, params)

    def place(
        self,
        arguments: Mapping[str, Any],
        poison: int = POISONS[0],
        shift: int = 0,
        where: str = "",
        side: str = "",
    ) -> Placed:
        """`arguments` in the shared memory, for the target's device; slots of ``method="direct"`` for the CPU, as it
        asks."""
        host: dict[str, str] = {}
        if self.device != "cpu" and any(isinstance(a, PoolArg) for a in self.spec.args.values()):
            source, _, rest = where.partition("-to-")
            if source == "host":
                host["src"] = "pinned"
            if rest.startswith("host"):
                host["dst"] = "pinned"
            if rest.endswith("cpu-slots") or arguments.get("method") == "direct" or where == "host-to-host":
                host |= {"src_slots": "host", "dst_slots": "host"}
        return place(
            arguments, Room(self.caller.arena, side=side), poison=poison, outputs=self.outputs, shift=shift, where=host,
            apart=self.written,
        )  # fmt: skip

    # --- calls ---

    def do(self, kind: str, *placed: Placed, **options: Any) -> Mapping[str, Any]:
        """What the backend's process says of a task."""
        said = self.caller.do(Task(kind, self.op, tuple(p.arguments for p in placed), options))
        if said["outcome"] == "broke":
            raise Failure(f"{said['type']}: {said['text']}\n{said['trace']}")
        return said

    def call(self, placed: Placed, how: str = BOUND, **options: Any) -> Ret:
        """Calls the op; raises `Refused`, or `Failure` where anything but the backend's own launcher ran it.

        With ``keep`` the backend's process keeps what it returned, for the task ``again``; calls of the same ``like``,
        a name, are made of the first one's launcher.
        """
        return Ret.of(self.called(placed, how, **options)["ret"], placed)

    def called(self, placed: Placed, how: str = BOUND, **options: Any) -> Mapping[str, Any]:
        """`call`, with what the manifest says of the implementation that ran."""
        said = self.do("call", placed, how=how, around=self.around, **options)
        if said["outcome"] == "refused":
            if said["through"]:
                raise Failure(f"bind refuses ({said['why']}), but the dispatched call does not raise")
            untouched(placed, "refused, yet something was written")
            raise Refused(said["why"])
        if said["outcome"] == "raised":
            says = f"supports said yes, and the {how} call raised"
            raise Failure(f"{says} {said['type']}: {said['text']}\n{said['trace']}")
        if said["others"]:
            ran = ", ".join(said["others"])
            raise Failure(
                f"fell back in secret: the {how} call ran {ran}'s code (docs/sharing-code.md: what may be shared)"
            )
        if not said["own"]:
            raise Failure(f"the {how} call did not run the backend's own {said['impl']}")
        return said

    def judge(self, wants: Mapping[str, Want], placed: Placed, ret: Ret) -> None:
        for dtype, worst in judge(wants, placed, ret, self.device).items():
            self.room[dtype] = max(self.room.get(dtype, 0.0), worst)

    def prove(
        self,
        params: Mapping[str, Any],
        ways: Sequence[tuple[str, int]] = WAYS,
        shift: int = 0,
        where: str = "",
        side: str = "",
    ) -> dict[str, Want]:
        """Calls the op in all `ways` with what `params` make, and judges every call."""
        arguments, wants = self.made(params)
        # Both poisons and both ways of calling, with a call less.
        for how, poison in (ways[0], ways[-1]) if self.slow and len(ways) > 2 else ways:
            with self.caller.arena.borrowed():
                placed = self.place(arguments, poison, shift, where, side)
                ret = self.call(placed, how)
                try:
                    self.judge(wants, placed, ret)
                except Failure as e:
                    raise Failure(f"{how} call: {e}") from None
        return wants

    def control(self, name: str | None = None) -> None:
        """A call that must write something, so that a no-op case proves something."""
        sample = self.busy[0] if name is None else self.sample(name)
        if names_nothing(self.prove(sample.params, ways=((BOUND, POISONS[1]),))):
            raise TypeError(f"{self.op}: control {sample.name} of {self.case.id} writes nothing")


# --- the proofs -------------------------------------------------------------------------------------


def value(run: Run) -> None:
    sample = run.sample()
    if names_nothing(run.prove(sample.params)):
        run.control(sample.control)


def large(run: Run) -> None:
    sample = run.sample()
    try:
        with run.caller.arena.borrowed():
            run.place(run.make(**sample.params))
    except (RuntimeError, OSError, MemoryError) as e:
        if isinstance(e, HalError):
            raise
        raise Outcome(NOT_RUN, f"no memory for offsets beyond 2^31: {first_line(e)}") from None
    run.prove(sample.params, ways=((BOUND, POISONS[1]),))


def misaligned(run: Run) -> None:
    if names_nothing(
        run.prove(run.sample().params, ways=((BOUND, POISONS[0]), (DISPATCHED, POISONS[1])), shift=1)
    ):
        run.control()


def supports(run: Run) -> None:
    sample = run.sample()
    arguments, wants = run.made(sample.params)
    try:
        run.call(run.place(arguments))
    except Refused as e:
        why = str(e)
    else:
        run.prove(sample.params, ways=((BOUND, POISONS[1]),))
        return
    run.trying = True
    for index in itertools.count():
        right, impl = True, None
        for poison in POISONS:
            placed = run.place(arguments, poison)
            said = run.do("attempt", placed, index=index)
            if said["outcome"] == "none":
                return
            impl = said["impl"]
            try:
                if said["outcome"] != "returned":
                    raise Failure(said["text"])
                run.judge(wants, placed, Ret.of(said["ret"], placed))
            except Failure:
                right = False
                break
        if right and run.caller.lane != "interpreter":
            raise Failure(f"supports says no, and {impl} would have run it right; it said: {why}")


def errors(run: Run) -> None:
    sample = next(e for e in run.spec.errors if e.name == run.case.name)
    placed = run.place(sample.make())
    said = run.do("refuse", placed)
    if said["outcome"] == "returned":
        raise Failure(f"expected an ArgumentError naming {sample.argument}; the call went through")
    if said["argument"] is None:
        raise Failure(
            f"expected an ArgumentError naming {sample.argument}, got {said['type']}: {said['text']}"
        )
    if said["argument"] != sample.argument:
        raise Failure(
            f"expected an ArgumentError naming {sample.argument}, got one naming {said['argument']}: {said['text']}"
        )
    untouched(placed, "raised as it should, but had already written")
    run.control()


def untouched(placed: Placed, otherwise: str) -> None:
    """Raises `Failure` where anything at all was written."""
    for block in placed.all():
        changed = block.touched(None)
        if changed is not None:
            raise Failure(f"{otherwise}: {changed}")


def pages(run: Run) -> None:
    if run.device != "cpu":
        raise Outcome(NOT_APPLICABLE, "guard pages are for host memory; the device has compute-sanitizer")
    nothing = False
    for side in ("end",) if run.slow else ("end", "start"):
        nothing = names_nothing(run.prove(run.sample().params, ways=((BOUND, POISONS[0]),), side=side))
    if nothing:
        run.control()


def determinism(run: Run) -> None:
    arguments, wants = run.made(run.sample().params)
    first: list[Tensor] | None = None
    for turn in range(3 if run.slow else 5):
        placed = run.place(arguments, POISONS[1])
        said = run.called(placed)
        ret = Ret.of(said["ret"], placed)
        run.judge(wants, placed, ret)
        if not said["deterministic"]:
            raise Outcome(NOT_APPLICABLE, "not declared deterministic")
        now = [b.values() for b in placed.all()] + ([] if ret.values is None else [ret.values])
        if first is None:
            first = now
        for a, b in zip(first, now, strict=True):
            if not bool(same_bits(a, b).all()):
                raise Failure(
                    f"nondeterministic, though declared deterministic: call {turn + 1} has other bits"
                )
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
        arguments, wants = run.made({**base, "seed": 100 * i + turn})
        work.append((run.place(arguments, POISONS[turn % 2]), wants))
    said = run.do("threads", *(placed for placed, _ in work), count=count)
    for n, ((placed, wants), one) in enumerate(zip(work, said["calls"], strict=True)):
        if one["outcome"] != "returned":
            raise Failure(f"race between threads: thread {n % count} raised {one['type']}: {one['text']}")
        try:
            run.judge(wants, placed, Ret.of(one["ret"], placed))
        except Failure as e:
            raise Failure(
                f"race between threads: right alone, but wrong among {count} threads: {e}"
            ) from None


def ragged(run: Run) -> None:
    try:
        from hypothesis import HealthCheck, Phase, assume, given, settings, strategies
    except ImportError:
        raise Outcome(
            NOT_RUN, "hypothesis is not installed: pip install 'hal-kernels[conformance]'"
        ) from None
    ran = 0
    examples = min(run.examples, 8) if run.slow else run.examples

    def strategy(r: Any) -> Any:
        return strategies.integers(*r) if is_range(r) else strategies.sampled_from(list(r))

    @settings(
        derandomize=run.fixed, database=None, deadline=None, max_examples=examples,
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False, print_blob=False,
        phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(
        strategies.fixed_dictionaries({name: strategy(r) for name, r in run.spec.ragged.items()}),
        strategies.integers(0, 2**16),
    )
    def draw(params: dict[str, Any], seed: int) -> None:
        nonlocal ran
        try:
            run.prove({**params, "seed": seed}, ways=((BOUND, POISONS[seed % 2]),))
        except Refused:
            assume(False)
        ran += 1

    draw()
    run.control()
    if ran < examples // 3:
        raise Failure(f"only {ran} of the {examples} drawn shapes ran; the others were refused")


def placement(run: Run) -> None:
    if run.device == "cpu":
        raise Outcome(NOT_APPLICABLE, "on a CPU there is one place for a pool")
    where = run.case.name
    if where == "host-to-host" and run.caller.takes is not None and "cpu" not in run.caller.takes:
        raise Outcome(
            NOT_APPLICABLE, "the lane takes no tensors of the CPU: two host pools are another backend's"
        )
    for sample in run.busy:
        method = sample.params.get("method", "auto")
        if method == "direct" and not (where.endswith("cpu-slots") or where == "host-to-host"):
            continue
        try:
            run.prove(sample.params, ways=((BOUND, POISONS[1]), (DISPATCHED, POISONS[0])), where=where)
        except Refused as e:
            raise Refused(f"{sample.name}: {e}") from None


PROOFS: dict[str, Callable[[Run], None]] = {
    "value": value, "large": large, "misaligned": misaligned, "supports": supports, "errors": errors,
    "pages": pages, "extremes": _extremes.prove, "sequence": sequence, "threads": threads,
    "determinism": determinism, "ragged": ragged, "fresh": fresh, "defaults": _inputs.defaults, "empty": _inputs.empty,
    "placement": placement, "soak": soak, "leak": leak, "later": later,
}  # fmt: skip


# --- one case ---------------------------------------------------------------------------------------


def run_case(
    case: Case,
    target: Target | Caller,
    spec: OpSpec,
    *,
    examples: int = 60,
    fixed: bool = True,
    imports: Sequence[str] = (),
    seed: int = 0,
) -> Result:
    """Proves one case on a target. Never raises: whatever happens is the outcome."""
    from hal.conformance._device import PROOFS as DEVICE

    began = time.perf_counter()
    # The suite's own arithmetic is many small tensors, for which a pool of threads only waits.
    natural = torch.get_num_threads()
    torch.set_num_threads(1)
    run = Run(target, spec, case, examples, fixed, imports, seed)
    result = Result(case.id, PASSED)
    try:
        why = run.caller.ready(case.op)
        if why is not None:
            raise Outcome(NOT_RUN, why)
        with run.caller.arena.borrowed():
            (PROOFS.get(case.proof) or DEVICE[case.proof])(run)
        result.reason = run.note
    except Outcome as e:
        result.outcome, result.reason = e.outcome, str(e)
    except Refused as e:
        result.outcome, result.reason = refusal(case, run.caller, str(e))
    except Failure as e:
        result.outcome, result.reason = FAILED, str(e)
    except Died as e:
        # `supports` had said no, and running it all the same killed the process: it was right.
        if not (run.trying and e.crashed):
            result.outcome, result.reason = FAILED, str(e)
    except Exception as e:
        result.outcome = FAILED
        result.reason = f"{type(e).__name__}: {first_line(e)}\n{short_trace(e)}"
    finally:
        torch.set_num_threads(natural)
    if result.outcome == FAILED:
        result.snippet = snippet(run)
    result.headroom = {k: round(v, 6) for k, v in run.room.items()}
    result.seconds = round(time.perf_counter() - began, 4)
    return result


def refusal(case: Case, target: Caller, why: str) -> tuple[str, str]:
    """A refusal is a failure where the sample is required, or where no declared limit covers it."""
    if case.tag == "required":
        return FAILED, f"supports refuses what is required: {why}"
    if target.limits is not None and not any(why.startswith(limit) for limit in target.limits):
        declared = ", ".join(target.limits) or "none"
        return (
            FAILED,
            f"refused for a reason that names no limit of the manifest (declared: {declared}): {why}",
        )
    return REFUSED, why


def snippet(run: Run) -> str:
    """A program that runs the failing example again."""
    t = run.caller
    head = "".join(f"import {module}\n" for module in run.imports)
    if run.case.proof in ("value", "ragged", "fresh", "sequence", "large") and run.failing is not None:
        params = "".join(f", {k}={v!r}" for k, v in run.failing.items())
        call = f"replay({run.op!r}, backend={t.backend!r}, lane={t.lane!r}{params})"
        return f"{head}from hal.conformance import replay\n{call}\n"
    return (
        f"{head}from hal.conformance import replay_case\n"
        f"replay_case({run.case.id!r}, backend={t.backend!r}, lane={t.lane!r})\n"
    )


# --- helpers ----------------------------------------------------------------------------------------


def is_range(r: Any) -> bool:
    """An inclusive range of ints, as opposed to a list of choices."""
    return isinstance(r, tuple) and len(r) == 2 and all(type(x) is int for x in r)


def names_nothing(wants: Mapping[str, Want]) -> bool:
    """Does the contract ask for no element at all?"""
    for name, want in wants.items():
        if want.free:
            continue
        if name == "return" and want.named.numel():
            return False
        if any(bool(w.named.any()) for w in ([want, *want.fields.values()] if name != "return" else [])):
            return False
    return True


_OUTPUTS: dict[str, frozenset[str]] = {}


def pure_outputs(spec: OpSpec) -> frozenset[str]:
    """The mutated arguments on whose contents the truth does not depend: found by changing them."""
    if spec.name not in _OUTPUTS:
        found = set()
        sample = next(s for s in spec.samples if s.tag == "required" and not s.large and s.control is None)
        for name in spec.mutated:
            a, b = spec.make(**sample.params), spec.make(**sample.params)
            if a[name] is None:
                continue
            halves = (b[name].k, b[name].v) if isinstance(b[name], KVPool) else (b[name],)
            for t in halves:
                for one in t if isinstance(t, tuple) else () if t is None else (t,):
                    bits(one).fill_(0x2A)
            if _same(spec.oracle(a), spec.oracle(b)):
                found.add(name)
        _OUTPUTS[spec.name] = frozenset(found)
    return _OUTPUTS[spec.name]


def _same(a: Mapping[str, Want], b: Mapping[str, Want]) -> bool:
    for name, want in a.items():
        pairs = [(want, b[name]), *((w, b[name].fields[x]) for x, w in want.fields.items())]
        for one, other in pairs:
            for c, d in zip(one.candidates, other.candidates, strict=True):
                for x, y in ((c.value, d.value), (c.slack, d.slack)):
                    if x is not None and y is not None and not bool(same_bits(x, y)[one.named].all()):
                        return False
    return True


class Truths:
    """Arguments and what must come of them, by op and parameters: made once, as long as there is room."""

    def __init__(self, room: int = 1 << 28) -> None:
        self.room = room
        self._kept: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._size = 0

    def get(self, spec: OpSpec, params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Want]]:
        # Not by value: 1, 1.0 and True are equal.
        key = spec, tuple(sorted((name, repr(value)) for name, value in params.items()))
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            return found[0]  # type: ignore[no-any-return]
        both = self._make(spec, params)
        size = sum(t.untyped_storage().nbytes() for t in _tensors(both))
        if size < self.room // 8:
            self._kept[key] = both, size
            self._size += size
            while self._size > self.room:
                self._size -= self._kept.popitem(last=False)[1][1]
        return both

    @staticmethod
    def _make(spec: OpSpec, params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Want]]:
        arguments = spec.make(**params)
        return arguments, spec.oracle(arguments)


TRUTHS = Truths()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, KVPool):
        return _tensors((value.k, value.v))
    if isinstance(value, Want):
        return [value.named, *_tensors(value.candidates), *_tensors(value.fields)]
    if isinstance(value, Candidate):
        return _tensors((value.value, value.slack))
    if isinstance(value, Mapping):
        return _tensors(tuple(value.values()))
    return [t for v in value for t in _tensors(v)] if isinstance(value, tuple) else []


def first_line(e: BaseException) -> str:
    return str(e).strip().splitlines()[0] if str(e).strip() else repr(e)


def short_trace(e: BaseException) -> str:
    return "".join(traceback.format_tb(e.__traceback__)[-3:]).rstrip()
