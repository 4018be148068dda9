"""The proofs: each takes a case and a target, and says what came of it.

A proof never trusts a call that does nothing: a case whose contract names no element runs a control
beside it that names some.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hal._errors import ArgumentError, FallbackWarning, HalError, NoBackendError
from hal.conformance._arena import POISONS, Allocator, Placed, against_pages, bits, on_device, place
from hal.conformance._cases import spread
from hal.conformance._result import (
    FAILED,
    NOT_APPLICABLE,
    NOT_RUN,
    PASSED,
    REFUSED,
    Case,
    Result,
)
from hal.conformance._target import Target
from hal.conformance._verdict import Failure, judge
from hal.conformance._watch import code_of, watch
from hal.kvpool import KVPool
from hal.ops._judge import Want, same_bits
from hal.ops._spec import OpSpec, PoolArg, Sample

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
    """A target and the case being proven on it.

    Args:
        trial: called before something is tried whose crash would be no failure.
        examples: how many shapes Hypothesis draws.
        fixed: draw the same shapes every time (when certifying).
        imports: modules that register the backend, for the snippet.
    """

    target: Target
    spec: OpSpec
    case: Case
    trial: Callable[[], None] = lambda: None
    examples: int = 60
    fixed: bool = True
    imports: Sequence[str] = ()
    room: dict[str, float] = field(default_factory=dict)
    failing: dict[str, Any] | None = None

    @property
    def op(self) -> str:
        return self.spec.name

    @property
    def device(self) -> torch.device:
        return self.target.device

    @cached_property
    def outputs(self) -> frozenset[str]:
        return pure_outputs(self.spec)

    @cached_property
    def written(self) -> frozenset[str]:
        return frozenset(self.spec.mutated)

    @property
    def slow(self) -> bool:
        """A lane that stands in for a device: a call takes a thousand times as long, so repetitions are fewer."""
        return self.target.lane != "device"

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

    def place(
        self, arguments: Mapping[str, Any], poison: int = POISONS[0], shift: int = 0, where: str = ""
    ) -> Placed:
        """`arguments` on the target's device; slots of ``method="direct"`` on the CPU, as it asks."""
        host: dict[str, Allocator] = {}
        if self.device.type != "cpu" and any(isinstance(a, PoolArg) for a in self.spec.args.values()):
            pinned, plain = on_device(torch.device("cpu"), True), on_device(torch.device("cpu"))
            source, _, rest = where.partition("-to-")
            if source == "host":
                host["src"] = pinned
            if rest.startswith("host"):
                host["dst"] = pinned
            if rest.endswith("cpu-slots") or arguments.get("method") == "direct" or where == "host-to-host":
                host |= {"src_slots": plain, "dst_slots": plain}
        return place(
            arguments, on_device(self.device), poison=poison, outputs=self.outputs, shift=shift, host=host,
            apart=self.written,
        )  # fmt: skip

    # --- calls ---

    def why_not(self, placed: Placed) -> str | None:
        """None, or the reason for which the backend refuses these arguments; nothing may be written."""
        try:
            self.target.bound(self.op, placed.values)
        except NoBackendError as e:
            try:
                self.target.dispatch(self.op, placed.values)
            except NoBackendError:
                pass
            else:
                raise Failure(f"bind refuses ({e}), but the dispatched call does not raise") from e
            for block in placed.all():
                changed = block.touched(None)
                if changed is not None:
                    raise Failure(f"refused, yet something was written: {changed}") from e
            return str(e)
        return None

    def call(self, placed: Placed, how: str = BOUND) -> Any:
        """Calls the op; raises `Failure` where anything but the backend's own launcher ran it."""
        try:
            bound = self.target.bound(self.op, placed.values)
        except NoBackendError as e:
            raise Refused(str(e)) from None
        own = code_of(bound.fn)
        foreign = {c: o for c, o in self.target.foreign(self.op).items() if c is not own}
        with watch(foreign, own) as seen, warnings.catch_warnings(), own_threads():
            warnings.simplefilter("error", FallbackWarning)
            try:
                if how == BOUND:
                    ret = bound.fn(**placed.values)
                else:
                    ret = self.target.dispatch(self.op, placed.values)
            except Exception as e:
                says = f"supports said yes, and the {how} call raised"
                raise Failure(f"{says} {type(e).__name__}: {e}\n{short_trace(e)}") from e
        others = seen - {"own"}
        if others:
            raise Failure(f"fell back in secret: the {how} call ran {', '.join(sorted(others))}'s code")
        if own is not None and "own" not in seen:
            raise Failure(f"the {how} call did not run the backend's own {bound.impl}")
        settle(self.device)
        return ret

    def judge(self, wants: Mapping[str, Want], placed: Placed, ret: Any) -> None:
        for dtype, worst in judge(self.spec, wants, placed, ret, self.device).items():
            self.room[dtype] = max(self.room.get(dtype, 0.0), worst)

    def prove(
        self,
        params: Mapping[str, Any],
        ways: Sequence[tuple[str, int]] = WAYS,
        shift: int = 0,
        where: str = "",
        allocate: Allocator | None = None,
    ) -> dict[str, Want]:
        """Calls the op in all `ways` with what `params` make, and judges every call."""
        arguments = self.make(**params)
        wants = self.spec.oracle(arguments)
        # Both poisons and both ways of calling, with a call less.
        for how, poison in (ways[0], ways[-1]) if self.slow and len(ways) > 2 else ways:
            if allocate is None:
                placed = self.place(arguments, poison, shift, where)
            else:
                placed = place(arguments, allocate, poison=poison, outputs=self.outputs, apart=self.written)
            why = self.why_not(placed)
            if why is not None:
                raise Refused(why)
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
        arguments = run.make(**sample.params)
        run.place(arguments)
    except (RuntimeError, OSError, MemoryError) as e:
        if isinstance(e, HalError):
            raise
        raise Outcome(NOT_RUN, f"no memory for offsets beyond 2^31: {first_line(e)}") from None
    del arguments
    run.prove(sample.params, ways=((BOUND, POISONS[1]),))


