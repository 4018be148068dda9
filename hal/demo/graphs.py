"""`DecodeGraphs`: decode steps captured once and replayed, so that the host starts one thing a step, not hundreds.

A graph is made for a batch size and for buffers that never move. A smaller batch is padded: rows without a
token, which the ops turn into slot -1, position -1 and nothing to attend to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import hal
from hal.demo.model import Batch
from hal.registry import table

Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]
"""Runs a function once; the tensor that it gave, and what computes that tensor anew, in its place."""


def record_cuda(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """`Record` by a CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Selecting a backend, compiling and loading a kernel, making a workspace: none may happen in a capture.
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    return made, graph.replay


def unsafe(examples: Mapping[str, Mapping[str, Any]], *ops: str) -> str:
    """Why calls of `ops` can't be captured, by what the backends that would run them declare; or ``""``."""
    for op in ops:
        chosen = hal.explain(op, **examples[op]).chosen
        if chosen is None:
            return f"nothing runs {op}"
        backend, _, name = chosen.name.partition("/")
        safe = any(i.graph_safe for i, _ in table()[op][backend] if i.name == name)
        if backend != "reference" and not safe:
            return f"{op} runs on {chosen.name}, which is not declared graph-safe"
    return ""


class DecodeGraphs:
    """Graphs of `forward` for batches of up to `most` requests, each captured when it is first needed.

    Args:
        forward: what computes a batch of one token each.
        record: how, e.g. `record_cuda`.
        most: requests in a batch.
        listed: tokens of all requests of a batch together, at most.
        device: where.
        why_not: a reason to capture nothing.
    """

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        record: Record,
        *,
        most: int,
        listed: int,
        device: torch.device,
        why_not: str = "",
    ) -> None:
        self.forward, self.record, self.why_not, self.replayed = forward, record, why_not, 0
        self.sizes = [*(1 << i for i in range((most - 1).bit_length())), most]
        self._buffers = Batch.empty(most, most, listed, device, decode=True)
        self._graphs: dict[int, tuple[Batch, Tensor, Callable[[], None]]] = {}

    def batch(self, n: int) -> Batch | None:
        """The buffers of the smallest graph for `n` requests, to be filled; None: run without a graph."""
        size = next((s for s in self.sizes if s >= n), 0)
        if self.why_not or not size:
            return None
        if size not in self._graphs:
            b = self._buffers
            batch = Batch(b.tokens[:size], b.positions[:size], b.slots[:size], b.kv_indptr[: size + 1], b.kv_indices)
            # Padding alone: the capture writes nothing and reads no slot.
            batch.tokens.zero_(), batch.positions.fill_(-1), batch.slots.fill_(-1), batch.kv_indptr.zero_()
            try:
                self._graphs[size] = (batch, *self.record(lambda: self.forward(batch)))
            except (RuntimeError, hal.HalError) as e:
                self.why_not = f"capturing {size} requests failed: {e}"
                return None
        return self._graphs[size][0]

    def replay(self, batch: Batch) -> Tensor:
        """The result for a batch that `batch` gave, once it is filled; good until the next replay."""
        _, made, again = self._graphs[len(batch.tokens)]
        again()
        self.replayed += 1
        return made


def padded(values: Sequence[int], size: int) -> list[int]:
    """With zeros up to `size`: a request of no tokens."""
    return [*values, *[0] * (size - len(values))]
