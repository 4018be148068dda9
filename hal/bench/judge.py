# mypy: disable-error-code="no-untyped-call"
# torch.cuda has untyped functions.
"""Outputs against the contract's own truth: nothing is timed that is wrong.

The oracle of an op gives what each output may be; `check` runs a call here, `verdict` our launcher on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from hal._remote.target import DirectTarget
from hal.bench import launcher
from hal.conformance.execute import Executor, Failure
from hal.kv.pool import KVPool
from hal.ops import get_spec
from hal.ops.proofs.inputs import on_device
from hal.ops.proofs.judge import headroom, right_any


class Peer(DirectTarget):
    """Whoever is timed: our launcher, torch's way, or the reference."""

    def foreign(self, op: str) -> dict[CodeType, str]:
        return {}


def check(op: str, name: str, call: Callable[[dict[str, Any]], Any], make: Callable[[], dict[str, Any]]) -> None:
    """Raises unless `call` does what the contract says, to the last bit it allows; what else it returns is its own."""
    args, spec = make(), get_spec(op)
    wants = spec.oracle(args)

    def run(**given: Any) -> Any:
        result = call(given)
        return result if "return" in wants else None

    try:
        Executor(Peer.of(op, run), spec).execute(args, wants)
    except Failure as e:
        raise AssertionError(f"{op}: {name}: {e}") from None


def check_transfer(name: str, call: Callable[[], Any], src: KVPool, dst: KVPool, there: Tensor, here: Tensor) -> None:
    """Raises unless `call` copies the rows `there` of one pool to `here` of the other, which it finds overwritten.

    Looked at are the first layer and the last."""

    def at(pool: KVPool, slots: Tensor) -> Any:
        paged = pool.layout in ("page_first_direct", "page_head")
        return (slots // pool.page_size, slots % pool.page_size) if paged else slots

    def read(pool: KVPool, half: Tensor, slots: Tensor) -> Tensor:
        return half[at(pool, slots)].view(torch.int16).cpu()

    layers = 0, src.num_layers - 1
    for layer in layers:
        for half in dst.layer(layer):
            if half is not None:
                half[at(dst, here)] = -1
    call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    for layer in layers:
        for s, d in zip(src.layer(layer), dst.layer(layer), strict=True):
            if s is not None and d is not None and not torch.equal(read(src, s, there), read(dst, d, here)):
                raise AssertionError(f"kv_transfer: {name}: {src.layout} to {dst.layout}: wrong rows in layer {layer}")


def verdict(op: str, args: dict[str, Any]) -> float:
    """One call of cuda's launcher, then one from a captured graph: the error in units of the bound.

    Raises:
        AssertionError: an output is outside of it.
    """
    wants = get_spec(op).oracle(args)
    here = on_device(args, "cuda")
    call = functools.partial(launcher("cuda", op), **here)
    worst = 0.0
    for captured in (False, True):
        for x in ("out", "lse"):
            if here[x] is not None:
                here[x].fill_(torch.nan)
        result = call()
        if captured:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = call()
            result.fill_(torch.nan)
            graph.replay()
            graph.replay()
        torch.cuda.synchronize()
        for x, want in wants.items():
            got = (result if x == "return" else here[x]).cpu()
            bad = ~right_any(got, want)
            if bad.any():
                raise AssertionError(f"{x}: {int(bad.sum())} wrong, first at {bad.nonzero()[0].tolist()}")
            worst = max(worst, headroom(got, want))
    return worst
