# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""build_kv_indices: ``req_to_token[r_i, start_i : start_i + len_i]`` packed into `out`, its sums into `kv_indptr`; or,
where those are GIVEN, each list to where they say.

A program has a request, or every 2^log-th chunk of one. Of few requests it adds up the lengths before its own; of
many, a launch makes all sums, and another reads them. A start is pulled to where nothing that is added to it wraps, so
that each slot's numbers are of 32 bits. The first slots are asked for before it is known where they go: the table's
memory has the longest way.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda._device import multiprocessors, pdl
from hal.backends.cuda._spans import extents, inside, parts, turns
from hal.triton import launch
from hal.triton.plans import ANY, Plan, Step, length, plans

CHUNK, SUM = 1024, 256
"""Slots at once, and lengths added at once, where the sums are made too."""
GIVEN = ((4, 512, 2), (1 << 62, 1024, 1))
"""Up to so many requests for two multiprocessors: slots at once, warps. Where the sums are given; swept on an H200."""
MOST = 16
"""Requests a multiprocessor whose sums are made along with the lists."""
SUMS = (512, 4096, 16)
"""Sums that a program of their own launch makes; lengths added at once; warps."""


@triton.jit
def _chunk(low, high, first, CHUNK: tl.constexpr):
    """(a chunk's places from `first` on, which of them are of [low, high))."""
    t = tl.arange(0, CHUNK)
    return t, (t >= low - first.to(tl.int32)) & (t < high - first.to(tl.int32))


@triton.jit
def _slots(row, low, high, first, CHUNK: tl.constexpr):
    """A request's slots from `first` on, -1 but for [low, high)."""
    t, there = _chunk(low, high, first, CHUNK)
    return tl.load(row + first + t, there, other=-1)


@triton.jit
def _put(out, to, slot, low, high, first):
    """Those of [low, high), where they go."""
    t, mine = _chunk(low, high, first, slot.shape[0])
    tl.store(out + to + first + t, slot.to(out.dtype.element_ty), mine)


@triton.jit
def _reach(indptr, j, bs, size):
    """``indptr[j]``, which may be any number, pulled to where nothing that is added to it wraps: no list that begins
    further below reaches 0."""
    return tl.minimum(tl.maximum(tl.load(indptr + j, j <= bs, other=0).to(tl.int64), -2147483648), size)


