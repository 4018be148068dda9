# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""decode_attention: split over the keys by the requests' lengths, then merged.

The kernel's grid is fixed by the batch and the multiprocessors; each program finds in kv_indptr which part of which
request is its own, so neither a sync nor a recompile depends on lengths. Where there are about as many requests as
programs that run at once, a program may have shares of several (`_shares.py`). All query heads that share a key/value
head are one tile: a cached row is read once. A request in one part is written at once; the others leave normalised
parts and their log-sum-exps. Whoever is last of a request's to be done merges them; where parts are wide, or registers
are short, a second kernel does (`_merge.py`).
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from hal._errors import ArgumentError
from hal.backends.cuda import _attention, _merge
from hal.backends.cuda._attend import attend
from hal.backends.cuda._cache import scale_kind
from hal.backends.cuda._device import arch, multiprocessors, next_power_of_2, pdl
from hal.backends.cuda._shares import find_uneven, waves
from hal.backends.cuda._shares import keys_of as share_of
from hal.backends.cuda._split import find, find_one, keys_of, note
from hal.kv.view import copy_unit, fuse_pages, page_size
from hal.ops.spec import FP8
from hal.triton import launch
from hal.triton.plans import COUNTERS, MOST, Counters, Plan, Scratch, Size, Step, length, plans

PER_SM = 4
"""Programs a multiprocessor that the keys are split for."""


class Deep(NamedTuple):
    """How 16-bit rows of 16, 32, 64, 128 or 256 elements are taken on Hopper."""

    tile: tuple[int, int, int, int]
    """(M, N, warps, stages): three tiles of keys are under way, or there are more programs: while one of these looks
    for its keys, others' are."""
    per_sm: int
    """Programs a multiprocessor that the keys are split for."""
    at_once: int
    """Those that run at once."""
    enough: int
    """Sixteenths of these that read as fast as all, once others have ended."""
    options: dict[str, int] = {}  # noqa: RUF012
    """Of what may take several requests a program, for that many at once."""


CAPPED = {"maxnreg": 168}
DEEP = {
    (64, 4): Deep((16, 64, 2, 2), 3, 6, 6, CAPPED),
    (64, 16): Deep((16, 64, 4, 4), 2, 3, 6, CAPPED),
    (128, 4): Deep((16, 64, 2, 2), 3, 4, 5),
    (128, 16): Deep((16, 64, 4, 4), 2, 2, 5),
    (256, 16): Deep((16, 64, 4, 3), 1, 1, 8),
}
"""By up to what longer head_dim and how many query heads a key head. Two warps are too few to merge parts of more
heads. Rows of 256 leave room for one program, of two tiles. As measured: docs/performance-decode.md."""
SHORTEST = 64
"""Keys that a part has at least; up to twice as many, where there would be more parts than `FEW_PARTS`."""
FEW_PARTS = 32
"""So many short parts are there earlier than half as many, and take little longer to merge."""
FEW_MERGED = 128
"""The same of parts that whoever is last merges, times a part's query heads."""
FEW_LATENT_PARTS = 64
"""The same of MLA's rows where one program has all query heads."""
WHOLE = 192
"""Up to so many listed keys no request is split: one launch takes the host and the device less than two."""
SHORT = 8 * 64
"""Keys a request, about, up to which requests are not shared out: more of them begin at once where each has a program
of its own."""
MOST_WAVES = 4
"""Of more requests than so many times the programs that run at once, what is idle at the end is little of the whole."""
BLOCK = 256
"""Requests whose lengths a program looks at together."""
FEW = 32
"""So few are looked at by each warp for itself, without a barrier."""
HOPPER_FEW = 128
"""In the kernel for Hopper, which has one program a multiprocessor: none other runs while it looks."""
AT_ONCE = 16384
"""Elements of parts that who merges them reads at once: what registers are for."""
TOGETHER = 32768
"""Elements of parts that one program merges into one; of more, several do, and one merges theirs."""
APART = {128: (32, 2048), 256: (8, 512)}
"""The longer head_dim -> of few requests, that may have so many parts each, and of more than so many listed keys, what
is left is merged sooner by another launch, which has a program for each head."""
WIDE_APART = 1024
"""Elements of all heads of a part, from which on that is so."""
LANES = {64: (32, 8), 128: (32, 4), 256: (16, 4)}
"""The longer head_dim -> a warp's keys of a tile and programs a multiprocessor, of the kernel that loads into lanes."""


