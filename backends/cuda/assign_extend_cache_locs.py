# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated"
# A kernel is typed by its arguments at run time.
"""assign_extend_cache_locs: the slots of all new tokens, request after request, in one flat tensor.

Up to 1024 requests, a program has a part of one request and sums the lengths of those before it. With more,
a program has a group of requests: the lengths before it are added up lane by lane and reduced once, a tile of
[requests, tokens] is copied at once, and what is longer than the tile is shared among the group's
programs. The number of programs is bounded, and a program with several groups carries the sum on, so
that the cost is linear in the requests and in the output.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda._device import multiprocessors, pdl
from hal.backends.cuda._spans import clamped
from hal.triton import launch
from hal.triton.plans import ANY, Plan, Step, length, plans

FEW = {32: (128, 4), 256: (64, 1), 512: (64, 1), 1024: (64, 1)}
"""Up to so many requests: tokens of a request that a program copies at once, and its warps."""
GROUP = 16
TILE = 32
"""Tokens of each request of a group that are copied at once, up to SPAN of them."""
SPAN = 128
CHUNK = 2048
"""Tokens of a longer request that are copied at once."""
SUM = 2048
"""Lengths added at once, by 8 warps: by 1024 and 4, 3 % faster at 1024 requests, registers go to a stack."""


@triton.jit
def _slots(table, row, known, start, t, wanted, width):
    """table row[start + t], -1 outside the table; where wanted."""
    column = start + t
    return tl.load(table + row + column, wanted & known & (column >= 0) & (column < width), other=-1)


@triton.jit
def _copy(table, row, known, start, t, wanted, out, to, width):
    """out[to + t] = table row[start + t]; where wanted."""
    slot = _slots(table, row, known, start, t, wanted, width)
    tl.store(out + to + t, slot.to(out.dtype.element_ty), wanted)


@triton.jit
def _starts(starts, j, bs, size, width):
    """Clamped to where adding a token's number can't wrap; what was outside the table stays outside."""
    start = tl.load(starts + j, j < bs, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(start, -size), width)


@triton.jit
def _group(requests, starts, ends, j, bs, rows, stride, size, width):
    """(lengths, where in the table, whether there, starts) of a group's requests."""
    length = clamped(starts, ends, j, bs, size)
    request = tl.load(requests + j, j < bs, other=-1).to(tl.int64)
    known = (request >= 0) & (request < rows)
    return length, tl.where(known, request, 0) * stride, known, _starts(starts, j, bs, size, width)


