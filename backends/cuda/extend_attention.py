# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""extend_attention: tiles of tokens times the query heads that share a key/value head, over a request's slots.

A program finds in qo_indptr which tile is its own, the last tiles first, since they see the most keys. Keys that all
of a tile's tokens see go without a mask; the diagonal and the window's edge follow with one. The grid
bounds the tiles of any ascending qo_indptr; for one that is not, programs go round again. On Hopper MLA's shared rows,
and few tokens over fp8, are taken as decode_attention takes its requests: `_tokens.py`. Other calls there:
`extend_attention_hopper.py`, and where tiles are too few for the device and keys many, as where drafts are verified,
their keys are split, and `_merge.py` merges what is left.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal._errors import ArgumentError
from hal.backends.cuda import _attention, _merge, _tokens
from hal.backends.cuda._attention import LN2, LOG2E, entry, factor, lengths, place, positive, settled, tanh, tile
from hal.backends.cuda._cache import scale_kind
from hal.backends.cuda._device import arch, multiprocessors, next_power_of_2, pdl
from hal.kv.view import copy_unit, fuse_pages, page_size
from hal.ops.spec import FP8
from hal.triton import launch
from hal.triton.plans import MOST, Counters, Plan, Result, Scratch, Size, Step, length, plans

BLOCK = 256
"""Requests whose lengths a program looks at together."""
FEW = 32
"""So few are looked at by each warp for itself, without a barrier."""
MOST_WINDOW = 2**30
"""No memory holds the keys of a request that has more."""
LONG = 2048
"""More listed keys may be split on Hopper."""
ALIKE = 4
"""Of so few requests none has far more keys than the mean."""
HOPPER = {(64, 64): (128, 3), (128, 128): (128, 2), (192, 128): (128, 2), (256, 256): (64, 2)}
"""(keys of a tile, stages) of the kernel for Hopper, by head_dim and v_head_dim; half the keys where registers are
short, under a logit_cap, but for heads of 256 in 16 bits. Heads between 64 and 128 are taken as of 128."""
NARROW = 512
"""Of 128 keys a tile has half under a window of up to so many: then fewer are read that no row sees."""


@triton.jit
def _over(
    q0, q1, k_base, v_base, slots, low, high, inner, full, num_slots, position, by, sign, cap, window,
    kc_page, kc_token, vc_page, vc_token, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D0: tl.constexpr,
    D1: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, K_PAGE: tl.constexpr, V_PAGE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SHARED: tl.constexpr, CAUSAL: tl.constexpr, STRICT: tl.constexpr,
    STAGES: tl.constexpr, SETTLED: tl.constexpr,
):  # fmt: skip
    """The running softmax over entries [low, high), and whether one of them was no slot.

    Every row sees all of [inner, full): only tiles outside are masked. Unless STRICT the result counts only if every
    entry was a slot: a key that is not there has been taken for one of zeros. Logits are in units of 1 / `by`, and
    `top` is of log 2.
    """
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, DV_PAD), tl.float32)
    bad = tl.zeros((N,), tl.int32)
    unit = LOG2E if CAP else by
    for j in tl.range(low, high, N, num_stages=STAGES):
        entries = j + tl.arange(0, N)
        slot = tl.load(slots + entries, entries < high, other=-1).to(tl.int64)
        ok = (slot >= 0) & (slot < num_slots)
        row = place(slot, kc_page, kc_token, K_PAGE)
        k0 = tile(k_base, row, ok, 0, D0, D).to(q0.dtype)
        s = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        if D1:
            k1 = tile(k_base, row, ok, D0, D1, D).to(q0.dtype)
            s = tl.dot(q1, tl.trans(k1), s, input_precision="ieee")
        if STRICT:
            s *= sign
        if CAP:
            s = cap * tanh(s * (by / cap))
        if STRICT:
            s += tl.where(ok, 0.0, float("-inf"))[None, :]
        else:
            bad |= ((entries < high) & ~ok).to(tl.int32)
        edge = j + N > full
        if WINDOW:
            edge = edge | (j < inner)
        if edge:
            last = tl.minimum(position, high - 1) if CAUSAL else tl.zeros_like(position) + (high - 1)
            s = tl.where(entries[None, :] <= last[:, None], s, float("-inf"))
            if WINDOW:
                s = tl.where(entries[None, :] >= position[:, None] - window, s, float("-inf"))
        if SHARED:
            v = k0
        else:
            if V_PAGE:  # else v lies as k does
                row = place(slot, vc_page, vc_token, V_PAGE)
            v = tile(v_base, row, ok, 0, DV_PAD, DV).to(q0.dtype)
        # Rounded once: as a fused top * unit - base, where top stays, is not 0, sums would shrink with each tile.
        new = tl.maximum(top, tl.max(s, 1) * unit)
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s * unit - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        if SETTLED:
            acc = settled(acc)
        top = new
    return acc, top, total, bad


