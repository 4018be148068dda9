"""The demo's proof: each request's tokens beside transformers' own greedy `generate`, which runs it alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hal.demo.engine import Request


@dataclass(frozen=True)
class Comparison:
    """What transformers generated for one request's prompt.

    Attributes:
        tokens: transformers' output.
        differs_at: the first output token that is another, or None.
        gaps: there, how far the best logit is ahead of the second: the engine's, transformers'.
        closest: the smallest of the engine's gaps over all tokens: how near they came to differing.
    """

    tokens: list[int]
    differs_at: int | None
    gaps: tuple[float, float] | None
    closest: float

    @property
    def equal(self) -> bool:
        return self.differs_at is None


@torch.inference_mode()
def compare(model: Any, request: Request) -> Comparison:
    """Generates the request's output again with `model`, a transformers causal LM, and compares."""
    prompt = torch.tensor([request.prompt], dtype=torch.int64, device=model.device)
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=request.max_new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    theirs, ours = made.sequences[0, prompt.shape[1] :].tolist(), request.output
    both = zip(ours, theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(both) if a != b), min(len(ours), len(theirs)))
    closest = min(request.gaps, default=float("nan"))
    if at == len(ours) == len(theirs):
        return Comparison(theirs, None, None, closest)
    gaps: tuple[float, float] | None = None
    if at < len(request.gaps) and at < len(made.logits):
        best = made.logits[at][0].float().topk(2).values.tolist()
        gaps = (request.gaps[at], best[0] - best[1])
    return Comparison(theirs, at, gaps, closest)
