"""When moving a prompt's KV beats computing it again: a model, and a simulation of 1,000 hosts that decode.

``hal bench scale`` prints the tables of docs/scale.md and runs the simulation; ``--plot FILE`` draws it, with
matplotlib. Nothing here is measured: `MEASURED` is what was, elsewhere, and what the model is made of.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MEASURED = {"prefill FLOP/s": 700e12, "bus bytes/s": 51.3e9}
"""Of one H200: vLLM's prefill of 4,096 tokens of the Llama-3.1-8B shape (h200-vllm-llama-3.1-8b.json), as FLOP/s of the
model below; and kv_transfer from the host to the device, any slots (docs/performance.md)."""

LINKS = {"10 GbE": 10, "25 GbE": 25, "100 GbE": 100, "400 Gb/s": 400}
"""Gigabits a second."""


@dataclass(frozen=True)
class Shape:
    """A model, as far as its KV and its prefill go.

    Attributes:
        parameters: those that a token passes through.
        row: elements of k and v that a token leaves in a layer.
        score: multiply-adds of attention per layer for one query and one key, over all heads.
        kv_bytes: bytes an element of the cache has.
    """

    parameters: float
    layers: int
    row: int
    score: int
    kv_bytes: int = 2

    @property
    def bytes_a_token(self) -> int:
        return self.layers * self.row * self.kv_bytes

    def compute(self, new: float, cached: float = 0.0, flops: float = MEASURED["prefill FLOP/s"]) -> float:
        """Seconds to prefill `new` tokens after `cached` ones, all of whose keys they see."""
        pairs = new * cached + new * new / 2
        return (2 * self.parameters * new + 2 * self.score * self.layers * pairs) / flops

    def move(self, tokens: float, gigabits: float, page: int = 64, a_page: float = 0.0) -> float:
        """Seconds to move the KV of `tokens` over a link; `a_page`: seconds that each page costs besides."""
        return tokens * self.bytes_a_token / (gigabits * 1e9 / 8) + math.ceil(tokens / page) * a_page

    def breaks_even(self, tokens: float) -> float:
        """Gigabits a second from which moving a prompt of `tokens` is the quicker."""
        return tokens * self.bytes_a_token * 8 / 1e9 / self.compute(tokens)

    def longer_than(self, gigabits: float) -> float:
        """Tokens from which moving a prompt over this link is the quicker: 0 if always."""
        linear = 2 * self.parameters / MEASURED["prefill FLOP/s"]
        square = self.score * self.layers / MEASURED["prefill FLOP/s"]
        return max(0.0, (self.move(1, gigabits) - linear) / square)


def _dense(parameters: float, layers: int, heads: int, kv_heads: int, dim: int) -> Shape:
    return Shape(parameters, layers, 2 * kv_heads * dim, 2 * heads * dim)


SHAPES = {
    "Llama-3.1-8B": _dense(8.0e9, 32, 32, 8, 128),
    "Llama-3.1-70B": _dense(70.6e9, 80, 64, 8, 128),
    "Qwen3-30B-A3B": _dense(3.3e9, 48, 32, 4, 128),
    # Latent rows of 512 + 64; prefill attends with heads of 192 and 128.
    "DeepSeek-V2-Lite": Shape(2.4e9, 27, 576, 16 * (192 + 128)),
}


@dataclass(frozen=True)
class Arrivals:
    """Statistics of the public conversation trace of Mooncake (kvcache-ai/Mooncake at 3b5a5941, FAST25-release/traces).

    12,031 requests of an hour: lengths of prompts are about log-normal; 7,373 conversations, whose sizes fall with
    their rank to the power of -0.42; of all prompt tokens 37 % were seen before as a prefix.
    """

    mu: float = 8.737
    sigma: float = 1.199
    longest: int = 131_072
    conversations: float = 1.15
    """That there are, a request: so many that 61 % of all requests are their conversation's first."""
    exponent: float = 0.42
    follow_up: float = 1200.0

    def draw(self, count: int, rate: float, rng: random.Random) -> list[tuple[float, int, int, int]]:
        """(seconds, conversation, tokens that were there before it, new tokens), in the order of arrival: Poisson."""
        weights = [k**-self.exponent for k in range(1, max(2, round(count * self.conversations)) + 1)]
        first: dict[int, int] = {}
        found, now = [], 0.0
        for which in rng.choices(range(len(weights)), weights, k=count):
            now += rng.expovariate(rate)
            if which not in first:
                first[which] = min(round(rng.lognormvariate(self.mu, self.sigma)) + 1, self.longest)
                found.append((now, which, 0, first[which]))
            else:
                found.append((now, which, first[which], round(rng.expovariate(1 / self.follow_up)) + 1))
        return found


