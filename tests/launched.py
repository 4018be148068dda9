"""What a call starts, by the plan that is made for it, and what it gives in a graph."""

from collections.abc import Callable
from typing import Any

import torch


def launched(op: str, args: dict[str, Any], arch: int = 90) -> list[Any]:
    """The launches of a call of the cuda backend that are due for its lengths."""
    from importlib import import_module

    from hal.backends.cuda import inspect

    plans = import_module(f"hal.backends.cuda.{op}")._plans
    with inspect.record(arch):
        plan = plans.make(*(args[name] for name in plans.names))
    long = {name: len(a) for name, a in args.items() if getattr(a, "ndim", 0)}
    due = (step for step in plan.steps if all(low < long[name] <= high for name, low, high in step.where))
    return [step.run for step in due if step.grid.value(long)]


def same_in_graphs(call: Callable[..., torch.Tensor], args: dict[str, Any]) -> None:
    """Asserts that a call gives what it gave, to the last bit, twice in a CUDA graph and at each replay of it."""
    args = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in args.items()}
    first = call(**args).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(**args)
        call(**args)
    for _ in range(3):
        args["out"].zero_()
        graph.replay()
        assert torch.equal(args["out"], first)
