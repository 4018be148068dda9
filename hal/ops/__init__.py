"""Op contracts. ``spec(name)`` is the `OpSpec` of an op; one file each beside this one.

Importing this package imports nothing else; an op's file imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hal.ops._spec import OpSpec

BUILTIN = ("get_last_loc", "assign_extend_cache_locs", "rope_kv_write", "kv_transfer")
"""The ops of hal itself, in the order of the tables that list them."""

_added: dict[str, OpSpec] = {}


def spec(name: str) -> OpSpec:
    """The contract of op `name`.

    Raises:
        KeyError: there is no such op.
    """
    if name in BUILTIN:
        found: OpSpec = import_module(f"hal.ops.{name}").SPEC
        return found
    return _added[name]
