"""Which implementation runs a call, and why: the one place that decides and the one that says so."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from hal import _trace
from hal._errors import BackendError, FallbackWarning, NoBackendError, SelectionError
from hal.registry._config import Choice, asker
from hal.registry._discover import Entry, resolve
from hal.registry._isolate import State, ask
from hal.registry._manifest import Impl

if TYPE_CHECKING:
    from hal.ops.spec import OpSpec, Signature
    from hal.registry._table import Table


@dataclass(frozen=True)
class Verdict:
    """What selection found of one implementation.

    ``state``: ``chosen``; ``ready`` (it would run the call); ``rejected`` (it refused it); ``unimplemented``; or the
    backend's state.
    """

    name: str
    lane: str
    state: str
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Explanation:
    """Who runs a call, who would not, and why. ``str()`` is the text of every message."""

    op: str
    call: str
    chosen: Verdict | None
    verdicts: tuple[Verdict, ...]
    decided_by: str
    strict: bool
    asked_by: str = field(default_factory=lambda: asker.get())
    """The engine's layer that asks, inside an engine; else empty."""

    def __str__(self) -> str:
        head = f"hal: {self.call} runs on {self.chosen.name}" if self.chosen else f"hal: no backend for {self.call}"
        if self.chosen and self.chosen.lane != "device":
            head += f" (lane {self.chosen.lane})"
        width = max((len(v.name) for v in self.verdicts), default=0)
        lines = [head]
        for v in self.verdicts:
            why = v.reason + (f" — {v.remedy}" if v.remedy else "")
            lines.append(f"  {v.name:<{width}}  {v.state:<13} {why}".rstrip())
        lines.append(f"  chosen by {self.decided_by}{' (strict)' if self.strict else ''}." + self._advice())
        if self.asked_by:
            lines.append(f"  asked by {self.asked_by}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from hal._show import Grid, page

        head, *_, last = str(self).splitlines()
        rows = [(v.name, v.lane, v.state, v.reason + (f" — {v.remedy}" if v.remedy else "")) for v in self.verdicts]
        return page(head, [Grid("", ("backend", "lane", "state", "why"), rows)], [last.strip()])

    def _advice(self) -> str:
        if self.chosen:
            return ""
        if self.decided_by.startswith("HAL_BACKEND="):
            asked = ",".join(
                p.strip()
                for p in self.decided_by.removeprefix("HAL_BACKEND=").split(",")
                if p.partition("=")[0].strip() != self.op
            )
            return f" Try HAL_BACKEND={asked}{',' if asked else ''}{self.op}=reference"
        return f" Try {self.op}=reference, which runs anywhere"


@dataclass(frozen=True)
class Selection:
    """The outcome: a bound function and the explanation of it."""

    run: Callable[..., Any]
    entry: Entry | None
    """None: the reference."""
    impl: Impl | None
    explanation: Explanation


def decide(choices: Iterable[Choice], op: str) -> tuple[str, str]:
    """(name, source): the first level that has an entry for the op, or a bare name, decides; else ``auto``."""
    for choice in choices:
        name = choice.get(op)
        if name is not None:
            return name, choice.source
    return "auto", "auto (the device of the tensors)"


class Candidate(NamedTuple):
    """What one word of a choice may mean. ``entry`` None: the reference; ``impl`` None: the entry has no such."""

    title: str
    entry: Entry | None = None
    impl: Impl | None = None


def explain(
    table: Table, spec: OpSpec, asked: Signature | str, choices: Sequence[Choice], others: bool = True
) -> tuple[Explanation, Selection | None]:
    """Who runs a call, who would not, and why; a `Selection` where something may run it. Warns of nothing.

    Args:
        asked: the call; or a device type, for whatever call may come: then no implementation is asked whether it
            supports the call, and a choice among several that are ready is an error.
        others: where a named backend runs the call, look at those that were not asked for too. Their probes may
            wake a device that the process never meant to touch: an ordinary call does without.

    Raises:
        SelectionError: several are ready for a device type.
    """
    name, source = decide(choices, spec.name)
    sig, device = (None, asked) if isinstance(asked, str) else (asked, asked.device)
    call, auto = spec.name if sig is None else str(sig), name == "auto"
    if auto and table.lane != "device":
        why = f"lane {table.lane} needs a named backend"
        verdict = Verdict("auto", table.lane, "rejected", why, "set HAL_BACKEND")
        return Explanation(spec.name, call, None, (verdict,), f"HAL_LANE={table.lane}", True), None
    verdicts: list[Verdict] = []
    ready: list[tuple[Verdict, Candidate, Callable[..., Any]]] = []
    entries: list[Entry | None] = []
    for link in name.split(">"):
        for candidate in candidates(table, spec.name, link, device):
            entries.append(candidate.entry)
            if ready and sig is not None:
                if auto:
                    verdicts.append(_state(candidate))
                continue
            verdict, run = _judge(candidate, spec, sig, device, table.lane)
            verdicts.append(verdict)
            if run is not None:
                ready.append((verdict, candidate, run))
        if ready:
            break
    if len(ready) > 1:
        raise SelectionError(
            f"hal: bind: {spec.name} has several ready implementations: {', '.join(c.title for _, c, _ in ready)}; "
            f"give an example, like={{{spec.name!r}: (...)}}, or name one: backend='{spec.name}={ready[0][1].title}'"
        )
    if auto:
        # What stands before the chosen one is what was passed over.
        reference = Verdict("reference", "device", "ready", "plain torch, any device")
        if not ready:
            reference = Verdict("reference", "device", "chosen")
            ready.append((reference, Candidate("reference"), spec.reference))
        verdicts.append(reference)
    if sig is not None and auto:
        verdicts += _verdicts_unnamed(table, spec.name, device)
    elif sig is not None and (not ready or (others and ready[0][1].entry is not None)):
        verdicts += _others(table, spec.name, device, entries)
    chosen, winner, run = ready[0] if ready else (None, None, None)
    explanation = Explanation(spec.name, call, chosen, tuple(verdicts), source, not auto)
    if winner is None or run is None:
        return explanation, None
    return explanation, Selection(run, winner.entry, winner.impl, explanation)


def select(table: Table, spec: OpSpec, sig: Signature, choices: Sequence[Choice]) -> Selection:
    """The implementation for a call. Tells the observers, and warns of a downgrade.

    Raises:
        NoBackendError: none may run it; the message says why of each.
    """
    if capturing(sig.device):
        # Selecting may import, compile and warn.
        raise BackendError(
            f"hal: {spec.name}: a call of a new kind while a graph is captured: no backend is selected yet for these "
            "dtypes and shapes; call the op once before the capture, or use hal.bind(...) and hal.warmup(...)"
        )
    return settle(table, *explain(table, spec, sig, choices, others=False), sig.device)


def settle(table: Table, explanation: Explanation, selection: Selection | None, device: str) -> Selection:
    """What `explain` found, in force: tells the observers, warns of a downgrade, counts the calls.

    Raises:
        NoBackendError: it found nothing; the message says why of each.
    """
    for v in explanation.verdicts:
        if v.state == "rejected":
            table.observers.tell("hal_on_reject", op=explanation.op, backend=v.name, reason=v.reason)
    if selection is None:
        raise NoBackendError(str(explanation))
    _report_downgrades(table, explanation)
    assert explanation.chosen is not None
    table.observers.tell(
        "hal_on_bind", op=explanation.op, backend=explanation.chosen.name, lane=explanation.chosen.lane
    )
    if not table.trace:
        return selection
    lane = "" if explanation.chosen.lane == "device" else f" ({explanation.chosen.lane})"
    run = _trace.count_calls(selection.run, explanation.op, explanation.chosen.name + lane, device, table.trace)
    return replace(selection, run=run)


def capturing(device: str) -> bool:
    """Is a graph being captured on this thread's current stream?"""
    if device == "cpu":
        return False
    import torch

    module = getattr(torch, device, None)
    capturing = getattr(module, "is_current_stream_capturing", None)
    return capturing is not None and bool(capturing())


def _report_downgrades(table: Table, explanation: Explanation) -> None:
    """Warns, once each, of what was passed over on the way; with ``fallback="error"`` it raises instead.

    A chain is the user's own order: a refusal in it is no downgrade, a backend that broke is.
    """
    assert explanation.chosen is not None
    # What stands behind the chosen one would not have been asked.
    before = explanation.verdicts[: explanation.verdicts.index(explanation.chosen)]
    if explanation.strict:
        mine = explanation.chosen.name.partition("/")[0]
        passed = [v for v in before if v.state == "broken" and v.name.partition("/")[0] != mine]
    else:
        passed = [v for v in before if v.state in ("rejected", "broken")]
    at_reference = explanation.chosen.name == "reference" and not explanation.strict
    if at_reference and not passed:
        passed = list(before[:1])
    if not passed and not at_reference:
        return
    if table.fallback == "error":
        raise NoBackendError(f"{explanation}\n  HAL_FALLBACK=error forbids going on with {explanation.chosen.name}.")
    for v in passed or [Verdict("(none)", "device", "absent", "no backend for this device")]:
        table.observers.tell("hal_on_fallback", op=explanation.op, backend=v.name, reason=v.reason)
        key = (explanation.op, v.name, v.reason, explanation.chosen.name)
        if key not in table.warned:
            table.warned.add(key)
            remedy = f" — {v.remedy}" if v.remedy else ""
            warnings.warn(
                f"hal: {explanation.op} runs on {explanation.chosen.name}: {v.name} {v.state}: {v.reason}{remedy}",
                FallbackWarning,
                stacklevel=_outside(),
            )


def _outside() -> int:
    """The stack level, for a warning, of the code that called hal."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "hal":
        level, frame = level + 1, frame.f_back
    return level


def candidates(table: Table, op: str, link: str, device: str) -> list[Candidate]:
    """What one link of a choice may take, in its order.

    ``auto``: built-in before third party, then priority, then name. A plugin without a manifest (it can't be imported,
    say) might have had the op, so it is among the third party's.
    """
    if link == "reference":
        return [Candidate("reference")]
    if link != "auto":
        entry = table.entries[link.partition("/")[0]]
        named = [Candidate(entry.title(i), entry, i) for i in impls_named(entry, op, link.partition("/")[2])]
        return named or [Candidate(link, entry)]
    found: list[tuple[Any, Candidate]] = []
    for entry in table.entries.values():
        if entry.manifest is None:
            found.append(((entry.third_party, 0, entry.name, ""), Candidate(entry.name, entry)))
        elif device in entry.manifest.lanes.get("device", ()):
            for impl in entry.usual(op):
                order = entry.third_party, -impl.priority, entry.name, impl.name
                found.append((order, Candidate(entry.title(impl), entry, impl)))
    return [c for _, c in sorted(found, key=lambda f: f[0])]


def impls_named(entry: Entry, op: str, which: str) -> tuple[Impl, ...]:
    """What ``backend`` or ``backend/which`` may take, in its order."""
    return tuple(i for i in entry.impls(op) if i.name == which) if which else entry.usual(op)


def _verdicts_unnamed(table: Table, op: str, device: str) -> list[Verdict]:
    """Those that `auto` leaves out because they run only where they are named, with their states."""
    out = []
    for entry in table.entries.values():
        if entry.manifest is None or device not in entry.manifest.lanes.get("device", ()):
            continue
        for impl in entry.impls(op):
            if impl.named:
                state = entry.impl_state(impl)
                reason = state.reason or f"taken where it is named: {op}={entry.title(impl)}"
                out.append(Verdict(entry.title(impl), "device", state.state, reason, state.remedy))
    return out


def _others(table: Table, op: str, device: str, asked: Sequence[Entry | None]) -> list[Verdict]:
    """What the backends that were not asked for would have said. Only states: nothing more is imported."""
    out = []
    for entry in table.entries.values():
        if entry not in asked and entry.impls(op):
            state = entry.state("device")
            fits = entry.manifest is not None and device in entry.manifest.lanes.get("device", ())
            if state.ready and not fits:
                continue
            out.append(Verdict(entry.name, "device", state.state, state.reason or "not asked for", state.remedy))
    return out


def _verdict(candidate: Candidate, lane: str, state: State) -> Verdict:
    return Verdict(candidate.title, lane, state.state, state.reason, state.remedy)


def _state(candidate: Candidate) -> Verdict:
    """Of one behind the chosen one: nothing is imported for it."""
    entry, impl = candidate.entry, candidate.impl
    assert entry is not None
    return _verdict(candidate, "device", entry.impl_state(impl) if impl else entry.state("device"))


def _judge(
    candidate: Candidate, spec: OpSpec, sig: Signature | None, device: str, lane: str
) -> tuple[Verdict, Callable[..., Any] | None]:
    """May this implementation run this call? The function, if so. Without `sig`: any call on the device."""
    title, entry, impl = candidate
    if entry is None:
        return Verdict(title, "device", "chosen"), spec.reference
    if impl is None:
        return _verdict(candidate, lane, entry.op_state(spec.name, lane, title.partition("/")[2])), None
    state = entry.impl_state(impl, lane)
    if not state.ready:
        return _verdict(candidate, lane, state), None
    assert entry.manifest is not None
    devices = tuple(entry.manifest.lanes[lane])
    if device not in devices:
        where = f"bound for {device}" if sig is None else f"the tensors are on {device}"
        state = State("rejected", f"{where}; lane {lane} takes {', '.join(devices)}")
        return _verdict(candidate, lane, state), None
    run = entry.bind(impl, spec.signature)
    if isinstance(run, State):
        return _verdict(candidate, lane, run), None
    if impl.supports is not None and sig is not None:
        supports = impl.supports
        refusal = ask("supports", lambda: resolve(supports)(sig))
        if isinstance(refusal, str) and refusal:
            refusal = State("rejected", refusal)
        if refusal:
            return _verdict(candidate, lane, refusal), None
    return Verdict(title, lane, "chosen"), run
