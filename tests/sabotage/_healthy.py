"""The contracts' references, as a backend of their own: what every fault is built around.

The code objects are copies, so that running one is not running hal's reference: a fault must be killed
for what it does, not for whose code it borrows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from hal._remote.target import Bound, always
from hal.ops import get_spec
from hal.ops.spec import Signature


def copy_of(op: str) -> Callable[..., Any]:
    """The reference of `op` with a code object of its own."""
    fn = get_spec(op).reference
    code = fn.__code__.replace(co_filename="healthy.py")
    copy = FunctionType(code, fn.__globals__, op, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


UNORDERED = {"kv_move", "kv_write", "mla_kv_write", "mla_rope_kv_write", "qk_norm_rope_kv_write", "write_req_to_token"}
"""On a GPU torch's own index_put leaves it open which of equal places wins."""


def healthy(op: str) -> Bound:
    return Bound(copy_of(op), always, f"healthy {op}", graph_safe=True, deterministic=op not in UNORDERED)


@dataclass(frozen=True)
class Fault:
    """A backend broken in one way.

    Args:
        name: what is wrong with it.
        op: the op it breaks; only that op's cases are run.
        make: () -> the broken implementation, fresh, so that no state outlives a run.
        message: a regular expression that the killing case's message must match: it names the fault.
        proofs: the proofs that may kill it, the likely ones first.
        device: the device types on which it can be seen.
        dies: it may end the process, or what it leaks could hide in memory that others have freed there: it runs in
            one of its own.
        plugin: sources of its ``manifest`` and its ``kernels``: it is installed, and judged as users judge it.
    """

    name: str
    op: str
    make: Callable[[], Bound]
    message: str
    proofs: tuple[str, ...] = ("value",)
    device: tuple[str, ...] = ("cpu", "cuda")
    dies: bool = False
    plugin: Mapping[str, str] | None = None


FAULTS: list[Fault] = []


def fault(
    op: str,
    message: str,
    *proofs: str,
    device: tuple[str, ...] = ("cpu", "cuda"),
    dies: bool = False,
    supports: Callable[[Signature], str | None] = always,
    deterministic: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declares a fault: ``make(good) -> broken function``, named for what is wrong with it."""

    def add(make: Callable[..., Any]) -> Callable[..., Any]:
        def bound() -> Bound:
            return Bound(make(copy_of(op)), supports, make.__name__, True, deterministic)

        name = make.__name__.replace("_", " ")
        if any(f.name == name and f.op == op for f in FAULTS):
            raise TypeError(f"two faults are called {name}")
        FAULTS.append(Fault(name, op, bound, message, proofs or ("value",), device, dies))
        return make

    return add


def calling(op: str, message: str, *proofs: str, **options: Any) -> Callable[..., Any]:
    """A fault that makes a healthy call in its own way: ``call(good, **arguments)``, whose result counts."""

    def add(call: Callable[..., Any]) -> Callable[..., Any]:
        def make(good: Any) -> Any:
            return lambda *args, **kwargs: call(good, **get_spec(op).bind(*args, **kwargs))

        make.__name__ = call.__name__
        return fault(op, message, *proofs, **options)(make)

    return add


def changing(op: str, message: str, *proofs: str, **options: Any) -> Callable[..., Any]:
    """A fault that changes the arguments of a healthy call: ``change(arguments)``."""

    def add(change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
        def call(good: Any, **a: Any) -> Any:
            change(a)
            return good(**a)

        call.__name__ = change.__name__
        return calling(op, message, *proofs, **options)(call)

    return add


def spoiling(op: str, message: str, *proofs: str, **options: Any) -> Callable[..., Any]:
    """A fault that does something after a healthy call: ``spoil(arguments, result)``, whose result, if any, counts."""

    def add(spoil: Callable[[dict[str, Any], Any], Any]) -> Callable[..., Any]:
        def call(good: Any, **a: Any) -> Any:
            found = good(**a)
            other = spoil(a, found)
            return found if other is None else other

        call.__name__ = spoil.__name__
        return calling(op, message, *proofs, **options)(call)

    return add
