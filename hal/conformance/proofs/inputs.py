"""Proofs about what stands around a call: torch's defaults, and arguments with nothing in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hal._errors import ArgumentError
from hal.conformance._arena import POISONS
from hal.conformance._cases import spread
from hal.conformance._verdict import Failure
from hal.conformance.execute import BOUND, DISPATCHED, check_untouched
from hal.ops.spec import OpSpec, TensorArg

if TYPE_CHECKING:
    from hal.conformance.proofs.run import Run


def defaults(run: Run) -> None:
    """As engines call while they build a model: what an op allocates must not follow torch's defaults.

    The foreign device is meta, which no allocation of an op may be on; on an accelerator its own device too, on which
    no allocation of the host may be.
    """
    foreign = ["meta", *([run.device] if run.device != "cpu" else [])]
    # Where a result is asked for, or scratch: there something is allocated.
    samples = spread(run.busy, 2 if run.slow else 6)
    samples += [s for s in run.busy if "none" in s.params.values() and s not in samples][: 1 if run.slow else None]
    for sample in samples:
        for device in foreign[: 1 if run.case.name == "dtype" else None]:
            run.around = run.case.name, torch.bfloat16 if run.case.name == "dtype" else device
            try:
                run.prove(sample.params, ways=((BOUND, POISONS[0]), (DISPATCHED, POISONS[1])))
            except Failure as e:
                what = "default dtype bf16" if run.case.name == "dtype" else f"default device {device}"
                raise Failure(f"{sample.name}, under a {what}: {e}") from None


def empty_dim(spec: OpSpec, arguments: Mapping[str, Any], dim: str) -> dict[str, Any]:
    """The arguments with size 0 for one dim; what has one more than it keeps one."""
    out = dict(arguments)
    for name, arg in spec.args.items():
        t = out[name]
        if isinstance(arg, TensorArg) and isinstance(t, Tensor):
            for i, d in enumerate(spec.dims_of(arg, t.ndim)):
                if d in (dim, f"{dim}+1"):
                    t = t.narrow(i, 0, 0 if d == dim else 1)
            out[name] = t if t is out[name] or arg.stride != "contiguous" else t.contiguous()
    return out


def empty(run: Run) -> None:
    """Each size of each tensor is 0 in turn: the op does what the contract says of it, or the contract refuses it."""
    for sample in {s.tag: s for s in [*spread(run.busy, 2)]}.values():
        arguments = empty_dim(run.spec, run.make(**sample.params), run.case.name)
        try:
            run.spec.check_call(arguments)
        except ArgumentError:
            placed = run.place(arguments)
            said = run.do("refuse", placed)
            if said["outcome"] == "returned":
                went = f"the contract refuses {run.case.name} = 0, and the dispatched call went through"
                raise Failure(went) from None
            if said["argument"] is None:
                raise Failure(f"expected an ArgumentError, got {said['type']}: {said['text']}") from None
            check_untouched(placed, f"refused, as the contract has it of {run.case.name} = 0, but had already written")
            continue
        wants = run.spec.oracle(arguments)
        for how, poison in ((BOUND, POISONS[0]), (DISPATCHED, POISONS[1])):
            run.execute(arguments, wants, how, poison)
    run.control()
