"""What the benches of whole engines share: inputs, points in a time box, reports of stock and hal side by side."""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from hal.bench.report import machine, version
from hal.bench.shapes import SHAPES

LENGTHS = (1, 7, 33, 128, 500, 900)
"""Of the prompts whose logits are compared."""


def prompt(vocabulary: int, n: int, seed: int) -> list[int]:
    """`n` tokens, always the same."""
    r = random.Random(seed)
    return [r.randrange(1, vocabulary) for _ in range(n)]


def write_config(folder: str | Path, shape: str, dtype: str) -> None:
    """A model of the shape, but for its weights."""
    config = {**SHAPES[shape], "torch_dtype": dtype, "bos_token_id": 1, "eos_token_id": 2}
    Path(folder, "config.json").write_text(json.dumps(config))


def graph_sizes(batch: int) -> list[int]:
    """The batches whose graphs are captured."""
    return sorted({n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if n <= batch} | {batch})


def run_points(
    engine: str,
    points: Iterable[tuple[str, Callable[[], Any]]],
    found: dict[str, Any],
    begin: float,
    seconds: float,
    turns: AbstractContextManager[Any] | None = None,
) -> Iterator[None]:
    """Calls each point, in its turn, and goes on; none that would begin `seconds` after `begin`: it is ``skipped``."""
    for name, run in points:
        if time.perf_counter() - begin > seconds:
            found["skipped"].append(name)
            continue
        with turns or nullcontext():
            run()
        print(f"{engine}: {name} at {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        yield


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def about(shape: str, dtype: str, *distributions: str) -> dict[str, Any]:
    """What a report begins with; `distributions`: of the engine, whichever is installed."""
    it = machine("cuda" if has_gpu() else "cpu")
    return {
        "date": it["date"],
        "commit": it["commit"],
        "shape": shape,
        "dtype": dtype,
        "device": it["device"],
        "torch": it["versions"]["torch"],
        "python": it["python"],
        "engine": next(filter(None, map(version, distributions)), ""),
        "triton": it["versions"]["triton"] or "",
    }


def write(report: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=1) + "\n")


def show(report: dict[str, Any]) -> int:
    """Prints a report and its runs; 1 where one of them failed."""
    print(json.dumps({k: v for k, v in report.items() if k != "runs"}, indent=1))
    for r in report["runs"]:
        print(json.dumps({k: v for k, v in r.items() if k != "logits"}))
    return int(any("error" in r for r in report["runs"]))


def agreement(stock: dict[str, Any], ours: dict[str, Any]) -> list[dict[str, Any]]:
    """How far the log-probabilities are from stock's, and how far stock's in a batch are from its own alone."""

    def far(a: dict[str, float], b: dict[str, float]) -> float:
        return max((abs(a[t] - b[t]) for t in a.keys() & b.keys()), default=float("nan"))

    rows = []
    for s, h in zip(stock.get("logits", []), ours.get("logits", []), strict=False):
        same = sum(1 for _ in _while_equal(s["tokens"], h["tokens"]))
        rows.append(
            {
                "length": s["length"],
                "hal_to_stock": far(s["alone"], h["alone"]),
                "hal_to_stock_batched": far(s["batched"], h["batched"]),
                "stock_to_itself": far(s["alone"], s["batched"]),
                "in_both_top_20": len(s["alone"].keys() & h["alone"].keys()),
                "equal_greedy_tokens": same,
            }
        )
    return rows


def _while_equal(a: list[int], b: list[int]) -> Iterator[int]:
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


def ratios(stock: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """hal's speed over stock's, of the medians over rounds; more than 1: hal is faster."""

    def over(runs: list[dict[str, Any]], kind: str, key: Callable[[Any], str], value: str) -> dict[str, float]:
        found: dict[str, list[float]] = {}
        for r in runs:
            for row in r.get(kind, []):
                found.setdefault(key(row), []).append(row[value])
        return {k: statistics.median(v) for k, v in found.items()}

    at = lambda row: f"{row['batch']} x {row['context']}"  # noqa: E731
    length = lambda row: str(row["tokens"])  # noqa: E731
    s, h = over(stock, "decode", at, "tokens_s"), over(ours, "decode", at, "tokens_s")
    out: dict[str, Any] = {"decode": {k: round(h[k] / s[k], 4) for k in s if k in h}}
    s, h = over(stock, "ttft", length, "ms"), over(ours, "ttft", length, "ms")
    out["ttft"] = {k: round(s[k] / h[k], 4) for k in s if k in h}
    t = [[r["throughput"]["total_tokens_s"] for r in x if "throughput" in r] for x in (stock, ours)]
    if all(t):
        out["throughput"] = round(statistics.median(t[1]) / statistics.median(t[0]), 4)
    return out
