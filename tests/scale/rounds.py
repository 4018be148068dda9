"""What engines are asked, and who answered."""

from __future__ import annotations

import json
from pathlib import Path

import torch


def prompts(lengths: tuple[int, ...] = (3, 14, 1, 22, 9, 17, 5, 40), seed: int = 0) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 199, (n,), generator=g).tolist() for n in lengths]


def shared_prefix() -> list[list[list[int]]]:
    """Two rounds: a prompt of 96 tokens, then eight that begin with it."""
    (prefix,) = prompts((96,), seed=5)
    return [[prefix], [prefix + p for p in prompts(seed=6)]]


def evicted() -> list[list[list[int]]]:
    """Rounds: a prompt, two that take its place in a small pool, and it again, a little longer."""
    first, *others = prompts((160, 200, 200), seed=9)
    return [[first], *([p] for p in others), [[*first, 3, 4, 5]]]


def processes(trace: Path) -> dict[int, dict[str, set[str]]]:
    """Of each process that wrote to a file of `HAL_TRACE`: the backends by op."""
    found: dict[int, dict[str, set[str]]] = {}
    for line in trace.read_text().splitlines():
        said = json.loads(line)
        for row in said["calls"]:
            found.setdefault(said["pid"], {}).setdefault(row["op"], set()).add(row["backend"])
    return found
