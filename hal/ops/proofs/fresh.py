"""What an op says of inputs that are drawn anew in every run: which sizes go how far beyond the samples'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

REQUESTS = (8_193, 12_000)
"""Requests in a batch."""
TOKENS = (65_537, 70_000)
"""Tokens of one call, or of one request: more than 16 bits count."""
ROWS = (131_073, 140_000)
"""Rows of a table, so that about half of them are beyond 16 bits."""
COLUMNS = (16_385, 20_000)
HEADS = (128, 140)
PAIRS = (8_193, 10_000)
"""Pairs of slots."""
SLOTS = (81_408, 83_712)
"""Slots of a cache, a fifth of them beyond 16 bits; in whole pages of 1, 3, 16 and up to 256:"""
PAGES = 768
ROTATED = (16_385, 17_000)
"""Tokens where each is a row of floats with a truth in float64."""
MANY = (64, 200)
"""As many index values as reach each part of whatever they are drawn from."""


@dataclass(frozen=True)
class Wide:
    """How a parameter of `OpSpec.make` is drawn when it is the wide one.

    Args:
        sizes: an inclusive range; or a list of choices, which no lane and no pair makes smaller.
        beside: what else is drawn from another place meanwhile: a range, a list of choices, a value, or a function of
            all the others.
        step: only multiples of this are drawn.
    """

    sizes: tuple[int, int] | list[Any]
    beside: Mapping[str, Any] = field(default_factory=dict)
    step: int = 1


@dataclass(frozen=True)
class Fresh:
    """Where inputs are drawn from; what is not named here comes from `OpSpec.ragged`.

    Args:
        wide: parameter -> how far it goes. Each is the wide one in a case of its own, and with each other in another.
        size: parameters -> about how many elements the call and its truth go through; pairs of wide ones shrink by it.
        beside: as in `Wide`, for all draws.
        held: parameters -> about how many bytes the arguments and their truth have; several wide ones are drawn again
            by it. None: 16 for each element of `size`, as of rows with a truth in float64.
    """

    wide: Mapping[str, Wide]
    size: Callable[[Mapping[str, Any]], int]
    beside: Mapping[str, Any] = field(default_factory=dict)
    held: Callable[[Mapping[str, Any]], int] | None = None


def room_for(*names: str) -> Callable[[Mapping[str, Any]], int]:
    """Slots, whole pages of them, for the product of some parameters."""
    return lambda p: (prod(p[name] for name in names) // PAGES + 1) * PAGES


def table_fresh(few: Mapping[str, Any], **more: Wide) -> Fresh:
    """That of the ops on req_to_token; `few`: what keeps a request short."""
    return Fresh(
        {
            "bs": Wide(REQUESTS, few),
            "requests": Wide(ROWS, {"bs": MANY, "width": (1, 16), **few}),
            "width": Wide(COLUMNS, {"bs": MANY, "requests": (30, 40)}),
            **more,
        },
        lambda p: p["requests"] * p["width"] + p["bs"] * (8 + p.get("longest", 0) // 2 + p.get("pages", 0)),
    )