@triton.jit
def _find(qo_indptr, c, n, bs, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """(the request that tile c is of, tiles before that request's)."""
    request = tl.zeros((), tl.int64)
    before = tl.zeros((), tl.int64)
    base = tl.zeros((), tl.int64)
    for b in range(0, bs, BLOCK):
        i = b + tl.arange(0, BLOCK)
        many = ((lengths(qo_indptr, i, i < bs, n) + (TOKENS - 1)) // TOKENS).to(tl.int64)
        mine = (base + tl.cumsum(many, 0) <= c) & (i < bs)
        request += tl.sum(mine.to(tl.int64))
        before += tl.sum(tl.where(mine, many, 0))
        base += tl.sum(many)
    return request, before


@triton.jit
def _tiles(qo_indptr, n, bs, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """How many tiles there are."""
    every = tl.zeros((), tl.int64)
    for b in range(0, bs, BLOCK):
        i = b + tl.arange(0, BLOCK)
        many = (lengths(qo_indptr, i, i < bs, n) + (TOKENS - 1)) // TOKENS
        every += tl.sum(many.to(tl.int64))
    return every


@launch.jit(
    do_not_specialize="""
    qo_indptr kv_indptr kv_indices lse k_scale v_scale q_row q_head kc_page kc_token kc_head vc_page
    vc_token vc_head out_row out_head num_slots nnz n bs around window scale cap
    """.split()
)
def extend_attention_kernel(
    q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, out, lse, k_scale, v_scale,
    q_row: tl.int64, q_head: tl.int64, kc_page: tl.int64, kc_token: tl.int64, kc_head: tl.int64,
    vc_page: tl.int64, vc_token: tl.int64, vc_head: tl.int64, out_row: tl.int64, out_head: tl.int64,
    num_slots: tl.int64, nnz: tl.int64, n: tl.int64, bs: tl.int32, around: tl.int64, window: tl.int32, scale, cap,
    Q_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr, K_PAGE: tl.constexpr, V_PAGE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr, SHARED: tl.constexpr, LSE: tl.constexpr,
    UNIT: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
    FEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    q_row, q_head, out_row, out_head = q_row * UNIT, q_head * UNIT, out_row * UNIT, out_head * UNIT
    kc_page, kc_token, kc_head = kc_page * UNIT, kc_token * UNIT, kc_head * UNIT
    vc_page, vc_token, vc_head = vc_page * UNIT, vc_token * UNIT, vc_head * UNIT
    block = tl.program_id(0) % BLOCKS
    kv_head = (block // (BLOCKS * GROUP // Q_HEADS)).to(tl.int64)
    r = tl.arange(0, M)
    member = block % (BLOCKS * GROUP // Q_HEADS) * HEADS + r % HEADS
    head = kv_head * GROUP + member
    by = scale * factor(k_scale, K_KIND)
    # Logits stay in the dot product's units up to the exponential, where one fused operation scales them. So that the
    # greatest is the greatest there too, a sign goes to the dot products; a scale of 0 is one too small to be seen.
    sign = tl.where(by < 0, -1.0, 1.0)
    by = positive(tl.abs(by))
    if not CAP:
        by *= LOG2E
    k_base = k_cache + kv_head * kc_head
    v_base = v_cache + kv_head * vc_head

    if bs <= FEW:
        every = _tiles(qo_indptr, n, bs, TOKENS, FEW)
    else:
        every = _tiles(qo_indptr, n, bs, TOKENS, BLOCK)
    for turn in range((tl.program_id(0) // BLOCKS).to(tl.int64), every, around):
        c = every - 1 - turn
        if bs <= FEW:
            request, before = _find(qo_indptr, c, n, bs, TOKENS, FEW)
        else:
            request, before = _find(qo_indptr, c, n, bs, TOKENS, BLOCK)
        first = entry(qo_indptr, request, n)
        news = entry(qo_indptr, request + 1, n) - first
        begin = entry(kv_indptr, request, nnz)
        length = tl.maximum(entry(kv_indptr, request + 1, nnz) - begin, 0)
        token = (c - before).to(tl.int32) * TOKENS
        t = token + r // HEADS
        there = (t < news) & (r // HEADS < TOKENS) & (member < GROUP)
        at = (first + t).to(tl.int64)
        q0 = tile(q, at * q_row + head * q_head, there, 0, D0, D)
        q1 = q0
        if D1:
            q1 = tile(q, at * q_row + head * q_head, there, D0, D1, D)
        position = length - news + t
        lowest = length - news + token
        low = 0
        high = length
        if CAUSAL:
            high = tl.minimum(length, tl.maximum(length - news + tl.minimum(token + TOKENS, news), 0))
        full = high
        if CAUSAL:
            full = tl.minimum(full, tl.maximum(lowest + 1, 0))
        inner = 0
        if WINDOW:
            low = tl.maximum(lowest - window, 0) // N * N
            inner = lowest + (TOKENS - 1) - window
        slots = kv_indices + begin.to(tl.int64)
        acc, top, total, bad = _over(
            q0, q1, k_base, v_base, slots, low, tl.where(sign < 0, low, high), inner, full, num_slots, position, by,
            sign, cap, window, kc_page, kc_token, vc_page, vc_token, M, N, D, D0, D1, DV, DV_PAD, K_PAGE, V_PAGE,
            WINDOW, CAP, SHARED, CAUSAL, False, STAGES, PDL,
        )  # fmt: skip
        if (tl.max(bad) != 0) | (sign < 0):
            acc, top, total, bad = _over(
                q0, q1, k_base, v_base, slots, low, high, inner, full, num_slots, position, by, sign, cap, window,
                kc_page, kc_token, vc_page, vc_token, M, N, D, D0, D1, DV, DV_PAD, K_PAGE, V_PAGE, WINDOW, CAP, SHARED,
                CAUSAL, True, 2, PDL,
            )  # fmt: skip
        some = total != 0.0
        acc = acc * (factor(v_scale, V_KIND) / tl.where(some, total, 1.0))[:, None]
        d = tl.arange(0, DV_PAD)[None, :]
        to = out + (at * out_row + head * out_head)[:, None] + d
        tl.store(to, acc.to(out.dtype.element_ty), there[:, None] & (d < DV))
        if LSE:
            sums = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
            tl.store(lse + at * Q_HEADS + head, sums * LN2, there)


def tiles(head_dim: int, v_head_dim: int, dtype: torch.dtype, arch: int) -> tuple[int, int, int, int]:
    """(M, N, warps, stages): rows and keys of a tile.

    Measured on sm_90, where fewer stages than 5 leave no load in flight over a product, since slots are read a stage
    before rows. On others untuned: the largest that compile without spills (`hal inspect`).
    """
    most = max(head_dim, v_head_dim)
    if dtype == torch.float32:
        if arch == 80:
            return (16, 32, 4, 1) if most <= 128 else (16, 32, 8, 1) if most <= 256 else (16, 16, 8, 2)
        return (16, 32, 4, 2) if most <= 128 else (16, 16, 8, 1)
    if head_dim > 256:
        return 32, 16, 8, 2
    if most > 128:
        return (64, 32, 8, 2) if arch < 100 else (32, 32, 4, 2)
    if head_dim & (head_dim - 1):  # a head in two tiles
        return {80: (128, 32, 8, 3), 90: (128, 64, 8, 3)}.get(arch, (64, 32, 8, 2))
    return {80: (128, 64, 8, 3), 90: (128, 64, 8, 5)}.get(arch, (64, 32, 8, 3))


def _as_of(dim: int, v_dim: int) -> tuple[int, int]:
    """The head_dim and v_head_dim of `HOPPER` by whose tiles the kernel for Hopper takes such heads."""
    return (128, 128) if dim == v_dim and 64 < dim < 128 and dim % 16 == 0 else (dim, v_dim)


def for_hopper(q: Tensor, k_cache: Tensor, v_cache: Tensor, unit: int, shared: bool) -> bool:
    """Whether the kernel for Hopper takes them: 16 bits, heads that it has a tile for, rows of whole 16 bytes."""
    return (
        launch.lane() in ("device", "recorded")
        and arch(q.get_device()) == 90
        and q.dtype.itemsize == 2
        and _as_of(q.shape[2], v_cache.shape[-1]) in HOPPER
        and (unit >= 8 if q.dtype == k_cache.dtype else unit == 16 and q.shape[2] != 192 and k_cache.dtype in FP8)
        and not shared
    )


def by_boxes(k_cache: Tensor, v_cache: Tensor, kc: tuple[int, ...], vc: tuple[int, ...]) -> bool:
    """Whether the kernel for Hopper may have the copy engine fetch tiles whose slots follow each other. Of heads of
    192, DeepSeek's prompts, whose keys were made for the call; over pages, looking for such slots takes 4 to 6 % more.

    A map of rows must tell where they are: heads of 16 bits side by side (the strides of a slot and of a head).
    """
    wide = ((c[0], (x.shape[-2] - 1) * c[2] + x.shape[-1]) for x, c in ((k_cache, kc), (v_cache, vc)))
    fits = all(0 < columns <= row < 2**31 for row, columns in wide)
    return fits and k_cache.dtype.itemsize == 2 and k_cache.shape[-1] == 192


def _plan(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    row: tuple[int, int],
    lse: Tensor | None,
    causal: bool,
    window: int,
    cap: bool,
    k_scale: object,
    v_scale: object,
    shared: bool,
    plain: bool,
) -> tuple[launch.Launch, bool, int, int, tuple[int, ...]]:
    q_heads, kv_heads, dim, v_dim = q.shape[1], k_cache.shape[-2], q.shape[2], v_cache.shape[-1]
    group = q_heads // kv_heads
    device = q.get_device()
    k_page, kc = fuse_pages(k_cache)
    v_page, vc = fuse_pages(v_cache)
    if (v_page, vc) == (k_page, kc):
        v_page = 0
    strides = (*q.stride()[:2], *kc, *vc, *row)
    unit = copy_unit(strides)
    on = pdl(device)
    fp8 = k_cache.dtype in FP8
    unscaled = k_scale is None and v_scale is None
    hopper = plain and (fp8 or unscaled) and for_hopper(q, k_cache, v_cache, unit, shared)
    if hopper:
        (n, stages), m, warps = HOPPER[_as_of(dim, v_dim)], 128, 4
        narrow = 0 <= window <= NARROW and n == 128
        if narrow or (cap and (fp8 or dim < 256)):
            n, stages = n // 2, 2 * stages
    else:
        m, n, warps, stages = tiles(dim, v_dim, q.dtype, arch(device))
    heads = min(group, m)
    blocks = kv_heads * -(-group // heads)
    d0, d1 = _attention.parts(dim)
    v_tile = next_power_of_2(v_dim)
    if hopper and (fp8 or d0 + d1 > dim):
        d0, d1 = next_power_of_2(dim), 0  # widened, or padded, as one tile
    tokens = m // heads
    same: dict[str, Any] = {
        "Q_HEADS": q_heads, "GROUP": group, "BLOCKS": blocks, "HEADS": heads, "TOKENS": tokens, "N": n,
        "K_PAGE": k_page, "V_PAGE": v_page, "CAUSAL": causal, "WINDOW": window >= 0, "CAP": cap, "LSE": lse is not None,
        "UNIT": unit, "STAGES": stages, "BLOCK": BLOCK, "FEW": FEW, "PDL": on, "launch_pdl": on, "num_warps": warps,
        "K_KIND": scale_kind(k_scale), "V_KIND": scale_kind(v_scale),
    }  # fmt: skip
    if hopper:
        from hal.backends.cuda.extend_attention_hopper import extend_attention_hopper_kernel

        run = extend_attention_hopper_kernel.bind(
            **{**same, "TOKENS": (heads - math.gcd(heads, m) + m - 1) // heads + 1},
            SPLIT=False,
            LONG_FIRST=False,
            D=v_tile,
            FIRST=d0,
            REST=d1,
            DIM=dim,
            WIDTH=v_dim,
            MAP=n == 128 and k_page == 1 and v_page <= 1 and by_boxes(k_cache, v_cache, kc, vc),
        )
    else:
        run = extend_attention_kernel.bind(
            **same, M=m, D=dim, D0=d0, D1=d1, DV=v_dim, DV_PAD=max(16, next_power_of_2(v_dim)), SHARED=shared
        )
    return run, hopper, blocks, tokens, tuple(s // unit for s in strides)


def _own(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, returns: str | Result, to: str, row: tuple[int, int],
    lse: Tensor | None, causal: bool, sliding_window: int, logit_cap: float, k_scale: object, v_scale: object,
    shared: bool, plain: bool,
) -> Plan:  # fmt: skip
    """What a call starts of this op's own kernels."""
    window = sliding_window >= 0
    run, hopper, blocks, tokens, strides = _plan(
        q, k_cache, v_cache, row, lse, causal, sliding_window, logit_cap > 0, k_scale, v_scale, shared, plain
    )
    bs = length("qo_indptr") + -1
    around = length("q", per=tokens) + bs
    programs = around.times(blocks)
    counters: tuple[Counters, ...] = ()
    most: tuple[Size, ...] = (around,)
    if hopper:  # whose programs do tile after tile, one program a multiprocessor
        at_once = multiprocessors(q.get_device()) if q.get_device() >= 0 else 16
        programs, counters, most = programs.at_most(at_once), (Counters(),), ()
    args = (
        "q", "k_cache", "v_cache", "qo_indptr", "kv_indptr", "kv_indices", to, "lse", *counters, "k_scale",
        "v_scale", *strides, length("k_cache", by=page_size(k_cache)), length("kv_indices"), length("q"), bs, *most,
        max(0, min(sliding_window, MOST_WINDOW)), "scale", "logit_cap",
    )  # fmt: skip
    some = ("qo_indptr", 1, MOST)
    if not hopper:
        return Plan((Step(run, programs, args, (("q", 0, MOST), some)),), None, returns)
    args = (*args, None, None, 1)
    parts = at_once // blocks
    from hal.backends.cuda._turns import LINES_EACH, WHOLE

    if parts < 2 or (window and (not causal or sliding_window + tokens <= WHOLE.value)):
        return Plan((Step(run, programs, args, (("q", 0, MOST), some)),), Size(), returns)

    # Where tiles do not fill the device, keys are split, if they are many; where they do, those of requests that have
    # far more than others, of which there is none among few.
    n, v_dim, rows, few = length("q"), v_cache.shape[-1], q.shape[1] * tokens, parts * tokens // 2
    fp8 = k_cache.dtype in FP8
    # Of no more than parts / 2 whole tiles, a last one of each request, and the parts; or of long requests.
    lines = LINES_EACH.value * parts * q.shape[1] * run.static["TOKENS"]
    part, part_lse = Scratch(Size()), Scratch(Size(lines * v_dim))
    split = run.kernel.bind(**{**run.static, "SPLIT": True, "TOKENS": tokens})
    little, much = ("kv_indices", -1, LONG), ("kv_indices", LONG, MOST)
    full = (Size(few + 1).within(n) + Size(parts).within(bs)).at_most(1)
    args_of_parts = (*args[:-3], part, part_lse, parts)
    # Of heads of 256 over fp8 two registers more would be put aside in the loop. Under a window none is longer.
    alike = MOST if window or (fp8 and v_dim == 256) else ALIKE + 1
    steps = [
        Step(run, programs, args, (("q", 0, MOST), some, little)),
        Step(run, programs.times(full), args, (("qo_indptr", 1, alike), much)),
    ]
    if alike < MOST:
        long = run.kernel.bind(**{**run.static, "LONG_FIRST": True})
        steps += [Step(long, Size(at_once).times(full), args_of_parts, (("qo_indptr", alike, MOST), much))]
    steps += [Step(split, Size(at_once), args_of_parts, (("q", 0, few), ("qo_indptr", 1, parts), much))]
    merge = (part, part_lse, to, "lse", *row, n, parts)
    steps += _merge.steps(split, v_dim, merge, (("qo_indptr", 1, parts), much), -1, few)
    sums = ((n.at_most(few) + parts).times(rows) + n.times(4)).at_least(lines)
    return Plan(tuple(steps), sums + lines * v_dim, returns)


@plans
def _plans(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    scale: float,
    causal: bool,
    sliding_window: int,
    logit_cap: float,
    k_scale: object,
    v_scale: object,
) -> Plan:
    n, nnz = q.shape[0], kv_indices.shape[0]
    returns, to, row = _attention.result(q, v_cache, out)
    if max(n, nnz) > MOST:
        raise ArgumentError("extend_attention", "kv_indices", f"at most {MOST} entries, on cuda", str(nnz))
    if not q.shape[1]:
        return Plan((), returns=returns)
    shared = _attention.shared(k_cache, v_cache)
    # What the kernel for Hopper does not take: pointers that are no multiple of 16 bytes, a scale below 0.
    plain = _attention.aligned(q, k_cache, v_cache, out) and scale >= 0
    ways = _tokens.ways(
        q, k_cache, v_cache, kv_indices, to, row, lse, causal, min(sliding_window, MOST_WINDOW), logit_cap > 0,
        k_scale, v_scale, shared, plain,
    )  # fmt: skip
    brief = _attention.brief(k_cache, v_cache)
    if ways and not ways[-1].few:
        return Plan(ways[-1].steps, ways[-1].scratch, returns, brief)
    own = _own(
        q, k_cache, v_cache, returns, to, row, lse, causal, sliding_window, logit_cap, k_scale, v_scale, shared, plain
    )
    return (_tokens.beside(ways, own) if ways else own)._replace(as_graph=brief)


@_plans.launcher
def extend_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int = -1,
    logit_cap: float = 0.0,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> Tensor:
    return _plans.start(  # type: ignore[no-any-return]
        q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, out, lse, scale, causal, sliding_window, logit_cap,
        k_scale, v_scale,
    )  # fmt: skip


def supports(sig: object) -> str | None:
    return _attention.unsupported(sig)
