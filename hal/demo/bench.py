"""`hal demo --bench`: the engine's tokens a second beside transformers' own `generate`, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

import hal
from hal.demo.engine import Engine
from hal.demo.graphs import record_cuda
from hal.demo.meter import sync
from hal.demo.model import Llama
from hal.kv.pool import KVPool

ROUNDS = 7
PAGE_SIZE = 16
Tokens = list[list[int]]


@dataclass(frozen=True)
class Row:
    """One case: seconds of each round, the engine's and transformers', and how many of the outputs were equal."""

    prompts: int
    tokens: int
    ours: list[float]
    theirs: list[float]
    equal: int

    @property
    def ratio(self) -> float:
        """How many times faster the engine was: the median over rounds, in each of which the two ran in turn."""
        return median(t / o for o, t in zip(self.ours, self.theirs, strict=True))

    def rate(self, seconds: Sequence[float]) -> float:
        """Tokens a second, by the median."""
        return self.tokens / median(seconds)


def bound(model: Llama) -> Any:
    """The ops for this model as `hal.bind` gives them: the backend's own functions, nothing around them."""
    like = torch.zeros(1, model.kv_heads, model.head_dim, dtype=model.dtype, device=model.device)
    return hal.bind(model.device, like=model.examples(KVPool([like], [like.clone()])))


def run(
    model: Llama,
    theirs: Any,
    encoded: Sequence[list[int]],
    new: int,
    rounds: int,
    tell: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Measures one prompt alone, and all of them at once: `new` tokens of each, whatever they are.

    transformers gets one prompt as it is and several as a left-padded batch. Rounds are interleaved and the order
    of the two changes from round to round; a first round is not counted. The engine reuses no prefix here, since
    transformers has none to reuse: both compute every token of every prompt.

    Args:
        model: the engine's, with the ops to measure.
        theirs: the transformers model.
        encoded: the prompts.
        new: tokens to generate for each.
        rounds: counted ones.
        tell: is called after each round.
    """
    eos, model.eos = model.eos, frozenset()
    try:
        return [
            _case(model, theirs, prompts, new, rounds, tell)
            for prompts in (encoded[:1], encoded)[: min(2, len(encoded))]
        ]
    finally:
        model.eos = eos


def _case(
    model: Llama, theirs: Any, prompts: Sequence[list[int]], new: int, rounds: int, tell: Callable[[], None]
) -> Row:
    engine = engine_for(model, prompts, new)

    def ours() -> Tokens:
        requests = [engine.add(p, new) for p in prompts]
        engine.run()
        return [r.output for r in requests]

    both: tuple[Callable[[], Tokens], ...] = (ours, lambda: generate(theirs, prompts, new))
    seconds: list[list[float]] = [[], []]
    made: list[Tokens] = [[], []]
    for i in range(rounds + 1):
        for which in (0, 1) if i % 2 else (1, 0):
            sync(model.device)
            begin = time.perf_counter()
            made[which] = both[which]()
            sync(model.device)
            if i:
                seconds[which].append(time.perf_counter() - begin)
        tell()
    equal = sum(a == b for a, b in zip(*made, strict=True))
    return Row(len(prompts), new * len(prompts), seconds[0], seconds[1], equal)


def engine_for(model: Llama, prompts: Sequence[list[int]], new: int, late: int = 0, share: bool = False) -> Engine:
    """An engine with room for all prompts at once but the `late` shortest; with `share` it shares pages between them,
    and has a host pool."""
    running = max(1, len(prompts) - late)
    pages = sorted((-(-(len(p) + new) // PAGE_SIZE) for p in prompts), reverse=True)
    slots = sum(pages[:running]) * PAGE_SIZE
    return Engine(
        model,
        slots=slots,
        host_slots=slots * share,
        max_running=running,
        max_length=pages[0] * PAGE_SIZE,
        page_size=PAGE_SIZE,
        share=share,
        record=record_cuda if model.device.type == "cuda" else None,
    )


@torch.inference_mode()
def generate(model: Any, prompts: Sequence[list[int]], new: int) -> Tokens:
    """transformers' greedy `generate`: a single prompt, or a batch that is padded on the left."""
    longest = max(map(len, prompts))
    pad = [longest - len(p) for p in prompts]
    tokens = torch.tensor(
        [[0] * n + p for n, p in zip(pad, prompts, strict=True)], dtype=torch.int64, device=model.device
    )
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in pad], dtype=torch.int64, device=model.device)
    # No end token: both sides generate as many.
    made = model.generate(
        tokens, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return made[:, longest:].tolist()  # type: ignore[no-any-return]
