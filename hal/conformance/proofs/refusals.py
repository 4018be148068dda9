"""What a backend refuses: honestly, and with nothing written."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from hal.conformance._arena import POISONS
from hal.conformance._verdict import Failure, Ret
from hal.conformance.execute import BOUND, Refused, check_untouched

if TYPE_CHECKING:
    from hal.conformance.proofs.run import Run


def supports(run: Run) -> None:
    sample = run.sample()
    arguments, wants = run.example(sample.params)
    try:
        run.call(run.place(arguments))
    except Refused as e:
        why = str(e)
    else:
        run.prove(sample.params, ways=((BOUND, POISONS[1]),))
        return
    run.trying = True
    for index in itertools.count():
        right, impl = True, None
        for poison in POISONS:
            placed = run.place(arguments, poison)
            said = run.do("attempt", placed, index=index)
            if said["outcome"] == "none":
                return
            impl = said["impl"]
            try:
                if said["outcome"] != "returned":
                    raise Failure(said["text"])
                run.judge(wants, placed, Ret.of(said["ret"], placed))
            except Failure:
                right = False
                break
        if right and run.caller.lane != "interpreter":
            raise Failure(f"supports says no, and {impl} would have run it right; it said: {why}")


def errors(run: Run) -> None:
    sample = next(e for e in run.spec.errors if e.name == run.case.name)
    placed = run.place(sample.make())
    said = run.do("refuse", placed)
    if said["outcome"] == "returned":
        raise Failure(f"expected an ArgumentError naming {sample.argument}; the call went through")
    if said["argument"] is None:
        raise Failure(f"expected an ArgumentError naming {sample.argument}, got {said['type']}: {said['text']}")
    if said["argument"] != sample.argument:
        raise Failure(
            f"expected an ArgumentError naming {sample.argument}, got one naming {said['argument']}: {said['text']}"
        )
    check_untouched(placed, "raised as it should, but had already written")
    run.control()