@launch.jit(
    do_not_specialize=(
        "kv_indptr", "kv_indices", "lse", "counters", "part_lse", "k_scale", "v_scale", "q_row", "q_head",
        "kc_page", "kc_token", "kc_head", "vc_page", "vc_token", "vc_head", "out_row", "out_head", "num_slots", "nnz",
        "bs", "programs", "window", "scale", "cap",
    )
)  # fmt: skip
def decode_attention_kernel(
    q, k_cache, v_cache, kv_indptr, kv_indices, out, lse, counters, part, part_lse, k_scale, v_scale,
    q_row: tl.int64, q_head: tl.int64, kc_page: tl.int64, kc_token: tl.int64, kc_head: tl.int64,
    vc_page: tl.int64, vc_token: tl.int64, vc_head: tl.int64, out_row: tl.int64, out_head: tl.int64,
    num_slots: tl.int64, nnz: tl.int64, bs: tl.int32, programs: tl.int32, window: tl.int32, scale, cap,
    Q_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    K_PAGE: tl.constexpr, V_PAGE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, K_KIND: tl.constexpr,
    V_KIND: tl.constexpr, SHARED: tl.constexpr, HALF: tl.constexpr, LSE: tl.constexpr, UNIT: tl.constexpr,
    STAGES: tl.constexpr, SHORTEST: tl.constexpr, FEW_PARTS: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
    PDL: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr, AHEAD: tl.constexpr,
    ENOUGH: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    # A product with a constant is how Triton learns that rows are aligned.
    q_row, q_head, out_row, out_head = q_row * UNIT, q_head * UNIT, out_row * UNIT, out_head * UNIT
    kc_page, kc_token, kc_head = kc_page * UNIT, kc_token * UNIT, kc_head * UNIT
    vc_page, vc_token, vc_head = vc_page * UNIT, vc_token * UNIT, vc_head * UNIT
    block = tl.program_id(0) % BLOCKS
    c = tl.program_id(0) // BLOCKS
    if ENOUGH:
        if bs <= FEW:
            keys, share, request, stop, before, c = find_uneven(
                kv_indptr, tl.arange(0, FEW), c, nnz, bs, programs, window, SHORTEST, FEW_PARTS, WINDOW, N, ENOUGH
            )
        else:
            keys, share, request, stop, before, c = find_uneven(
                kv_indptr, tl.arange(0, BLOCK), c, nnz, bs, programs, window, SHORTEST, FEW_PARTS, WINDOW, N, ENOUGH
            )
        one = (request < bs) & (share == 0)
    else:
        if AHEAD and bs == 1:
            keys, request, before, c = find_one(kv_indptr, c, nnz, programs, window, SHORTEST, FEW_PARTS, WINDOW)
        elif bs <= FEW:
            keys, request, before, c = find(
                kv_indptr, tl.arange(0, FEW), c, nnz, bs, programs, window, SHORTEST, FEW_PARTS, WINDOW
            )
        else:
            keys, request, before, c = find(
                kv_indptr, tl.arange(0, BLOCK), c, nnz, bs, programs, window, SHORTEST, FEW_PARTS, WINDOW
            )
        one = request < bs
    if one:
        begin, parts, low, high = keys_of(kv_indptr, request, c, before, nnz, keys, window, N, WINDOW)
        if TOGETHER == 0:
            note(part_lse, request, c, before, parts, bs, programs, Q_HEADS)
        attend(
            request, begin, parts, low, high, c, before, True, block, q, k_cache, v_cache,
            kv_indices, out, lse, counters, part, part_lse, k_scale, v_scale, q_row, q_head, kc_page, kc_token,
            kc_head, vc_page, vc_token, vc_head, out_row, out_head, num_slots, scale, cap, Q_HEADS, GROUP, BLOCKS,
            M, N, D, D0, D1, DV, DV_PAD, K_PAGE, V_PAGE, CAP, K_KIND, V_KIND, SHARED, HALF, LSE, STAGES, PDL, HEADS,
            ROWS, TOGETHER, AHEAD,
        )  # fmt: skip
    elif ENOUGH:
        # For a program with one of them a loop would take 1 us more.
        for own in range(request, tl.where(share > 0, stop, request)):
            begin, parts, low, high, line, leads, before = share_of(
                kv_indptr, own, c, before, nnz, keys, share, N, window, WINDOW
            )
            attend(
                own, begin, parts, low, high, line, leads, own + 1 >= stop, block, q, k_cache, v_cache,
                kv_indices, out, lse, counters, part, part_lse, k_scale, v_scale, q_row, q_head, kc_page, kc_token,
                kc_head, vc_page, vc_token, vc_head, out_row, out_head, num_slots, scale, cap, Q_HEADS, GROUP, BLOCKS,
                M, N, D, D0, D1, DV, DV_PAD, K_PAGE, V_PAGE, CAP, K_KIND, V_KIND, SHARED, HALF, LSE, STAGES, PDL, HEADS,
                ROWS, TOGETHER, AHEAD,
            )  # fmt: skip


def tiles(
    group: int, head_dim: int, v_head_dim: int, dtype: torch.dtype, arch: int, fp8: bool = False
) -> tuple[int, int, int, int]:
    """(M, N, warps, stages): query heads and keys of a tile; `fp8`: of the cache."""
    m = min(64, max(16, next_power_of_2(group)))
    if dtype == torch.float32:
        return (16, 32, 4, 2 if arch < 100 else 1) if max(head_dim, v_head_dim) <= 128 else (16, 16, 8, 1)
    if head_dim > 256:
        return (min(m, 32), 32, 8, 2)
    if fp8 and head_dim <= 128 and m == 16 and arch == 90:
        return m, 64, 2, 3
    return m, 64 if head_dim <= 128 else 32, 4, 3


def _plan(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, row: tuple[int, int], lse: Tensor | None, window: bool, cap: bool,
    k_scale: object, v_scale: object, shared: bool, plain: bool,
) -> tuple[launch.Launch, int, int, tuple[int, ...]]:  # fmt: skip
    q_heads, kv_heads, dim, v_dim = q.shape[1], k_cache.shape[-2], q.shape[2], v_cache.shape[-1]
    group, device = q_heads // kv_heads, q.get_device()
    on = pdl(device)
    fp8 = k_cache.dtype in FP8
    m, n, warps, stages = tiles(group, dim, v_dim, q.dtype, arch(device), fp8)
    d0, d1 = _attention.parts(dim)
    per_sm = PER_SM
    deep = deep_of(q, k_cache, v_cache)
    if deep is not None:
        (m, n, warps, stages), per_sm = deep[:2]
    k_page, kc = fuse_pages(k_cache)
    v_page, vc = fuse_pages(v_cache)
    if (v_page, vc) == (k_page, kc):
        v_page = 0
    strides = (*q.stride()[:2], *kc, *vc, *row)
    unit = copy_unit(strides)
    hopper = plain and not cap and not window and k_page == 1
    hopper = hopper and for_hopper(q, k_cache, v_cache, unit, shared)
    lanes = plain and fp8 and for_lanes(q, v_cache, group, unit, max(kc[0], vc[0]))
    if hopper or lanes:
        m = 64 if hopper else 8
    blocks = kv_heads * -(-group // m)
    pad = max(16, next_power_of_2(v_dim))
    common = {"LSE": lse is not None, "PDL": on, "launch_pdl": on}
    each = 1 if hopper else LANES[max(dim, v_dim)][1] if lanes else per_sm
    heads = next_power_of_2(min(group, m))
    wide = heads * pad
    once = TOGETHER // wide if deep is not None else 0
    few = FEW_LATENT_PARTS if hopper and blocks == 1 else FEW_PARTS
    if not (hopper or lanes):
        few = min(few, FEW_MERGED // heads)
    same = {
        "Q_HEADS": q_heads, "GROUP": group, "BLOCKS": blocks, "UNIT": unit, "WINDOW": window, "SHORTEST": SHORTEST,
        "FEW_PARTS": few, "BLOCK": BLOCK, "FEW": FEW, **common,
    }  # fmt: skip
    if hopper:
        from hal.backends.cuda._few_heads import fits
        from hal.backends.cuda.decode_attention_hopper import decode_attention_hopper_kernel

        few_heads = fp8 and fits(group, 0)
        run = decode_attention_hopper_kernel.bind(
            **{**same, "FEW": HOPPER_FEW},
            K_KIND=scale_kind(k_scale),
            V_KIND=scale_kind(v_scale),
            TOKENS=0,
            CAUSAL=False,
            MAP=by_boxes(k_cache, kc[0], group),
            FEW_HEADS=few_heads,
            HALVES=True,
            PAIRED=not few_heads,
            num_warps=4,
        )
    elif lanes:
        from hal.backends.cuda.decode_attention_lanes import decode_attention_lanes_kernel

        run = decode_attention_lanes_kernel.bind(
            **same, LONGER=group, N=LANES[max(dim, v_dim)][0], D=dim, DV=v_dim, K_PAGE=k_page, V_PAGE=v_page, CAP=cap,
            K_KIND=scale_kind(k_scale), V_KIND=scale_kind(v_scale), COLUMNS=m, TOKENS=0, CAUSAL=False, num_warps=2,
        )  # fmt: skip
    else:
        run = decode_attention_kernel.bind(
            **same, M=m, N=n, D=dim, D0=d0, D1=d1, DV=v_dim, DV_PAD=pad, K_PAGE=k_page, V_PAGE=v_page, CAP=cap,
            K_KIND=scale_kind(k_scale), V_KIND=scale_kind(v_scale), SHARED=shared, STAGES=stages,
            HALF=fp8 and q.dtype == torch.bfloat16, num_warps=warps, HEADS=heads, AHEAD=deep is not None,
            ROWS=max(1, min(16, AT_ONCE // wide)), TOGETHER=once, ENOUGH=0,
        )  # fmt: skip
    return run, blocks, max(1, min(each * _sms(device), COUNTERS) // blocks), tuple(s // unit for s in strides)


def _sms(device: int) -> int:
    return multiprocessors(device) if device >= 0 else 16


def deep_of(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Deep | None:
    """How the device takes them, if as `DEEP` says."""
    dim = max(q.shape[2], v_cache.shape[-1])
    if (
        arch(q.get_device()) != 90
        or q.dtype != k_cache.dtype
        or q.dtype.itemsize != 2
        or _attention.parts(q.shape[2])[1]
    ):
        return None
    group = q.shape[1] // k_cache.shape[-2]
    return next((form for (most, heads), form in DEEP.items() if dim <= most and group <= heads), None)


def for_hopper(q: Tensor, k_cache: Tensor, v_cache: Tensor, unit: int, shared: bool) -> bool:
    """Whether the kernel for Hopper takes them: MLA's shared rows of 16 bits or fp8, whole 16 bytes apart. No window,
    no logit_cap, no page apart from the next: registers are short, and no model has those with such rows."""
    return (
        launch.lane() in ("device", "recorded")
        and arch(q.get_device()) == 90
        and q.dtype.itemsize == 2
        and (q.shape[2], v_cache.shape[-1]) == (576, 512)
        and unit >= (8 if q.dtype == k_cache.dtype else 16)
        and shared
    )


def by_boxes(k_cache: Tensor, row: int, group: int) -> bool:
    """Whether the kernel for Hopper has the copy engine fetch 64 rows whose slots follow each other: rows of 16 bits of
    the only key head, `row` elements apart, which is as far as a map of them can say; and more query heads than one
    program takes. Of fewer, memory is what takes the time, and looking for such slots would be up to 2 % more."""
    apart = k_cache.shape[-1] <= row < 2**38
    return k_cache.dtype.itemsize == 2 and k_cache.shape[-2] == 1 and apart and group > 64


def for_lanes(q: Tensor, v_cache: Tensor, group: int, unit: int, row: int) -> bool:
    """Whether the kernel that loads into lanes takes an fp8 cache with rows of whole 16 bytes, `row` elements apart:
    16-bit queries, groups of up to eight of them, heads of powers of two."""
    dims = q.shape[2], v_cache.shape[-1]
    return (
        launch.lane() in ("device", "recorded")
        and arch(q.get_device()) == 90
        and q.dtype.itemsize == 2
        and all(d in LANES for d in dims)
        and group <= 8
        and unit == 16
        and row < 2**31
    )


class Form(NamedTuple):
    """How a call's requests are shared out."""

    run: launch.Launch
    programs: int
    """That requests are split for."""
    where: tuple[tuple[str, int, int], ...]
    """Of which lengths of arguments (`Step`)."""
    told: bool = False
    """Whether who merges is told if there is anything to merge: where requests may each be a program's."""


def _forms(
    run: launch.Launch, programs: int, blocks: int, q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int
) -> Iterator[Form]:
    """`window`: how many keys a request sees at most."""
    # Split for one program alone, each request is one part, and there is nothing to merge.
    yield Form(run, 1, (("kv_indices", -1, WHOLE),))
    several = ("kv_indices", WHOLE, 2**31)
    if "FEW_HEADS" in run.static:
        for low, high, whole in waves(programs):
            yield Form(run, programs, (several, ("q", low, high)), whole)
        return
    deep = deep_of(q, k_cache, v_cache) if run.kernel is decode_attention_kernel else None
    at_once = min(deep.at_once * _sms(q.get_device()), COUNTERS) // blocks if deep else 0
    if deep is None or at_once < 2:
        yield Form(run, programs, (several,))
        return
    uneven = run.kernel.bind(**{**run.static, "ENOUGH": deep.enough, **deep.options})
    few = min(programs * 5 // 8, at_once)
    parts, keys = APART.get(max(q.shape[2], v_cache.shape[-1]), (0, 0))
    most = 0
    if parts and window > keys and run.static["HEADS"] * run.static["DV_PAD"] >= WIDE_APART:
        most = min(programs // parts, few)
        apart = run.kernel.bind(**{**run.static, "TOGETHER": 0})
        for low, high, listed in ((0, 1, keys), (1, most, keys * max(2, most // 2))):
            if low < min(high, most):
                yield Form(run, programs, (("kv_indices", WHOLE, listed), ("q", low, high)))
                yield Form(apart, programs, (("kv_indices", listed, 2**31), ("q", low, high)))
    yield Form(run, programs, (several, ("q", most or -1, few)))
    for low, high in pairwise((few, at_once, 2 * at_once, MOST_WAVES * at_once)):
        short = max(WHOLE, SHORT * low)
        yield Form(run, programs, (("kv_indices", WHOLE, short), ("q", low, high)))
        yield Form(uneven, at_once, (("kv_indices", short, 2**31), ("q", low, high)))
    yield Form(run, programs, (several, ("q", MOST_WAVES * at_once, MOST)))


@plans
def _plans(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_indptr: Tensor, kv_indices: Tensor, out: Tensor | None,
    lse: Tensor | None, scale: float, sliding_window: int, logit_cap: float, k_scale: object, v_scale: object,
) -> Plan:  # fmt: skip
    nnz, (_, q_heads, _), v_dim = kv_indices.shape[0], q.shape, v_cache.shape[-1]
    returns, to, row = _attention.result(q, v_cache, out)
    if nnz >= 2**31:
        raise ArgumentError("decode_attention", "kv_indices", "fewer than 2^31 entries, on cuda", str(nnz))
    if not q_heads:
        return Plan((), returns=returns)
    shared = _attention.shared(k_cache, v_cache)
    # What the kernel for Hopper does not take: pointers that are no multiple of 16 bytes, a scale below 0.
    plain = _attention.aligned(q, k_cache, v_cache, out) and scale >= 0
    window = max(0, min(sliding_window, 2**31 - 2))
    run, blocks, programs, strides = _plan(
        q, k_cache, v_cache, row, lse, sliding_window >= 0, logit_cap > 0, k_scale, v_scale, shared, plain
    )
    forms = tuple(_forms(run, programs, blocks, q, k_cache, v_cache, window + 1 if sliding_window >= 0 else 2**31))
    hopper = "FEW_HEADS" in run.static
    lines = length("q", times=q_heads) + max(form.programs for form in forms) * q_heads
    # Ahead of the sums: `_tell`, with what keeps them in line; behind them: `note`.
    part, sums = Scratch(Size()), Scratch(lines.times(v_dim) + 4)
    counters = (Counters(),) if run.kernel is decode_attention_kernel else ()
    steps: list[Step] = []
    no_tokens = (None, 0) if "TOKENS" in run.static else ()
    for form in forms:
        parts = form.programs
        args = (
            "q", "k_cache", "v_cache", "kv_indptr", "kv_indices", to, "lse", *counters, part, sums, "k_scale",
            "v_scale", *strides, length("k_cache", by=page_size(k_cache)), length("kv_indices"), length("q"), parts,
            window, "scale", "logit_cap", *no_tokens, *((int(form.told),) if hopper else ()),
        )  # fmt: skip
        requests = length("q", times=blocks)
        if parts > 1 and hopper:
            # Those programs that run at once share all requests (`_shares.py`). Beside a few more, which have nothing,
            # what merges begins later, and gets in the way of fewer; not so where it is told that there is nothing.
            requests = requests.at_most(0 if form.told else parts * blocks)
        steps.append(Step(form.run, requests + parts * blocks, args, form.where))
        if parts > 1 and not form.run.static.get("TOGETHER"):
            merge = (part, sums, to, "lse", *row, length("q"), parts)
            _, least, most = next((each for each in form.where if each[0] == "q"), ("q", -1, MOST))
            some = tuple(each for each in form.where if each[0] != "q")
            steps += _merge.steps(form.run, v_dim, merge, some, least, most, form.told)
    size = lines.times(v_dim + 1) + length("q", times=2) + 4
    return Plan(tuple(steps), size, returns, _attention.brief(k_cache, v_cache))


@_plans.launcher
def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    scale: float,
    sliding_window: int = -1,
    logit_cap: float = 0.0,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> Tensor:
    return _plans.start(  # type: ignore[no-any-return]
        q, k_cache, v_cache, kv_indptr, kv_indices, out, lse, scale, sliding_window, logit_cap, k_scale, v_scale
    )


def supports(sig: object) -> str | None:
    return _attention.unsupported(sig)
