"""What a call starts, by the plan that is made for it."""

from typing import Any


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
