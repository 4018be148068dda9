"""A bar on stderr: what runs now, and about how long the rest will take. None where nobody looks at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

PERIOD = 600.0
"""Seconds whose speed the estimate is made of: what is compiled or proven takes very different times."""


class Bar:
    """Draws nothing; `shown` makes one that does."""

    def at(self, done: float, what: str) -> None:
        """`what` begins; so much of the whole is done."""

    def size(self, total: float) -> None:
        """How much the whole is, once that is known."""


def is_wanted() -> bool:
    """Is somebody looking? Where stdout is piped, what is on it is for a program."""
    return sys.stdout.isatty() and sys.stderr.isatty()


@contextmanager
def show(total: float | None = None, quiet: bool = False) -> Iterator[Bar]:
    """A bar while the block lasts; it is wiped out at the end. None where `quiet`, or nobody is looking.

    Args:
        total: the size of the whole, in whatever unit `Bar.at` counts; None: not known yet.
    """
    if quiet or not is_wanted():
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    # What is printed meanwhile goes where it would have gone.
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        speed_estimate_period=PERIOD,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as progress:
        task = progress.add_task("", total=total)

        class Drawn(Bar):
            def at(self, done: float, what: str) -> None:
                progress.update(task, completed=done, description=what)

            def size(self, total: float) -> None:
                progress.update(task, total=total)

        yield Drawn()
