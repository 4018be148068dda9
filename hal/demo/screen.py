"""What `hal demo` shows: the answers while they grow, what happened to each request, the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hal.demo.bench import Row
from hal.demo.check import Comparison
from hal.demo.engine import Engine, Event, Request
from hal.demo.meter import Use

_SAYS = {
    "started": "started, {} tokens of its prompt already in the cache",
    "to the host": "pre-empted, its {} tokens moved to the host",
    "dropped": "pre-empted, its {} tokens dropped (the host is full)",
    "back": "back, {} tokens moved from the host",
    "done": "done after {} tokens",
}


@dataclass
class Answer:
    """A prompt as the screen knows it: its request from when it has arrived."""

    number: int
    prompt: str
    request: Request | None = None


class Screen:
    """Prints to `console`: what happens, line by line, and the answers; on a terminal they are seen growing."""

    def __init__(self, console: Console, answers: Sequence[Answer], decode: Callable[[list[int]], str]) -> None:
        self.console, self.answers, self.decode = console, answers, decode
        self._told = 0

    def serve(self, engine: Engine, arrive: Callable[[], None]) -> None:
        """Steps the engine until nobody is left; `arrive` is called before each step and after the last."""
        if not self.console.is_terminal:
            for _ in self._steps(engine, arrive):
                pass
            self.console.print(self._grid())
            return
        with Live(console=self.console, auto_refresh=False) as view:
            for _ in self._steps(engine, arrive):
                view.update(self._grid(), refresh=True)

    def _steps(self, engine: Engine, arrive: Callable[[], None]) -> Iterator[None]:
        arrive()
        while engine.live:
            engine.step()
            self._tell(engine.events)
            yield
            arrive()

    def _tell(self, events: Sequence[Event]) -> None:
        of = {a.request: a.number for a in self.answers if a.request is not None}
        for event in events[self._told :]:
            what = _SAYS[event.what].format(event.tokens)
            self.console.print(f"[dim]step {event.step:>3}[/]  [cyan]{of[event.request]}[/]  {what}", highlight=False)
        self._told = len(events)

    def _grid(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_column(justify="right", style="cyan")
        grid.add_column(ratio=1)
        for a in self.answers:
            grid.add_row()
            grid.add_row(str(a.number), Text(a.prompt, style="bold"))
            grid.add_row("", self._text(a.request))
        return grid

    def _text(self, request: Request | None) -> Text:
        if request is None:
            return Text("not here yet", style="dim")
        text = Text(self.decode(request.output))
        if not request.done:
            state = " ▌" if request.row is not None else "  (on the host)" if request.started else "  (waits)"
            text.append(state, style="dim")
        return text

    # --- tables -------------------------------------------------------------------------------------

    def checked(self, found: Sequence[Comparison]) -> None:
        """The comparison with transformers, a line a prompt."""
        table = _table("Tokens beside transformers' greedy generate")
        for name in ("prompt", "tokens", "closest two logits", "verdict"):
            table.add_column(name, justify="right" if name != "verdict" else "left")
        for a, c in zip(self.answers, found, strict=True):
            assert a.request is not None
            table.add_row(str(a.number), str(len(a.request.output)), f"{c.closest:.2g}", _verdict(c))
        self.console.print(table)

    def used(self, uses: Sequence[Use]) -> None:
        """Who ran the ops, how long all calls took, and how long one did once the first had compiled."""
        table = _table("Who ran the ops")
        for name in ("op", "backend", "lane"):
            table.add_column(name)
        for name in ("calls", "time", "later calls"):
            table.add_column(name, justify="right")
        for u in uses:
            later = _time((u.seconds - u.first) / (u.calls - 1)) if u.calls > 1 else ""
            table.add_row(u.op, escape(u.backend), u.lane, str(u.calls), _time(u.seconds), later)
        self.console.print(table)


def benched(console: Console, rows: Sequence[Row]) -> None:
    """Tokens a second, the engine's and transformers'."""
    table = _table("Tokens a second beside transformers' greedy generate")
    for name in ("prompts", "tokens each", "hal", "transformers", "ratio", "lowest to highest", "outputs equal"):
        table.add_column(name, justify="right")
    for r in rows:
        ratios = sorted(t / o for o, t in zip(r.ours, r.theirs, strict=True))
        table.add_row(
            str(r.prompts),
            str(r.tokens // r.prompts),
            f"{r.rate(r.ours):.1f}",
            f"{r.rate(r.theirs):.1f}",
            f"{r.ratio:.2f} x",
            f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            f"{r.equal} of {r.prompts}",
        )
    console.print(table)
    console.print(
        f"Medians of {len(rows[0].ours)} interleaved rounds, prompts included; transformers' several prompts are one "
        "left-padded batch; the engine reused no prefix.",
        highlight=False,
    )


def _verdict(c: Comparison) -> str:
    if c.equal:
        return "[green]equal[/]"
    where = f"[yellow]differs from token {c.differs_at}[/]"
    if c.gaps is None:
        return where
    return f"{where}, where the two best logits are {c.gaps[0]:.3g} apart (transformers: {c.gaps[1]:.3g})"


def _time(seconds: float) -> str:
    scale, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * scale:.4g} {unit}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, collapse_padding=True)


def progress(console: Console) -> Progress:
    """A bar that counts steps."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
