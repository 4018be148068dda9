"""The ops: ``hal.ops.<name>(...)`` calls one, hal's own or one that a plugin brings (hook ``hal_ops``).

The contract of one of hal's own is in the file of its name, ``from hal.ops.get_last_loc import SPEC``, or
``get_spec("get_last_loc")``; its truth, inputs and samples are in ``hal.ops.proofs``. Importing this package imports
nothing else; an op's file imports torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal._api import *  # noqa: F403
    from hal.ops.spec import OpSpec
BUILTIN = tuple(
    """
    get_last_loc assign_extend_cache_locs rope_kv_write kv_transfer write_req_to_token compute_positions
    build_kv_indices build_kv_indices_from_blocks build_page_table alloc_extend alloc_decode kv_write mla_kv_write
    mla_rope_kv_write qk_norm_rope_kv_write kv_move decode_attention extend_attention
    """.split()
)
"""The ops of hal itself, in the order of the tables that list them."""


def get_spec(name: str) -> OpSpec:
    """The contract of one of hal's own ops.

    Raises:
        KeyError: there is no such op.
    """
    if name not in BUILTIN:
        raise KeyError(name)
    found: OpSpec = import_module(f"hal.ops.{name}").SPEC
    return found


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'hal.ops' has no attribute {name!r}")
    from hal._errors import SelectionError
    from hal.registry._dispatch import dispatcher

    try:
        return dispatcher(name)
    except SelectionError as e:
        raise AttributeError(str(e)) from None


class _Ops(ModuleType):
    """This package, in which the name of an op stays the op once the file of that name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in BUILTIN or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Ops