@launch.jit(do_not_specialize="table requests lens indptr out starts bs rows width stride size log".split())
def kv_indices_kernel(
    table, requests, lens, indptr, out, starts,
    bs: tl.int64, rows: tl.int64, width: tl.int64, stride: tl.int64, size: tl.int64, log: tl.int32,
    GIVEN: tl.constexpr, PDL: tl.constexpr, CHUNK: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = (tl.program_id(0) >> log).to(tl.int64)
    part = (tl.program_id(0) & ((1 << log) - 1)).to(tl.int64)
    request = tl.load(requests + i, i < bs, other=-1).to(tl.int64)
    length = extents(lens, lens, i, bs, False)[1]
    start = tl.zeros([], tl.int64)
    if starts is not None:
        start = tl.load(starts + i, i < bs, other=0).to(tl.int64)
    if GIVEN:
        to = _reach(indptr, i, bs, size)
        fits = tl.minimum(length, _reach(indptr, i + 1, bs, size) - to)
    known = (request >= 0) & (request < rows)
    start, low, high = inside(start, 0, length, width)
    high = tl.where(known, high, 0)
    row = table + tl.where(known, request, 0) * stride + start
    first = part * CHUNK
    # Of a request's parts those without a slot end; where sums are made, that would be to wait for its length first.
    if (GIVEN == 0) | (part == 0) | (first < length):
        slot = _slots(row, low, high, first, CHUNK)
        if not GIVEN:
            lanes = tl.zeros([SUM], tl.int64)
            for at in range(0, tl.minimum(i, bs), SUM):
                lanes += extents(lens, lens, at + tl.arange(0, SUM), tl.minimum(i, bs), False)[1]
            to = tl.sum(lanes, 0)
            fits = tl.minimum(length, size - to)
            if part == 0:
                tl.store(indptr + i + 1, tl.minimum(to + length, size).to(indptr.dtype.element_ty), i < bs)
                if i == 0:
                    tl.store(indptr, tl.zeros([], indptr.dtype.element_ty))
        fits = tl.maximum(fits, 0)
        # What a list that begins below 0 would write there.
        least = tl.minimum(tl.maximum(-to, 0), fits).to(tl.int32)
        _put(out, to, slot, least, fits.to(tl.int32), first)
        for turn in range(tl.maximum(least // CHUNK >> log, 1).to(tl.int64), turns(fits, part, log, CHUNK)):
            first = ((turn << log) + part) * CHUNK
            _put(out, to, _slots(row, low, high, first, CHUNK), least, fits.to(tl.int32), first)


@launch.jit(do_not_specialize=("lens", "indptr", "bs", "size"))
def sums_kernel(lens, indptr, bs: tl.int64, size: tl.int64, PDL: tl.constexpr, BLOCK: tl.constexpr, SUM: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.program_id(0).to(tl.int64) * BLOCK
    j = first + tl.arange(0, BLOCK)
    length = extents(lens, lens, j, bs, False)[1]
    lanes = tl.zeros([SUM], tl.int64)
    for at in range(0, first, SUM):
        lanes += extents(lens, lens, at + tl.arange(0, SUM), first, False)[1]
    ending = tl.minimum(tl.sum(lanes, 0) + tl.cumsum(length, 0), size)
    tl.store(indptr + j + 1, ending.to(indptr.dtype.element_ty), j < bs)
    if first == 0:
        tl.store(indptr, tl.zeros([], indptr.dtype.element_ty))


@plans
def _plans(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: Tensor,
    kv_indptr: Tensor | None,
    out: Tensor,
    kv_start: Tensor | None,
    given_indptr: Tensor | None,
) -> Plan:
    device = out.get_device()
    on, sms, bs, size = pdl(device), multiprocessors(device), length("kv_lens"), length("out")
    programs = bs.at_least(1)

    def lists(low: int, high: int, indptr: str, given: bool, chunk: int, warps: int) -> Step:
        """Of more than `low` requests, up to `high`."""
        run = kv_indices_kernel.bind(GIVEN=given, PDL=on, CHUNK=chunk, SUM=SUM, num_warps=warps, launch_pdl=on)
        log = parts(programs, size.per(chunk), 4 * sms if given else sms)
        args = (
            "req_to_token",
            "req_pool_indices",
            "kv_lens",
            indptr,
            "out",
            "kv_start",
            bs,
            length("req_to_token"),
            req_to_token.shape[1],
            req_to_token.stride(0),
            size,
            log,
        )
        return Step(run, programs.doubled(log), args, (("kv_lens", low, high),))

    if given_indptr is not None:
        found, low = [], -1
        for n, chunk, warps in GIVEN:
            high = min(n * sms // 2, ANY)
            found.append(lists(low, high, "given_indptr", True, chunk, warps))
            low = high
        return Plan(tuple(found), returns="out")
    few = MOST * sms
    sums = sums_kernel.bind(PDL=on, BLOCK=SUMS[0], SUM=SUMS[1], num_warps=SUMS[2], launch_pdl=on)
    return Plan(
        (
            lists(-1, few, "kv_indptr", False, CHUNK, 4),
            Step(sums, length("kv_lens", per=SUMS[0]), ("kv_lens", "kv_indptr", bs, size), (("kv_lens", few, ANY),)),
            lists(few, ANY, "kv_indptr", True, *GIVEN[-1][1:]),
        ),
        returns="out",
    )


@_plans.launcher
def build_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: Tensor,
    kv_indptr: Tensor | None,
    out: Tensor,
    kv_start: Tensor | None = None,
    *,
    given_indptr: Tensor | None = None,
) -> Tensor:
    return _plans.start(  # type: ignore[no-any-return]
        req_to_token, req_pool_indices, kv_lens, kv_indptr, out, kv_start, given_indptr
    )