POLICIES = ("recompute", "move", "model")
"""What a request whose prefix another GPU has does on the GPU that balances the load: computes it again; moves it; or
goes wherever, and by whichever way, the model says that it is done first, the prefix's own GPU included."""


@dataclass
class Cluster:
    """GPUs that prefill, each with a link and a cache of prefixes in host memory; hosts that decode, each with a link.

    A GPU takes its requests in the order of arrival, a link what is sent in the order of time. A request's load is
    balanced by two GPUs drawn at random, its decode host likewise.
    """

    gigabits: float
    policy: str = "model"
    shape: Shape = SHAPES["Llama-3.1-8B"]
    prefill: int = 600
    decode: int = 1000
    cache_bytes: float = 250e9
    moved: float = 0.0
    computed: float = 0.0
    ways: Counter[str] = field(default_factory=Counter)

    def run(self, requests: Sequence[tuple[float, int, int, int]], rng: random.Random) -> list[float]:
        """Seconds of each request from its arrival until its KV is where it is decoded."""
        self.busy, self.inward, self.outward = ([0.0] * self.prefill for _ in range(3))
        self.caches: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(self.prefill)]
        self.used = [0.0] * self.prefill
        self.holder: dict[int, int] = {}
        links, waits = [0.0] * self.decode, []
        # Arrivals and ends of prefills, in the order of time.
        events: list[tuple[float, int, int]] = [(now, i, -1) for i, (now, *_) in enumerate(requests)]
        heapq.heapify(events)
        while events:
            now, i, gpu = heapq.heappop(events)
            _, which, before, new = requests[i]
            if gpu < 0:
                gpu, done = self._prefill(now, which, before, new, rng)
                heapq.heappush(events, (done, i, gpu))
                continue
            self._keep(gpu, which, before + new)
            a, b = rng.randrange(self.decode), rng.randrange(self.decode)
            target = a if links[a] <= links[b] else b
            there = max(now, links[target], self.outward[gpu]) + self.shape.move(before + new, self.gigabits)
            links[target] = self.outward[gpu] = there
            self.moved += (before + new) * self.shape.bytes_a_token
            waits.append(there - requests[i][0])
        return waits

    def _prefill(self, now: float, which: int, before: int, new: int, rng: random.Random) -> tuple[int, float]:
        """(GPU, when it is done)"""
        a, b = rng.randrange(self.prefill), rng.randrange(self.prefill)
        gpu = a if self.busy[a] <= self.busy[b] else b
        home = self.holder.get(which) if before else None
        fresh = "new" if not before else "again"
        again = max(now, self.busy[gpu]) + self.shape.compute(before + new)
        ways = [(again, fresh, gpu, 0.0)]
        rest = self.shape.compute(new, before)
        if home is not None and home != gpu and self.policy != "recompute":
            there = max(now, self.inward[gpu], self.outward[home]) + self.shape.move(before, self.gigabits)
            ways.append((max(there, self.busy[gpu]) + rest, "moved", gpu, there))
        if home is not None and (home == gpu or self.policy == "model"):
            loaded = now + self.shape.move(before, MEASURED["bus bytes/s"] * 8 / 1e9)
            ways.append((max(loaded, self.busy[home]) + rest, "here", home, loaded))
        done, way, gpu, there = min(ways) if self.policy == "model" else ways[-1]
        if way == "moved":
            assert home is not None
            self.inward[gpu] = self.outward[home] = there
            self.moved += before * self.shape.bytes_a_token
        self.ways[way] += 1
        self.computed += self.shape.compute(before + new) if way in ("new", "again") else rest
        self.busy[gpu] = done
        return gpu, done

    def _keep(self, gpu: int, which: int, tokens: int) -> None:
        """A prefix's KV into the GPU's cache; out goes what was not used for longest."""
        cache = self.caches[gpu]
        self.used[gpu] += (tokens - cache.pop(which, 0)) * self.shape.bytes_a_token
        cache[which] = tokens
        self.holder[which] = gpu
        while self.used[gpu] > self.cache_bytes:
            gone, size = cache.popitem(last=False)
            self.used[gpu] -= size * self.shape.bytes_a_token
            if self.holder.get(gone) == gpu:
                del self.holder[gone]


