# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""compute_positions: prefix_i, ..., seq_i - 1 of every request, one after the other, in one flat tensor.

The requests are shared out as `_spans` says; the last group's programs also fill what is left of `out`.
"""

import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda._spans import MANY, Tile, extents, steps, turns
from hal.triton import launch
from hal.triton.plans import ANY, Plan, length, plans

TILES = {1: Tile(256, 256, 2), MANY: Tile(64, 1024, 4)}


@launch.jit(do_not_specialize=("prefixes", "lens", "out", "indptr", "bs", "size", "each", "log"))
def positions_kernel(
    prefixes, lens, out, indptr, bs: tl.int64, size: tl.int64, each: tl.int32, log: tl.int32,
    PDL: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = (tl.program_id(0) >> log).to(tl.int64) * each * GROUP
    part = (tl.program_id(0) & ((1 << log) - 1)).to(tl.int64)
    lanes = tl.zeros([TILE], tl.int64)
    for at in range(0, first, TILE):
        prefix, seq = extents(prefixes, lens, at + tl.arange(0, TILE), tl.minimum(bs, first), True)
        lanes += seq - prefix
    total = tl.sum(lanes, 0)
    for group in range(first, tl.minimum(bs, first + each * GROUP), GROUP):
        j = group + tl.arange(0, GROUP)
        prefix, seq = extents(prefixes, lens, j, bs, True)
        length = seq - prefix
        ending = total + tl.cumsum(length, 0)
        if indptr is not None:  # noqa: SIM102 (known when compiled; the other is not)
            if part == 0:
                tl.store(indptr + j + 1, tl.minimum(ending, size).to(indptr.dtype.element_ty), j < bs)
        to = (ending - length)[:, None]
        for turn in range(turns(tl.minimum(tl.max(length, 0), size - total), part, log, CHUNK)):
            t = ((turn << log) + part) * CHUNK + tl.arange(0, CHUNK)[None, :]
            mine = (t < length[:, None]) & (t < size - to)
            tl.store(out + to + t, (prefix[:, None] + t).to(out.dtype.element_ty), mine)
        total += tl.sum(length, 0)
    if indptr is not None:  # noqa: SIM102
        if tl.program_id(0) == 0:
            tl.store(indptr, tl.zeros([], indptr.dtype.element_ty))
    if first + each * GROUP >= bs:
        for turn in range(turns(size - total, part, log, CHUNK)):
            o = total + ((turn << log) + part) * CHUNK + tl.arange(0, CHUNK)
            tl.store(out + o, tl.full([CHUNK], -1, out.dtype.element_ty), o < size)


@plans
def _plans(prefix_lens: Tensor, seq_lens: Tensor, out: Tensor, indptr: Tensor | None) -> Plan:
    size, where = length("out"), () if indptr is not None else (("out", 0, ANY),)
    args = ("prefix_lens", "seq_lens", "out", "indptr", length("prefix_lens"), size)
    return Plan(steps(positions_kernel, TILES, "prefix_lens", size, out.get_device(), args, *where), returns="out")


@_plans.launcher
def compute_positions(prefix_lens: Tensor, seq_lens: Tensor, out: Tensor, indptr: Tensor | None = None) -> Tensor:
    return _plans.start(prefix_lens, seq_lens, out, indptr)  # type: ignore[no-any-return]