def misaligned(run: Run) -> None:
    if names_nothing(
        run.prove(run.sample().params, ways=((BOUND, POISONS[0]), (DISPATCHED, POISONS[1])), shift=1)
    ):
        run.control()


def supports(run: Run) -> None:
    sample = run.sample()
    arguments = run.make(**sample.params)
    why = run.why_not(run.place(arguments))
    if why is None:
        run.prove(sample.params, ways=((BOUND, POISONS[1]),))
        return
    wants = run.spec.oracle(arguments)
    run.trial()
    for impl in run.target.implementations(run.op):
        right = True
        for poison in POISONS:
            placed = run.place(arguments, poison)
            try:
                run.judge(wants, placed, impl.fn(**placed.values))
            except Exception:
                right = False
                break
        if right and run.target.lane != "interpreter":
            raise Failure(f"supports says no, and {impl.impl} would have run it right; it said: {why}")


def errors(run: Run) -> None:
    sample = next(e for e in run.spec.errors if e.name == run.case.name)
    placed = run.place(sample.make())
    try:
        run.target.dispatch(run.op, placed.values)
    except ArgumentError as e:
        if e.argument != sample.argument:
            raise Failure(
                f"expected an ArgumentError naming {sample.argument}, got one naming {e.argument}: {e}"
            ) from e
    except Exception as e:
        raise Failure(
            f"expected an ArgumentError naming {sample.argument}, got {type(e).__name__}: {e}"
        ) from e
    else:
        raise Failure(f"expected an ArgumentError naming {sample.argument}; the call went through")
    for block in placed.all():
        changed = block.touched(None)
        if changed is not None:
            raise Failure(f"raised as it should, but had already written: {changed}")
    run.control()


def pages(run: Run) -> None:
    if run.device.type != "cpu":
        raise Outcome(NOT_APPLICABLE, "guard pages are for host memory; the device has compute-sanitizer")
    nothing = False
    for side in ("end",) if run.slow else ("end", "start"):
        nothing = names_nothing(
            run.prove(run.sample().params, ways=((BOUND, POISONS[0]),), allocate=against_pages(side))
        )
    if nothing:
        run.control()


def determinism(run: Run) -> None:
    sample = run.sample()
    arguments = run.make(**sample.params)
    wants = run.spec.oracle(arguments)
    first: list[Tensor] | None = None
    for turn in range(3 if run.slow else 5):
        placed = run.place(arguments, POISONS[1])
        ret = run.call(placed)
        run.judge(wants, placed, ret)
        if not run.target.bound(run.op, placed.values).deterministic:
            raise Outcome(NOT_APPLICABLE, "not declared deterministic")
        now = [b.values() for b in placed.all()] + ([ret.cpu()] if isinstance(ret, Tensor) else [])
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
    work: list[list[tuple[Placed, dict[str, Want], list[Any]]]] = [[] for _ in range(count)]
    for i, turn in itertools.product(range(count), range(rounds)):
        arguments = run.make(**{**base, "seed": 100 * i + turn})
        work[i].append((run.place(arguments, POISONS[turn % 2]), run.spec.oracle(arguments), []))
    settle(run.device)
    fn = run.target.bound(run.op, work[0][0][0].values).fn
    barrier = threading.Barrier(count)

    def body(mine: list[tuple[Placed, dict[str, Want], list[Any]]]) -> None:
        for placed, _, out in mine:
            barrier.wait()
            try:
                out.append(fn(**placed.values))
            except Exception as e:
                out.append(e)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    torch.set_num_threads(_NATURAL)
    try:
        crew = [threading.Thread(target=body, args=(mine,), daemon=True) for mine in work]
        for t in crew:
            t.start()
        for t in crew:
            t.join()
    finally:
        torch.set_num_threads(1)
        sys.setswitchinterval(interval)
    settle(run.device)
    for i, mine in enumerate(work):
        for placed, wants, out in mine:
            if isinstance(out[0], Exception):
                raise Failure(f"race between threads: thread {i} raised {type(out[0]).__name__}: {out[0]}")
            try:
                run.judge(wants, placed, out[0])
            except Failure as e:
                raise Failure(
                    f"race between threads: right alone, but wrong among {count} threads: {e}"
                ) from None


