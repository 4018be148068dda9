"""Backends each broken in one way, and the runner that shows that the suite kills every one.

python -m sabotage                  # those that a CPU can show; the others are listed as not run
python -m sabotage --device cuda    # those that need a device, too
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sabotage._healthy import Fault


def faults() -> list[Fault]:
    """Every fault, by op."""
    from sabotage import (  # noqa: F401
        _attention,
        _beyond,
        _bookkeeping,
        _cheats,
        _inputs,
        _kv,
        _lengths,
        _paging,
        _pdl,
        _rope,
        _transfer,
    )
    from sabotage._healthy import FAULTS

    return FAULTS
