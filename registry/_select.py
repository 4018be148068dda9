"""Which implementation runs a call, and why: the one place that decides and the one that says so."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hal import _trace
from hal._errors import BackendError, FallbackWarning, NoBackendError
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
        head = (
            f"hal: {self.call} runs on {self.chosen.name}"
            if self.chosen
            else f"hal: no backend for {self.call}"
        )
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
        rows = [
            (v.name, v.lane, v.state, v.reason + (f" — {v.remedy}" if v.remedy else ""))
            for v in self.verdicts
        ]
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


def explain(
    table: Table, spec: OpSpec, sig: Signature, choices: Sequence[Choice], others: bool = True
) -> tuple[Explanation, Selection | None]:
    """Everything about one call; a `Selection` where something may run it. Warns of nothing.

    Args:
        others: where a named backend runs the call, look at those that were not asked for too. Their probes may
            wake a device that the process never meant to touch: an ordinary call does without.
    """
    name, source = decide(choices, spec.name)
    if name == "auto":
        return _auto(table, spec, sig, source)
    return _named(table, spec, sig, name, source, others)


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
    told, selection = explain(table, spec, sig, choices, others=False)
    for v in told.verdicts:
        if v.state == "rejected":
            table.observers.tell("hal_on_reject", op=spec.name, backend=v.name, reason=v.reason)
    if selection is None:
        raise NoBackendError(str(told))
    downgrades(table, told)
    assert told.chosen is not None
    table.observers.tell("hal_on_bind", op=spec.name, backend=told.chosen.name, lane=told.chosen.lane)
    if table.trace:
        run = traced(table, selection.run, told, sig.device)
        return replace(selection, run=run)
    return selection


def traced(table: Table, run: Callable[..., Any], told: Explanation, device: str) -> Callable[..., Any]:
    """`run`, counting its calls under the name of what was chosen."""
    assert told.chosen is not None
    lane = "" if told.chosen.lane == "device" else f" ({told.chosen.lane})"
    return _trace.counted(run, told.op, told.chosen.name + lane, device, table.trace)


def capturing(device: str) -> bool:
    """Is a graph being captured on this thread's current stream?"""
    if device == "cpu":
        return False
    import torch

    module = getattr(torch, device, None)
    capturing = getattr(module, "is_current_stream_capturing", None)
    return capturing is not None and bool(capturing())


def downgrades(table: Table, told: Explanation) -> None:
    """Warns, once each, of what was passed over on the way; with ``fallback="error"`` it raises instead.

    A chain is the user's own order: a refusal in it is no downgrade, a backend that broke is.
    """
    assert told.chosen is not None
    # What stands behind the chosen one would not have been asked.
    before = told.verdicts[: told.verdicts.index(told.chosen)]
    if told.strict:
        mine = told.chosen.name.partition("/")[0]
        passed = [v for v in before if v.state == "broken" and v.name.partition("/")[0] != mine]
    else:
        passed = [v for v in before if v.state in ("rejected", "broken")]
    at_reference = told.chosen.name == "reference" and not told.strict
    if at_reference and not passed:
        passed = list(before[:1])
    if not passed and not at_reference:
        return
    if table.fallback == "error":
        raise NoBackendError(f"{told}\n  HAL_FALLBACK=error forbids going on with {told.chosen.name}.")
    for v in passed or [Verdict("(none)", "device", "absent", "no backend for this device")]:
        table.observers.tell("hal_on_fallback", op=told.op, backend=v.name, reason=v.reason)
        key = (told.op, v.name, v.reason, told.chosen.name)
        if key not in table.warned:
            table.warned.add(key)
            remedy = f" — {v.remedy}" if v.remedy else ""
            warnings.warn(
                f"hal: {told.op} runs on {told.chosen.name}: {v.name} {v.state}: {v.reason}{remedy}",
                FallbackWarning,
                stacklevel=_outside(),
            )


