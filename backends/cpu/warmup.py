"""Compiling every kernel ahead of the first request, and whether this machine can run them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal.backends.cpu._jit import Kernel

OPS = tuple(
    """
    get_last_loc assign_extend_cache_locs rope_kv_write kv_transfer write_req_to_token compute_positions
    build_kv_indices build_kv_indices_from_blocks build_page_table alloc_extend alloc_decode kv_write mla_kv_write
    mla_rope_kv_write qk_norm_rope_kv_write kv_move decode_attention extend_attention
    """.split()
)


def probe() -> str | None:
    """Why these kernels can't run here: they read numbers as little-endian bits through 64-bit addresses."""
    if sys.byteorder != "little" or sys.maxsize < 2**32:
        return f"the kernels need a 64-bit little-endian machine; this one is {sys.byteorder}-endian"
    return None


def variants(op: str) -> tuple[Kernel, list[tuple[str, ...]]]:
    """The kernel of `op`, and the formats of each of its variants: there are no others."""
    from importlib import import_module

    from hal.backends.cpu._bits import HALF

    kernel = import_module(f"hal.backends.cpu.{op}").kernel
    index, floats = ("i64", "i32"), ("bf16", HALF, "fp32")
    each: list[tuple[str, ...]] = [(x,) for x in floats]
    found: dict[str, list[tuple[str, ...]]] = {
        "get_last_loc": list(product(index, repeat=2)),
        "assign_extend_cache_locs": list(product(index, repeat=4)),
        "rope_kv_write": each,
        "kv_write": each,
        "mla_kv_write": each,
        "mla_rope_kv_write": each,
        "qk_norm_rope_kv_write": [(x, w) for x in floats for w in dict.fromkeys((x, "fp32"))],
        "decode_attention": each,
        "extend_attention": each,
    }
    return kernel, found.get(op, [()])


def more(op: str) -> list[tuple[Kernel, list[tuple[str, ...]]]]:
    """The other kernels of `op`, likewise."""
    if op not in ("decode_attention", "extend_attention"):
        return []
    from hal.backends.cpu import _amx, _blocks, _online
    from hal.backends.cpu._bits import HALF

    modules = [_online, _blocks] if op == "extend_attention" else [_online]
    found: list[tuple[Kernel, list[tuple[str, ...]]]] = []
    if _amx.usable():
        found += [(module.tile_kernel, [("bf16",)]) for module in modules]
    if op == "extend_attention":
        found.append((_blocks.kernel, [(x,) for x in ("bf16", HALF, "fp32")]))
    return found


def warmup(
    ops: Sequence[str],
    device: Any = None,
    progress: Callable[[float, str], None] = lambda done, what: None,
    **options: Any,
) -> None:
    """Compiles every variant of `ops`, or loads it from the cache on disk, so that no request waits for it.

    Args:
        ops: names; those of other backends are ignored.
        progress: called with how much is done, 0 to 1, and the variant that begins now.
        device, options: unused: the compiled code fits every shape.
    """
    todo = [(op, *found) for op in ops if op in OPS for found in (variants(op), *more(op))]
    count, total = 0, sum(len(found) for _, _, found in todo)
    for op, kernel, found in todo:
        for variant in found:
            progress(count / total, " ".join((op, *variant)))
            kernel.warm(*variant)
            count += 1
        if kernel.shared:
            from hal.backends.cpu import _again, _pool

            for native in (_pool.team, _pool.serve, _pool.share, _again.again, _again.keep):
                native()
