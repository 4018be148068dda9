# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""extend_attention on Hopper, in Gluon: four warps fetch keys and values, and two times four multiply.

In Triton's own pipeline eight warps do everything in turn. Here the rows of a paged cache are fetched by warps that do
nothing else, into rings of tiles in shared memory, and the two groups of 64 rows drift apart, so that exponentials of
one run under products of the other. Within a group, the next tile's logits are asked for before this tile's product
with v. Which tile is a program's, and what its rows are, is as in `extend_attention_kernel`.

Source: Shah et al., FlashAttention-3 (arXiv:2407.08608).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda import _attention
from hal.backends.cuda._attention import LN2, LOG2E
from hal.triton import launch

ROWS = gl.constexpr(64)
"""Rows of a group of four warps: what one `wgmma` multiplies."""
ABSENT = gl.constexpr(float("-inf"))

entry = gluon.jit(_attention.entry.fn)
lengths = gluon.jit(_attention.lengths.fn)
place = gluon.jit(_attention.place.fn)
tanh = gluon.jit(_attention.tanh.fn)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _tiles(qo_indptr, b, n, bs, TOKENS: gl.constexpr, BLOCK: gl.constexpr, COUNT: gl.constexpr):
    """(how many tiles, whether there is such a request) of BLOCK requests from b on."""
    i = b + gl.arange(0, BLOCK, gl.BlockedLayout([BLOCK // 32], [32], [gl.num_warps()], [0]))
    return ((lengths(qo_indptr, i, i < bs, n) + (TOKENS - 1)) // TOKENS).to(COUNT), i < bs


@gluon.jit
def _find(qo_indptr, turn, n, bs, TOKENS: gl.constexpr, BLOCK: gl.constexpr, COUNT: gl.constexpr):
    """(tiles in all, the request of the tile that is `turn` from the last, tiles before that request's), int64.

    COUNT is the type to add in: sums of int32 take fewer instructions.
    """
    zero = gl.to_tensor(0).to(COUNT)
    every, request, before, base = zero, zero, zero, zero
    for b in range(0, bs, BLOCK):
        many, there = _tiles(qo_indptr, b, n, bs, TOKENS, BLOCK, COUNT)
        every += gl.sum(many)
    for b in range(0, bs, BLOCK):
        many, there = _tiles(qo_indptr, b, n, bs, TOKENS, BLOCK, COUNT)
        mine = (base + gl.associative_scan(many, 0, _add) < every - turn) & there
        request += gl.sum(mine.to(COUNT))
        before += gl.sum(gl.where(mine, many, 0))
        base += gl.sum(many)
    return every.to(gl.int64), request.to(gl.int64), before.to(gl.int64)


@gluon.jit
def _query(r, tile, HEADS: gl.constexpr):
    """(token of q, query head, whether there is such a one) of rows of a tile."""
    token, tokens, head, heads = tile
    return (token + r // HEADS).to(gl.int64), head + r % HEADS, (r // HEADS < tokens) & (r % HEADS < heads)


@gluon.jit
def _copy(to, base, rows, there, UNIT: gl.constexpr):
    """Rows, which begin at so many UNITs, into a tile; zeros where there is none. By pieces, for want of registers."""
    N: gl.constexpr = to.shape[0]
    D: gl.constexpr = to.shape[1]
    PIECE: gl.constexpr = N if N * D < 16 * 256 else 16 * 256 // D
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    d = gl.arange(0, D, gl.SliceLayout(0, ROW))[None, :]
    for i in gl.static_range(0, N, PIECE):
        row = rows.slice(i, PIECE).load(gl.SliceLayout(1, ROW))
        ok = there.slice(i, PIECE).load(gl.SliceLayout(1, ROW)) != 0
        async_copy.async_copy_global_to_shared(to.slice(i, PIECE), base + (row[:, None] * UNIT + d), ok[:, None])


@gluon.jit
def _fetch(
    q, k_base, v_base, slots, tile, low, high, q_tiles, k_ring, v_ring, places, barriers, strides, num_slots,
    K_PAGE: gl.constexpr, V_PAGE: gl.constexpr, REST: gl.constexpr, UNIT: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """The queries, then the keys and values of entries [low, high), tile by tile."""
    q_rows, q_there, k_rows, v_rows, there = places
    q_full, k_full, k_empty, v_full, v_empty = barriers
    q_row, q_head, kc_page, kc_token, vc_page, vc_token = strides
    STAGES: gl.constexpr = v_ring.shape[0]
    N: gl.constexpr = v_ring.shape[1]
    D: gl.constexpr = v_ring.shape[2]
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    each = gl.arange(0, N, EACH)
    slot = gl.load(slots + (low + each), low + each < high, other=-1)
    at, head, asked = _query(gl.arange(0, 2 * ROWS, EACH), tile, HEADS)
    q_rows.store(at * q_row + head * q_head)
    q_there.store(asked.to(gl.int32))
    for part in gl.static_range(2):
        rows, theirs = q_rows.slice(part * ROWS, ROWS), q_there.slice(part * ROWS, ROWS)
        _copy(q_tiles[0].index(part), q, rows, theirs, UNIT)
        if REST:
            _copy(q_tiles[1].index(part), q + D, rows, theirs, UNIT)
    async_copy.mbarrier_arrive(q_full, increment_count=False)
    stage = 0
    free = 1
    for j in range(low, high, N):
        ok = (slot >= 0) & (slot < num_slots)
        mine = gl.where(ok, slot, 0).to(gl.int64)
        slot = gl.load(slots + (j + N + each), j + N + each < high, other=-1)
        mbarrier.wait(k_empty.index(stage), free)
        there.index(stage).store(ok.to(gl.int32))
        k_rows.index(stage).store(place(mine, kc_page, kc_token, K_PAGE))
        _copy(k_ring[0].index(stage), k_base, k_rows.index(stage), there.index(stage), UNIT)
        if REST:
            _copy(k_ring[1].index(stage), k_base + D, k_rows.index(stage), there.index(stage), UNIT)
        async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
        mbarrier.arrive(k_full.index(stage))  # for `there`, which no asynchronous copy writes
        mbarrier.wait(v_empty.index(stage), free)
        if V_PAGE:
            v_rows.index(stage).store(place(mine, vc_page, vc_token, V_PAGE))
            _copy(v_ring.index(stage), v_base, v_rows.index(stage), there.index(stage), UNIT)
        else:  # v lies as k does
            _copy(v_ring.index(stage), v_base, k_rows.index(stage), there.index(stage), UNIT)
        async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
        stage += 1
        if stage == STAGES:
            stage = 0
            free ^= 1
    async_copy.wait_group(0)


@gluon.jit
def _softmax(
    s, top, total, there, j, inner, full, high, position, window, by, cap, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    CAP: gl.constexpr,
):  # fmt: skip
    """One step of the running softmax, over a tile of products; `there` says which of its keys are."""
    N: gl.constexpr = s.shape[1]
    KEYS: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    EACH: gl.constexpr = gl.BlockedLayout([N // 32], [32], [gl.num_warps()], [0])
    unit = by
    if CAP:
        s = cap * tanh(s * (by / cap))
        unit = LOG2E
    edge = (j + N > full) | (gl.min(there.load(EACH), 0) == 0)
    if WINDOW:
        edge = edge | (j < inner)
    if edge:
        entries = (j + gl.arange(0, N, KEYS))[None, :]
        seen = (there.load(KEYS) != 0)[None, :]
        if CAUSAL:
            seen = seen & (entries <= gl.minimum(position, high - 1)[:, None])
        else:
            seen = seen & (entries < high)
        if WINDOW:
            seen = seen & (entries >= position[:, None] - window)
        s = gl.where(seen, s, ABSENT)
    new = gl.maximum(top, gl.max(s, 1))
    base = gl.where(new == ABSENT, 0.0, new) * unit
    p = gl.exp2(s * unit - base[:, None])
    keep = gl.exp2(top * unit - base)
    return p, keep, new, total * keep + gl.sum(p, 1)


@gluon.jit
def _logits(part, stage, q_tiles, k_ring, none, REST: gl.constexpr):
    """Queries times keys, begun."""
    k = k_ring[0].index(stage).permute((1, 0))
    s = warpgroup_mma(q_tiles[0].index(part), k, none, use_acc=False, is_async=True)
    if REST:
        k = k_ring[1].index(stage).permute((1, 0))
        s = warpgroup_mma(q_tiles[1].index(part), k, s, is_async=True)
    return s


@gluon.jit
def _multiply(
    PART: gl.constexpr, out, lse, tile, lowest, low, high, q_tiles, k_ring, v_ring, there, barriers, out_row, out_head,
    window, by, cap, Q_HEADS: gl.constexpr, HEADS: gl.constexpr, REST: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, CAP: gl.constexpr, LSE: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """Rows [64 PART, 64 PART + 64) of a tile whose first token has position `lowest`."""
    q_full, k_full, k_empty, v_full, v_empty = barriers
    STAGES: gl.constexpr = v_ring.shape[0]
    N: gl.constexpr = v_ring.shape[1]
    D: gl.constexpr = v_ring.shape[2]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    dtype: gl.constexpr = out.dtype.element_ty
    r = PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LOGITS))
    position = lowest + r // HEADS
    # All rows see all of [inner, full).
    full = high
    if CAUSAL:
        full = gl.minimum(full, gl.maximum(lowest + PART * ROWS // HEADS + 1, 0))
    inner = 0
    if WINDOW:
        inner = lowest + (PART * ROWS + ROWS - 1) // HEADS - window
    top = gl.full([ROWS], ABSENT, gl.float32, gl.SliceLayout(1, LOGITS))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LOGITS))
    acc = gl.zeros([ROWS, D], gl.float32, SUMS)
    none = gl.zeros([ROWS, N], gl.float32, LOGITS)
    mbarrier.wait(q_full, 0)
    if high > low:
        stage = 0
        phase = 0
        # Copies are seen by `wgmma` only past a fence, on either side of the barrier.
        mbarrier.wait(k_full.index(0), 0)
        fence_async_shared()
        s = warpgroup_mma_wait(0, [_logits(PART, 0, q_tiles, k_ring, none, REST)])
        p, keep, top, total = _softmax(
            s, top, total, there.index(0), low, inner, full, high, position, window, by, cap, CAUSAL, WINDOW, CAP
        )  # fmt: skip
        mbarrier.arrive(k_empty.index(0))
        weights = gl.convert_layout(p.to(dtype), WEIGHTS)
        for j in range(low + N, high, N):
            before = stage
            before_phase = phase
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
            mbarrier.wait(k_full.index(stage), phase)
            fence_async_shared()
            s_begun = _logits(PART, stage, q_tiles, k_ring, none, REST)
            mbarrier.wait(v_full.index(before), before_phase)
            fence_async_shared()
            acc_begun = warpgroup_mma(weights, v_ring.index(before), acc, is_async=True)
            s = warpgroup_mma_wait(1, [s_begun])
            p, keep, top, total = _softmax(
                s, top, total, there.index(stage), j, inner, full, high, position, window, by, cap, CAUSAL, WINDOW, CAP
            )  # fmt: skip
            mbarrier.arrive(k_empty.index(stage))
            acc = warpgroup_mma_wait(0, [acc_begun])
            mbarrier.arrive(v_empty.index(before))
            acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, SUMS))[:, None]
            weights = gl.convert_layout(p.to(dtype), WEIGHTS)
        mbarrier.wait(v_full.index(stage), phase)
        fence_async_shared()
        acc = warpgroup_mma(weights, v_ring.index(stage), acc)

    # By way of the queries' tile, which nobody reads any more, outputs leave in rows of whole sectors.
    some = total != 0.0
    share = 1.0 / gl.where(some, total, 1.0)
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    mine = q_tiles[0].index(PART)
    mine.store((acc * gl.convert_layout(share, gl.SliceLayout(1, SUMS))[:, None]).to(dtype))
    rows = PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, ROW))
    at, head, asked = _query(rows, tile, HEADS)
    d = gl.arange(0, D, gl.SliceLayout(0, ROW))[None, :]
    gl.store(out + ((at * out_row + head * out_head)[:, None] * UNIT + d), mine.load(ROW), asked[:, None])
    if LSE:
        unit = by
        if CAP:
            unit = LOG2E
        at, head, asked = _query(r, tile, HEADS)
        sums = gl.where(some, top * unit + gl.log2(gl.where(some, total, 1.0)), ABSENT)
        gl.store(lse + (at * Q_HEADS + head), sums * LN2, asked)


@gluon.jit
def _barriers(MANY: gl.constexpr):
    return gl.allocate_shared_memory(gl.int64, [MANY, 1], mbarrier.MBarrierLayout())


@launch.jit(
    gluon=True,
    do_not_specialize=(
        "qo_indptr", "kv_indptr", "kv_indices", "lse", "q_row", "q_head", "kc_page", "kc_token", "kc_head", "vc_page",
        "vc_token", "vc_head", "out_row", "out_head", "num_slots", "nnz", "n", "bs", "around", "window", "scale", "cap",
    ),
)  # fmt: skip
def extend_attention_hopper_kernel(
    q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, out, lse, k_scale, v_scale,
    q_row: gl.int64, q_head: gl.int64, kc_page: gl.int64, kc_token: gl.int64, kc_head: gl.int64,
    vc_page: gl.int64, vc_token: gl.int64, vc_head: gl.int64, out_row: gl.int64, out_head: gl.int64,
    num_slots: gl.int64, nnz: gl.int64, n: gl.int64, bs: gl.int32, around: gl.int64, window: gl.int32, scale, cap,
    Q_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr, HEADS: gl.constexpr, TOKENS: gl.constexpr,
    N: gl.constexpr, D: gl.constexpr, REST: gl.constexpr, K_PAGE: gl.constexpr, V_PAGE: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, LSE: gl.constexpr, UNIT: gl.constexpr,
    STAGES: gl.constexpr, BLOCK: gl.constexpr, FEW: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = gl.program_id(0) % BLOCKS
    kv_head = block // (BLOCKS * GROUP // Q_HEADS)
    member = block % (BLOCKS * GROUP // Q_HEADS) * HEADS
    by = gl.maximum(scale, 1e-30)
    if not CAP:
        by *= LOG2E

    # Of a thread that multiplies; as much of 504 as is left goes to each that fetches. Found by looking for spills.
    REGISTERS: gl.constexpr = 216 if REST else 224
    dtype: gl.constexpr = q.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    q_tiles = (gl.allocate_shared_memory(dtype, [2, ROWS, D], TILE),)
    k_ring = (gl.allocate_shared_memory(dtype, [STAGES, N, D], TILE),)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, N, D], TILE)
    if REST:
        LAST: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, REST], dtype)
        q_tiles = (q_tiles[0], gl.allocate_shared_memory(dtype, [2, ROWS, REST], LAST))
        k_ring = (k_ring[0], gl.allocate_shared_memory(dtype, [STAGES, N, REST], LAST))
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_rows = gl.allocate_shared_memory(gl.int64, [2 * ROWS], FLAT)
    q_there = gl.allocate_shared_memory(gl.int32, [2 * ROWS], FLAT)
    k_rows = gl.allocate_shared_memory(gl.int64, [STAGES, N], FLAT)
    v_rows = k_rows
    if V_PAGE:
        v_rows = gl.allocate_shared_memory(gl.int64, [STAGES, N], FLAT)
    there = gl.allocate_shared_memory(gl.int32, [STAGES, N], FLAT)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full, k_empty, v_full, v_empty = (_barriers(STAGES), _barriers(STAGES), _barriers(STAGES), _barriers(STAGES))
    barriers = (q_full, k_full, k_empty, v_full, v_empty)

    # More than one turn takes a qo_indptr that does not ascend.
    turn = (gl.program_id(0) // BLOCKS).to(gl.int64)
    more = True
    while more:
        if (bs <= FEW) & (n // TOKENS < 2**31 // FEW - 1):
            every, request, before = _find(qo_indptr, turn, n, bs, TOKENS, FEW, gl.int32)
        else:
            every, request, before = _find(qo_indptr, turn, n, bs, TOKENS, BLOCK, gl.int64)
        mine = every - 1 - turn
        turn += around
        more = turn < every
        if mine >= 0:
            first = entry(qo_indptr, request, n)
            news = entry(qo_indptr, request + 1, n) - first
            begin = entry(kv_indptr, request, nnz)
            length = gl.maximum(entry(kv_indptr, request + 1, nnz) - begin, 0)
            token = ((mine - before) * TOKENS).to(gl.int32)
            lowest = length - news + token
            low = 0
            high = length
            if CAUSAL:
                high = gl.minimum(length, gl.maximum(length - news + gl.minimum(token + TOKENS, news), 0))
            if WINDOW:
                low = gl.maximum(lowest - window, 0) // N * N
            tile = (
                first + token, gl.minimum(news - token, TOKENS), kv_head * GROUP + member,
                gl.minimum(GROUP - member, HEADS),
            )  # fmt: skip
            mbarrier.init(q_full, count=128)
            for i in gl.static_range(STAGES):
                mbarrier.init(k_full.index(i), count=129)
                mbarrier.init(v_full.index(i), count=128)
                mbarrier.init(k_empty.index(i), count=2)
                mbarrier.init(v_empty.index(i), count=2)
            gl.warp_specialize(
                [
                    (_fetch, (
                        q, k_cache + kv_head * kc_head * UNIT, v_cache + kv_head * vc_head * UNIT, kv_indices + begin,
                        tile, low, high, q_tiles, k_ring, v_ring, (q_rows, q_there, k_rows, v_rows, there), barriers,
                        (q_row, q_head, kc_page, kc_token, vc_page, vc_token), num_slots, K_PAGE, V_PAGE, REST, UNIT,
                        HEADS,
                    )),
                    (_multiply, (
                        0, out, lse, tile, lowest, low, high, q_tiles, k_ring, v_ring, there, barriers, out_row,
                        out_head, window, by, cap, Q_HEADS, HEADS, REST, CAUSAL, WINDOW, CAP, LSE, UNIT,
                    )),
                    (_multiply, (
                        1, out, lse, tile, lowest, low, high, q_tiles, k_ring, v_ring, there, barriers, out_row,
                        out_head, window, by, cap, Q_HEADS, HEADS, REST, CAUSAL, WINDOW, CAP, LSE, UNIT,
                    )),
                ],
                [4, 4],
                [REGISTERS, REGISTERS],
            )  # fmt: skip
            if more:
                mbarrier.invalidate(q_full)
                for i in gl.static_range(STAGES):
                    mbarrier.invalidate(k_full.index(i))
                    mbarrier.invalidate(v_full.index(i))
                    mbarrier.invalidate(k_empty.index(i))
                    mbarrier.invalidate(v_empty.index(i))
