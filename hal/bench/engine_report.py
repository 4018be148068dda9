"""Runs of an engine, stock and on hal, side by side: how far their outputs agree, the ratios of their speeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any


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