def leak(run: Run) -> None:
    sample = run.busy[0]
    run.prove(sample.params, ways=((BOUND, POISONS[1]),))
    placed = run.place(run.make(**sample.params))
    fn = run.target.bound(run.op, placed.values).fn
    calls = 12 if run.slow else 200
    limits = {
        "tensors alive": calls // 4,
        "Python objects alive": max(calls // 2, 64),
        "bytes of memory": 32 << 20,
        "bytes of device memory": 0,
    }

    def after_some() -> tuple[int, ...]:
        for _ in range(calls):
            fn(**placed.values)
        settle(run.device)
        gc.collect()
        return census(run.device)

    before, grown = after_some(), ""
    # What is kept from every call grows in every round; a cache that fills, or the interpreter's own growth, in one.
    for _ in range(3):
        now = after_some()
        over = [
            f"{b - a} more {what}"
            for (what, limit), a, b in zip(limits.items(), before, now, strict=True)
            if b - a > limit
        ]
        if not over:
            return
        before, grown = now, over[0]
    raise Failure(f"allocation grows: {grown} after {calls} equal calls, three times in a row")


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
    if run.device.type == "cpu":
        raise Outcome(NOT_APPLICABLE, "on a CPU there is one place for a pool")
    where = run.case.name
    from hal.registry._table import live

    entry = live.current().entries.get(run.target.backend.partition("/")[0])
    if (
        where == "host-to-host"
        and entry
        and entry.manifest
        and "cpu" not in entry.manifest.lanes[run.target.lane]
    ):
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
    "pages": pages, "sequence": sequence, "threads": threads, "determinism": determinism, "leak": leak,
    "ragged": ragged, "placement": placement,
}  # fmt: skip


# --- one case ---------------------------------------------------------------------------------------


def run_case(
    case: Case,
    target: Target,
    spec: OpSpec,
    *,
    trial: Callable[[], None] = lambda: None,
    examples: int = 60,
    fixed: bool = True,
    imports: Sequence[str] = (),
) -> Result:
    """Proves one case on a target. Never raises: whatever happens is the outcome."""
    from hal.conformance._device import PROOFS as DEVICE

    began = time.perf_counter()
    # The suite's own arithmetic is many small tensors, for which a pool of threads only waits.
    torch.set_num_threads(1)
    run = Run(target, spec, case, trial, examples, fixed, imports)
    result = Result(case.id, PASSED)
    try:
        why = target.ready(case.op)
        if why is not None:
            raise Outcome(NOT_RUN, why)
        (PROOFS.get(case.proof) or DEVICE[case.proof])(run)
    except Outcome as e:
        result.outcome, result.reason = e.outcome, str(e)
    except Refused as e:
        result.outcome, result.reason = refusal(case, target, str(e))
    except Failure as e:
        result.outcome, result.reason = FAILED, str(e)
    except Exception as e:
        result.outcome = FAILED
        result.reason = f"{type(e).__name__}: {first_line(e)}\n{short_trace(e)}"
    finally:
        torch.set_num_threads(_NATURAL)
    if result.outcome == FAILED:
        result.snippet = snippet(run)
    result.headroom = {k: round(v, 6) for k, v in run.room.items()}
    result.seconds = round(time.perf_counter() - began, 4)
    return result


def refusal(case: Case, target: Target, why: str) -> tuple[str, str]:
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
    t = run.target
    head = "".join(f"import {module}\n" for module in run.imports)
    if run.case.proof in ("value", "ragged", "sequence", "large") and run.failing is not None:
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


_NATURAL = torch.get_num_threads()


@contextmanager
def own_threads() -> Iterator[None]:
    """As many threads as the backend would have outside of the suite."""
    torch.set_num_threads(_NATURAL)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def settle(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "npu":
        torch.get_device_module(device).synchronize()


def census(device: torch.device) -> tuple[int, int, int, int]:
    """(tensors, Python memory blocks, resident bytes, device bytes) of this process."""
    tensors = sum(1 for o in gc.get_objects() if type(o) is Tensor)
    resident = 0
    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm", encoding="ascii") as f:
            resident = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    used = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return tensors, sys.getallocatedblocks(), resident, used


def first_line(e: BaseException) -> str:
    return str(e).strip().splitlines()[0] if str(e).strip() else repr(e)


def short_trace(e: BaseException) -> str:
    return "".join(traceback.format_tb(e.__traceback__)[-3:]).rstrip()
