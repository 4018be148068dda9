"""Registers every fault as a backend, for the workers in which a fault may end the process."""

from __future__ import annotations

import hal
from sabotage import faults
from sabotage._run import backend_of

for _fault in faults():
    if _fault.dies:
        _bound = _fault.make()

        def _run(*args: object, _fn: object = _bound.fn, **kwargs: object) -> object:
            return _fn(*args, **kwargs)  # type: ignore[operator]

        # The registry compares signatures; the suite sees the function that was declared.
        _run.__signature__ = hal.registry.current().spec(_fault.op).signature  # type: ignore[attr-defined]
        hal.register(
            _fault.op, backend=backend_of(_fault), supports=_bound.supports, graph_safe=True, deterministic=True
        )(_run)
