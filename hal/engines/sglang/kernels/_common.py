"""What the functions with SGLang's names share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from hal.engines import EngineError

P = ParamSpec("P")
R = TypeVar("R")


class Unsupported(EngineError, NotImplementedError):
    """An argument of SGLang's kernel asks for what hal's contract has not. Nothing was written."""


def refuse(function: str, **arguments: Any) -> None:
    """Raises `Unsupported` if one of these arguments is set: not None, False or the value that stands for none.

    Args:
        function: SGLang's name.
        arguments: by name.
    """
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise Unsupported(
                f"hal: {function}: {name} is set, which hal's op does not take — docs/engines.md lists what does"
            )


class Launched(Generic[P, R]):
    """A function that is also called as Triton's kernels are, ``kernel[grid](...)``; the grid says nothing to it."""

    def __init__(self, run: Callable[P, R]) -> None:
        self.run = run
        self.__name__, self.__doc__ = run.__name__, run.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.run(*args, **kwargs)

    def __getitem__(self, grid: Any) -> Callable[P, R]:
        return self.run
