# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""write_req_to_token: ``req_to_token[r_i, start_i + t]`` becomes the next of `src`; -1 is skipped.

The requests are shared out as `_spans` says. A column is compared with the table before it is added to.
"""

import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda._spans import MANY, Tile, clamped, steps, turns
from hal.triton import launch
from hal.triton.plans import ANY, Plan, length, plans

TILES = {1: Tile(128, 256, 2), MANY: Tile(64, 256, 4)}


@launch.jit(do_not_specialize="table requests starts ends src bs rows width stride size each log".split())
def write_kernel(
    table, requests, starts, ends, src,
    bs: tl.int64, rows: tl.int64, width: tl.int64, stride: tl.int64, size: tl.int64, each: tl.int32, log: tl.int32,
    PDL: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = (tl.program_id(0) >> log).to(tl.int64) * each * GROUP
    part = (tl.program_id(0) & ((1 << log) - 1)).to(tl.int64)
    lanes = tl.zeros([TILE], tl.int64)
    for at in range(0, first, TILE):
        lanes += clamped(starts, ends, at + tl.arange(0, TILE), tl.minimum(bs, first), size)
    total = tl.minimum(tl.sum(lanes, 0), size)
    for group in range(first, tl.minimum(bs, first + each * GROUP), GROUP):
        j = group + tl.arange(0, GROUP)
        length = clamped(starts, ends, j, bs, size)
        request = tl.load(requests + j, j < bs, other=-1).to(tl.int64)
        start = tl.load(starts + j, j < bs, other=0).to(tl.int64)[:, None]
        known = (request >= 0) & (request < rows)
        row = (table + tl.where(known, request, 0) * stride)[:, None]
        of = (total + tl.cumsum(length, 0) - length)[:, None]
        for turn in range(turns(tl.minimum(tl.max(length, 0), size - total), part, log, CHUNK)):
            t = ((turn << log) + part) * CHUNK + tl.arange(0, CHUNK)[None, :]
            there = (t < length[:, None]) & (t < size - of)
            slot = tl.load(src + of + t, there, other=-1).to(tl.int64)
            there = there & known[:, None] & (start >= -t) & (start < width - t) & (slot >= 0) & (slot <= 2147483647)
            tl.store(row + tl.where(there, start + t, 0), slot.to(tl.int32), there)
        total = tl.minimum(total + tl.sum(length, 0), size)


@plans
def _plans(
    req_to_token: Tensor, req_pool_indices: Tensor, start_offsets: Tensor, end_offsets: Tensor, src: Tensor
) -> Plan:
    size = length("src")
    args = (
        "req_to_token",
        "req_pool_indices",
        "start_offsets",
        "end_offsets",
        "src",
        length("req_pool_indices"),
        length("req_to_token"),
        req_to_token.shape[1],
        req_to_token.stride(0),
        size,
    )
    return Plan(steps(write_kernel, TILES, "req_pool_indices", size, src.get_device(), args, ("src", 0, ANY)))


@_plans.launcher
def write_req_to_token(
    req_to_token: Tensor, req_pool_indices: Tensor, start_offsets: Tensor, end_offsets: Tensor, src: Tensor
) -> None:
    _plans.start(req_to_token, req_pool_indices, start_offsets, end_offsets, src)