def _outside() -> int:
    """The stack level, for a warning, of the code that called hal."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "hal":
        level, frame = level + 1, frame.f_back
    return level


def _reference(spec: OpSpec, state: str) -> Verdict:
    return Verdict("reference", "device", state, "" if state == "chosen" else "plain torch, any device")


def _named(
    table: Table, spec: OpSpec, sig: Signature, name: str, source: str, others: bool
) -> tuple[Explanation, Selection | None]:
    def told(chosen: Verdict | None, verdicts: Sequence[Verdict]) -> Explanation:
        return Explanation(spec.name, str(sig), chosen, tuple(verdicts), source, True)

    verdicts: list[Verdict] = []
    asked: list[Entry] = []
    for link in name.split(">"):
        if link == "reference":
            verdict = _reference(spec, "chosen")
            explanation = told(verdict, [*verdicts, verdict])
            return explanation, Selection(spec.reference, None, None, explanation)
        backend, _, which = link.partition("/")
        entry = table.entries[backend]
        asked.append(entry)
        for impl in wanted(entry, spec.name, which) or (None,):
            verdict, run = _judge(table, entry, impl, spec, sig, table.lane, which)
            if run is not None:
                chosen = Verdict(verdict.name, verdict.lane, "chosen")
                rest = _others(table, spec, sig, asked) if others else []
                explanation = told(chosen, [*verdicts, chosen, *rest])
                return explanation, Selection(run, entry, impl, explanation)
            verdicts.append(verdict)
    return told(None, [*verdicts, *_others(table, spec, sig, asked)]), None


def wanted(entry: Entry, op: str, which: str) -> tuple[Impl, ...]:
    """What ``backend`` or ``backend/which`` may take, in its order."""
    return tuple(i for i in entry.impls(op) if i.name == which) if which else entry.usual(op)


def _unnamed(table: Table, op: str, device: str) -> list[Verdict]:
    """Those that `auto` leaves out because they are taken only where they are named, with their states."""
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


def _others(table: Table, spec: OpSpec, sig: Signature, asked: Sequence[Entry]) -> list[Verdict]:
    """What the backends that were not asked for would have said. Only states: nothing more is imported."""
    out = []
    for entry in table.entries.values():
        if entry not in asked and entry.impls(spec.name):
            state = entry.state("device")
            fits = entry.manifest is not None and sig.device in entry.manifest.lanes.get("device", ())
            if state.ready and not fits:
                continue
            out.append(
                Verdict(entry.name, "device", state.state, state.reason or "not asked for", state.remedy)
            )
    return out


def _auto(table: Table, spec: OpSpec, sig: Signature, source: str) -> tuple[Explanation, Selection | None]:
    if table.lane != "device":
        verdict = Verdict(
            "auto", table.lane, "rejected", f"lane {table.lane} needs a named backend", "set HAL_BACKEND"
        )
        return Explanation(spec.name, str(sig), None, (verdict,), f"HAL_LANE={table.lane}", True), None
    chosen: tuple[Verdict, Entry | None, Impl | None, Callable[..., Any]] | None = None
    verdicts: list[Verdict] = []
    for entry, impl in candidates(table, spec.name, sig.device):
        if chosen is not None:
            state = entry.impl_state(impl) if impl else entry.state("device")
            title = entry.title(impl) if impl else entry.name
            verdicts.append(Verdict(title, "device", state.state, state.reason, state.remedy))
            continue
        verdict, run = _judge(table, entry, impl, spec, sig, "device")
        if run is not None:
            verdict = Verdict(verdict.name, "device", "chosen")
            chosen = verdict, entry, impl, run
        verdicts.append(verdict)
    # Last: what comes before the chosen one is what was passed over.
    unnamed = _unnamed(table, spec.name, sig.device)
    if chosen is None:
        verdict = _reference(spec, "chosen")
        chosen = verdict, None, None, spec.reference
        verdicts.append(verdict)
    else:
        verdicts.append(_reference(spec, "ready"))
    explanation = Explanation(spec.name, str(sig), chosen[0], (*verdicts, *unnamed), source, False)
    return explanation, Selection(chosen[3], chosen[1], chosen[2], explanation)


def candidates(table: Table, op: str, device: str) -> list[tuple[Entry, Impl | None]]:
    """What `auto` may take for a device type, in its order: built-in before third party, then priority, then name.

    A plugin without a manifest (it can't be imported, say) might have had the op, so it is among the third party's.
    """
    found: list[tuple[Entry, Impl | None]] = [
        (entry, impl)
        for entry in table.entries.values()
        for impl in (entry.usual(op) if entry.manifest else (None,))
        if entry.manifest is None or device in entry.manifest.lanes.get("device", ())
    ]
    return sorted(
        found,
        key=lambda c: (
            c[0].third_party,
            -(c[1].priority if c[1] else 0),
            c[0].name,
            c[1].name if c[1] else "",
        ),
    )


def _judge(
    table: Table, entry: Entry, impl: Impl | None, spec: OpSpec, sig: Signature, lane: str, which: str = ""
) -> tuple[Verdict, Callable[..., Any] | None]:
    """May this implementation run this call? The function, if so."""
    name = entry.title(impl) if impl else f"{entry.name}/{which}" if which else entry.name

    def no(state: State) -> tuple[Verdict, None]:
        return Verdict(name, lane, state.state, state.reason, state.remedy), None

    state = entry.impl_state(impl, lane) if impl else entry.op_state(spec.name, lane, which)
    if impl is None or not state.ready:
        return no(state)
    assert entry.manifest is not None
    devices = tuple(entry.manifest.lanes[lane])
    if sig.device not in devices:
        return no(
            State("rejected", f"the tensors are on {sig.device}; lane {lane} takes {', '.join(devices)}")
        )
    run = entry.bind(impl, spec.signature)
    if isinstance(run, State):
        return no(run)
    if impl.supports is not None:
        supports = impl.supports
        said = ask("supports", lambda: resolve(supports)(sig))
        if isinstance(said, State):
            return no(said)
        if said:
            return no(State("rejected", said))
    return Verdict(name, lane, "ready"), run
