"""The lowered lane: Ascend kernels, lowered by Ascend's own compiler and run on the CPU.

For any Ascend plugin, not only ours: with ``HAL_LANE=lowered`` in the environment, `hal.triton.launch` sends
every kernel here. What runs is the IR that the NPU's compiler gets, so what lowering does to a kernel
(a masked-off lane that is read all the same, a store that became read-modify-write of a whole block)
happens here too, and Triton's interpreter doesn't show it. Every access is checked before it is made:

- out of an argument's bounds, or between the rows of a view: `AccessError`;
- a byte written by one program and touched by another: `RaceError`.

It proves logic, memory safety and lowering. It proves nothing about time, nor about what the device's
last compiler (``hivmc``) does: reports say *lowered*, never *device*.

Nothing here imports triton or llvmlite until a kernel is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hal.lowered.errors import AccessError, LoweredError, LoweringError, RaceError, ToolchainError
from hal.lowered.lower import Lowered, find, lower
from hal.lowered.machine import Launch, Traffic, launch, recording, untraced
from hal.lowered.toolchain import missing

__all__ = [
    "AccessError",
    "Launch",
    "Lowered",
    "LoweredError",
    "LoweringError",
    "RaceError",
    "ToolchainError",
    "Traffic",
    "lower",
    "missing",
    "recording",
    "run",
    "shared_writes",
    "untraced",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def shared_writes(*names: str) -> Callable[[_Function], _Function]:
    """Says of a kernel that two of its programs may write one element of the arguments `names`.

    For contracts like "equal slots in one call: each element is one of the candidates'". Only two writes
    are excused; a byte that one program writes and another reads stays a race. Put it under
    ``@launch.jit``, on the function itself.

    Example:
        >>> @shared_writes("k_cache")
        ... def kernel(k, k_cache, slots): ...
        >>> kernel.hal_shared_writes
        frozenset({'k_cache'})
    """

    def mark(fn: _Function) -> _Function:
        fn.hal_shared_writes = frozenset(names)  # type: ignore[attr-defined]
        return fn

    return mark


def run(
    jit_fn: Any,
    grid: Sequence[int],
    args: Sequence[Any],
    constexprs: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
) -> None:
    """Run a Triton kernel in the lowered lane.

    Args:
        jit_fn: what triton-ascend's ``triton.jit`` made.
        grid: one to three extents.
        args: the arguments of all parameters that are not constexpr, in order; tensors on the CPU.
        constexprs: the constexpr parameters by name.
        options: compile options; those that triton-ascend doesn't know are ignored, as it ignores them.

    Raises:
        ToolchainError: the packages are missing; the message has the command that installs them.
        LoweringError: the compiler refused the kernel.
        AccessError: a program touched memory that is not its argument's. The access was not made.
        RaceError: two programs touched one byte, one of them writing.

    Example:
        >>> run(kernel.jit, (4,), (src, dst, n), {"BLOCK": 64}, {})          # doctest: +SKIP

    Source: the route is this project's; the tools are triton-ascend's and AscendNPU IR's.
    """
    lowered, taken = find(jit_fn, args, constexprs, options)
    shared: frozenset[str] = getattr(jit_fn.fn, "hal_shared_writes", frozenset())
    launch(lowered, grid, [args[i] for i in taken], shared)