@launch.jit(
    do_not_specialize=("table", "requests", "starts", "ends", "out", "bs", "rows", "width", "stride", "size", "parts")
)
def assign_few_kernel(
    table, requests, starts, ends, out,
    bs: tl.int32, rows: tl.int64, width: tl.int64, stride: tl.int64, size: tl.int64, parts: tl.int32,
    PDL: tl.constexpr, FEW: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    which = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    length = clamped(starts, ends, which, bs, size)
    start = _starts(starts, which, bs, size, width)
    request = tl.load(requests + which, which < bs, other=-1).to(tl.int64)
    known = (request >= 0) & (request < rows)
    row = tl.where(known, request, 0) * stride
    # Asked for before the sum: the table's memory has the longest way.
    mine = part * PART + tl.arange(0, PART)
    slot = _slots(table, row, known, start, mine, mine < length, width)
    j = tl.arange(0, FEW)
    before = tl.sum(clamped(starts, ends, j, tl.minimum(bs, which), size), 0)
    tl.store(out + before + mine, slot.to(out.dtype.element_ty), (mine < length) & (before + mine < size))
    for first in range(((part + parts) * PART).to(tl.int64), tl.minimum(length, size - before), parts * PART):
        t = first + tl.arange(0, PART)
        _copy(table, row, known, start, t, (t < length) & (before + t < size), out, before, width)
    if which >= bs - 1:
        for first in range(before + length + part * PART, size, parts * PART):
            o = first + tl.arange(0, PART)
            tl.store(out + o, tl.full([PART], -1, out.dtype.element_ty), o < size)


@triton.jit
def _place(
    table, row, known, start, length, slot, out, begin, part, parts, size, width,
    GROUP: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A group's slots from `begin` on: of each request the first TILE, which are loaded, and the others."""
    most = tl.max(length, 0)
    if part == 0:
        t = tl.arange(0, TILE)[None, :]
        fits = tl.minimum(length, size - begin)[:, None]
        tl.store(out + begin[:, None] + t, slot.to(out.dtype.element_ty), t < fits)
        for first in range(TILE, tl.minimum(most, SPAN).to(tl.int32), TILE):
            u = first + t
            _copy(table, row[:, None], known[:, None], start[:, None], u, u < fits, out, begin[:, None], width)
    if most > SPAN:
        for i in range(GROUP):
            here = tl.arange(0, GROUP) == i
            length_i = tl.sum(tl.where(here, length, 0), 0)
            begin_i = tl.sum(tl.where(here, begin, 0), 0)
            start_i = tl.sum(tl.where(here, start, 0), 0)
            row_i = tl.sum(tl.where(here, row, 0), 0)
            known_i = tl.sum((here & known).to(tl.int32), 0) > 0
            length_i = tl.minimum(length_i, size - begin_i)
            for first in range((SPAN + part * CHUNK).to(tl.int64), length_i, parts * CHUNK):
                v = first + tl.arange(0, CHUNK)
                _copy(table, row_i, known_i, start_i, v, v < length_i, out, begin_i, width)


@launch.jit(do_not_specialize="table requests starts ends out bs rows width stride size parts each".split())
def assign_many_kernel(
    table, requests, starts, ends, out,
    bs: tl.int64, rows: tl.int64, width: tl.int64, stride: tl.int64, size: tl.int64, parts: tl.int32, each: tl.int32,
    PDL: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, CHUNK: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0) % parts
    first_one = (tl.program_id(0) // parts).to(tl.int64) * each * GROUP
    stop = tl.minimum(bs, first_one + each * GROUP)
    r = tl.arange(0, GROUP)
    work = ((part == 0) | (stop == bs)) & (first_one < bs)
    if work == 0:
        longest = tl.zeros([GROUP], tl.int64)
        for at in range(first_one, stop, GROUP):
            longest = tl.maximum(longest, clamped(starts, ends, at + r, bs, size))
        work = tl.max(longest, 0) > SPAN
    if work:
        t = tl.arange(0, TILE)[None, :]
        # Asked for before the sum, and the slots before its last step: the table's memory has the longest way.
        length, row, known, start = _group(requests, starts, ends, first_one + r, bs, rows, stride, size, width)
        lanes = tl.zeros([SUM], tl.int64)
        for j in range(0, first_one, SUM):
            lanes += clamped(starts, ends, j + tl.arange(0, SUM), first_one, size)
        wanted = (part == 0) & (t < length[:, None])
        slot = _slots(table, row[:, None], known[:, None], start[:, None], t, wanted, width)
        before = tl.minimum(tl.sum(lanes, 0), size)
        begin = before + tl.cumsum(length, 0) - length
        _place(table, row, known, start, length, slot, out, begin, part, parts, size, width, GROUP, TILE, SPAN, CHUNK)
        before = tl.minimum(before + tl.sum(length, 0), size)
        for at in range(first_one + GROUP, stop, GROUP):
            length, row, known, start = _group(requests, starts, ends, at + r, bs, rows, stride, size, width)
            wanted = (part == 0) & (t < length[:, None])
            slot = _slots(table, row[:, None], known[:, None], start[:, None], t, wanted, width)
            begin = before + tl.cumsum(length, 0) - length
            _place(
                table, row, known, start, length, slot, out, begin, part, parts, size, width, GROUP, TILE, SPAN, CHUNK
            )
            before = tl.minimum(before + tl.sum(length, 0), size)
        if stop == bs:
            for first in range(before + part * CHUNK, size, parts * CHUNK):
                o = first + tl.arange(0, CHUNK)
                tl.store(out + o, tl.full([CHUNK], -1, out.dtype.element_ty), o < size)


@plans
def _plans(
    req_to_token: Tensor, req_pool_indices: Tensor, start_offsets: Tensor, end_offsets: Tensor, out: Tensor
) -> Plan:
    on, programs = pdl(out.get_device()), 2 * multiprocessors(out.get_device())
    bs, size, low, steps = length("req_pool_indices"), length("out"), -1, []
    args = (
        "req_to_token",
        "req_pool_indices",
        "start_offsets",
        "end_offsets",
        "out",
        bs,
        length("req_to_token"),
        req_to_token.shape[1],
        req_to_token.stride(0),
        size,
    )
    some = ("out", 0, ANY)
    for most, (part, warps) in FEW.items():
        run = assign_few_kernel.bind(PDL=on, FEW=most, PART=part, num_warps=warps, launch_pdl=on)
        groups = bs.at_least(1)
        parts = size.per(part).at_most(groups.within(programs).at_least(1))
        steps.append(Step(run, groups.times(parts), (*args, parts), (("req_pool_indices", low, most), some)))
        low = most
    run = assign_many_kernel.bind(
        PDL=on, GROUP=GROUP, TILE=TILE, SPAN=SPAN, CHUNK=CHUNK, SUM=SUM, num_warps=8, launch_pdl=on
    )
    groups = bs.at_least(1).per(GROUP)
    each = groups.per(programs)
    groups = groups.per(each)
    parts = groups.within(programs).at_least(1).at_most(8)
    steps.append(Step(run, groups.times(parts), (*args, parts, each), (("req_pool_indices", low, ANY), some)))
    return Plan(tuple(steps), returns="out")


@_plans.launcher
def assign_extend_cache_locs(
    req_to_token: Tensor, req_pool_indices: Tensor, start_offsets: Tensor, end_offsets: Tensor, out: Tensor
) -> Tensor:
    return _plans.start(  # type: ignore[no-any-return]
        req_to_token, req_pool_indices, start_offsets, end_offsets, out
    )


def warm(device: torch.device, args: dict[str, Any] | None) -> None:
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    given = args or {
        "req_to_token": zero.int()[None],
        "req_pool_indices": zero,
        "start_offsets": zero,
        "end_offsets": zero,
        "out": zero,
    }
    one = (torch.zeros(1, dtype=a.dtype, device=device) for a in list(given.values())[1:])
    assign_extend_cache_locs(given["req_to_token"], *one)