def percentile(values: Iterable[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def simulate(
    gigabits: Sequence[float] = (10, 25, 50, 100, 200, 400), count: int = 60_000, rate: float = 1500.0, seed: int = 0
) -> list[dict[str, Any]]:
    """A row a link and policy, all on the same requests."""
    requests = Arrivals().draw(count, rate, random.Random(seed))
    rows: list[dict[str, Any]] = []
    for link in gigabits:
        for policy in POLICIES:
            cluster = Cluster(link, policy)
            waits = cluster.run(requests, random.Random(seed))
            follow_ups = max(1, count - cluster.ways["new"])
            rows.append(
                {
                    "gigabits": link,
                    "policy": policy,
                    "median": percentile(waits, 0.5),
                    "p99": percentile(waits, 0.99),
                    "gpu_seconds": cluster.computed / count,
                    "gigabytes": cluster.moved / count / 1e9,
                    **{way: cluster.ways[way] / follow_ups for way in ("here", "moved", "again")},
                }
            )
    return rows


# --- what is shown ----------------------------------------------------------------------------------


def table() -> str:
    """Of each shape: KB a token, seconds to prefill, Gb/s from which moving is quicker; by link, from which length."""
    lines = [
        f"{'':18}{'KB a':>6}{'prefill, s':>18}{'break-even, Gb/s':>20}   {'moving is quicker from (tokens)'}",
        f"{'':18}{'token':>6}{'4k':>9}{'32k':>9}{'4k':>10}{'32k':>10}   " + "".join(f"{name:>10}" for name in LINKS),
    ]
    for name, s in SHAPES.items():
        long = "".join(f"{_tokens(s.longer_than(g)):>10}" for g in LINKS.values())
        lines.append(
            f"{name:18}{s.bytes_a_token / 1e3:>6.0f}{s.compute(4096):>9.3f}{s.compute(32768):>9.2f}"
            f"{s.breaks_even(4096):>10.1f}{s.breaks_even(32768):>10.1f}   {long}"
        )
    return "\n".join(lines)


def _tokens(n: float) -> str:
    return "any" if n <= 0 else f"{n / 1e3:.0f}k" if n < 1e6 else f"{n / 1e6:.1f}M"


def format_rows(rows: Iterable[dict[str, Any]]) -> str:
    """A line a link and policy; of requests with a prefix, the shares that found it, moved it, computed it again."""
    titles = f"{'GB moved':>10}{'here':>7}{'moved':>7}{'again':>7}"
    lines = [f"{'Gb/s':>5} {'policy':10}{'median s':>9}{'p99 s':>8}{'GPU s':>8}{titles}"]
    lines += [
        f"{r['gigabits']:>5} {r['policy']:10}{r['median']:>9.2f}{r['p99']:>8.1f}{r['gpu_seconds']:>8.3f}"
        f"{r['gigabytes']:>10.2f}{r['here']:>7.0%}{r['moved']:>7.0%}{r['again']:>7.0%}"
        for r in rows
    ]
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    for axes, what, title in zip(figure.subplots(1, 2), ("median", "p99"), ("median", "99th percentile"), strict=True):
        for policy in POLICIES:
            mine = [r for r in rows if r["policy"] == policy]
            axes.plot([r["gigabits"] for r in mine], [r[what] for r in mine], marker="o", label=policy)
        axes.set(xscale="log", yscale="log", xlabel="link, Gb/s", ylabel="s until decoding can begin", title=title)
        links = sorted({r["gigabits"] for r in rows})
        axes.set_xticks(links, labels=[str(link) for link in links])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    axes.legend()
    figure.suptitle("Simulated: Llama-3.1-8B, 600 GPUs that prefill, 1,000 hosts that decode, 1,500 requests/s")
    figure.savefig(file, metadata={"Date": None})


def main(requests: int, rate: float, seed: int, file: Path | None) -> int:
    """Prints the tables of docs/scale.md and the simulation; draws it into a file, where one is named."""
    print(table(), end="\n\n")
    rows = simulate(count=requests, rate=rate, seed=seed)
    print(format_rows(rows))
    if file is not None:
        plot(rows, file)
    return 0
