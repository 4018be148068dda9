# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""What a program of decode_attention's Triton kernel does with keys of one request, and how it leaves what it found: as
the request's output, or a part of it that whoever is last merges, or another launch (`_merge.py`)."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from hal.backends.cuda._attention import LN2, exponent, factor, logits, magnitude, place, power, step, tile, without
from hal.backends.cuda._split import merge


@triton.jit
def leave(
    acc, top, total, v_factor, out, lse, counters, part, part_lse, c, before, request, parts, block, kv_head, out_row,
    out_head, Q_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, M: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr, LSE: tl.constexpr, SHIFT: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """A part's sums: to the output where it is a request's only one, else to where who is last merges, or a launch."""
    some = total != 0.0
    whole = tl.where(some, total, 1.0)
    sums = tl.where(some, top - SHIFT + tl.log2(whole), float("-inf"))
    acc = acc * (v_factor / whole)[:, None]
    first = block % (BLOCKS * GROUP // Q_HEADS) * M
    member = first + tl.arange(0, M)
    there = member < GROUP
    head = kv_head * GROUP + member
    d = tl.arange(0, DV_PAD)[None, :]
    mask = there[:, None] & (d < DV)
    out += tl.cast(request, tl.int64) * out_row
    if LSE:
        lse += tl.cast(request, tl.int64) * Q_HEADS
    if parts == 1:
        tl.store(out + head[:, None] * out_head + d, acc.to(out.dtype.element_ty), mask)
        if LSE:
            tl.store(lse + head, sums * LN2, there)
    else:
        line = c.to(tl.int64) * Q_HEADS + head
        tl.store(part + line[:, None] * DV + d, acc, mask)
        tl.store(part_lse + line, sums, there)
        if TOGETHER:
            each = first + tl.arange(0, HEADS)
            merge(
                out, lse, part, part_lse, counters, c, before, request, parts, block, kv_head * GROUP + each,
                tl.arange(0, ROWS), tl.arange(0, DV_PAD), each < GROUP, out_head, Q_HEADS, BLOCKS, DV, LSE, TOGETHER,
            )  # fmt: skip


@triton.jit
def attend(
    request, begin, parts, low, high, line, leads, last, block, q, k_cache, v_cache, kv_indices, out, lse, counters,
    part, part_lse, k_scale, v_scale, q_row, q_head, kc_page, kc_token, kc_head, vc_page, vc_token, vc_head, out_row,
    out_head, num_slots, scale, cap,
    Q_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    K_PAGE: tl.constexpr, V_PAGE: tl.constexpr, CAP: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    SHARED: tl.constexpr, HALF: tl.constexpr, LSE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Keys [low, high) of a request's, under the query heads of a block. `last`: of what the program has."""
    SHIFT: tl.constexpr = 15 if HALF else 0
    kv_head = (block // (BLOCKS * GROUP // Q_HEADS)).to(tl.int64)
    member = block % (BLOCKS * GROUP // Q_HEADS) * M + tl.arange(0, M)
    there = member < GROUP
    head = kv_head * GROUP + member
    at = tl.cast(request, tl.int64) * q_row + head * q_head
    q0 = tile(q, at, there, 0, D0, D)
    q1 = q0
    if D1:
        q1 = tile(q, at, there, D0, D1, D)
    by = scale * factor(k_scale, K_KIND)
    if HALF:  # fp8 is exact in fp16, and so are queries, by a power of two
        most = tl.max(magnitude(q0), 1)
        if D1:
            most = tl.maximum(most, tl.max(magnitude(q1), 1))
        e = exponent(most)
        q0 = (q0.to(tl.float32) * power(e)[:, None]).to(tl.float16)
        q1 = (q1.to(tl.float32) * power(e)[:, None]).to(tl.float16)
        by = without(by, e)[:, None]
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, DV_PAD), tl.float32)
    k_base = k_cache + kv_head * kc_head
    v_base = v_cache + kv_head * vc_head
    slots = kv_indices + begin.to(tl.int64)
    entries = low + tl.arange(0, N)
    if AHEAD:
        coming = tl.load(slots + entries, entries < high, other=-1)
    for j in tl.range(low, high, N, num_stages=STAGES):
        if AHEAD:
            # Through registers: Triton would copy slots to shared memory behind rows, and copies end in order, so
            # that no rows could be under way while the next ones' slots are waited for.
            slot = coming
            entries = j + N + tl.arange(0, N)
            coming = tl.load(slots + entries, entries < high, other=-1)
        else:
            entries = j + tl.arange(0, N)
            slot = tl.load(slots + entries, entries < high, other=-1)
        slot = slot.to(tl.int64)
        ok = (slot >= 0) & (slot < num_slots)
        row = place(slot, kc_page, kc_token, K_PAGE)
        k0 = tile(k_base, row, ok, 0, D0, D).to(q0.dtype)
        k1 = k0
        if D1:
            k1 = tile(k_base, row, ok, D0, D1, D).to(q0.dtype)
        s = logits(q0, q1, k0, k1, by, cap, CAP, D1 > 0)
        s = tl.where(ok[None, :], s, float("-inf"))
        if SHARED:
            v = k0
        else:
            if V_PAGE:  # else v lies as k does
                row = place(slot, vc_page, vc_token, V_PAGE)
            v = tile(v_base, row, ok, 0, DV_PAD, DV).to(q0.dtype)
        acc, top, total = step(acc, top, total, s, v, SHIFT)
    if PDL and last:
        gdc_launch_dependents()
    leave(
        acc, top, total, factor(v_scale, V_KIND), out, lse, counters, part, part_lse, line, leads, request, parts,
        block, kv_head, out_row, out_head, Q_HEADS, GROUP, BLOCKS, M, DV, DV_PAD, LSE, SHIFT, HEADS, ROWS, TOGETHER,
    )  # fmt: skip
