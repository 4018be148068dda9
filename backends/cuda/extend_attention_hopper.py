# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""extend_attention on Hopper, in Gluon: four warps fetch keys and values, and two times four multiply.

In Triton's own pipeline eight warps do everything in turn. Here the rows of a paged cache are fetched by warps that do
nothing else, into rings of tiles in shared memory, and the two groups of 64 rows drift apart, so that exponentials of
one run under products of the other. Within a group, the next tile's logits are asked for before this tile's product
with v. Which tile is a program's, and what its rows are, is as in `extend_attention_kernel`. How rows of 16 bits and of
fp8 are fetched: `hal/backends/cuda/_fetch.py`.

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
from hal.backends.cuda._fetch import ROWS, fetch, fetch_fp8, query, scaled
from hal.triton import launch

SHIFT = gl.constexpr(15)
"""Weights in fp16 are up to 2^SHIFT: what is above 2^-29 of the largest is as exact as fp16 can have it."""
L2 = gl.constexpr(32 * 2**20)
"""Bytes of keys and values that programs may read at a time: of the 50 MB on the chip, most."""
ABSENT = gl.constexpr(float("-inf"))

entry = gluon.jit(_attention.entry.fn)
factor = gluon.jit(_attention.factor.fn)
lengths = gluon.jit(_attention.lengths.fn)
positive = gluon.jit(_attention.positive.fn)
tanh = gluon.jit(_attention.tanh.fn)
within = gluon.jit(_attention.within.fn)
without = gluon.jit(_attention.without.fn)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _starts(indptr, i, there, size):
    """(where each request starts, how many it has), int32."""
    start = within(gl.load(indptr + i, there, other=0), size)
    return start, within(gl.load(indptr + i + 1, there, other=0), size) - start


@gluon.jit
def _find_at_once(qo_indptr, kv_indptr, turn, n, nnz, bs, TOKENS: gl.constexpr, BLOCK: gl.constexpr):
    """As `_find`, of no more than BLOCK requests: all that is asked of them is asked together, and counted in int32."""
    i = gl.arange(0, BLOCK, gl.BlockedLayout([BLOCK // 32], [32], [gl.num_warps()], [0]))
    there = i < bs
    first, news = _starts(qo_indptr, i, there, n)
    begin, length = _starts(kv_indptr, i, there, nnz)
    many = (gl.maximum(news, 0) + (TOKENS - 1)) // TOKENS
    upto = gl.associative_scan(many, 0, _add)
    every = gl.sum(many)
    c = every - 1 - turn
    mine = (upto > c) & (upto - many <= c)
    before = gl.sum(gl.where(mine, upto - many, 0))
    first = gl.sum(gl.where(mine, first, 0))
    news = gl.sum(gl.where(mine, news, 0))
    begin = gl.sum(gl.where(mine, begin, 0))
    length = gl.sum(gl.where(mine, length, 0))
    return every.to(gl.int64), (c - before).to(gl.int64), first, news, begin, length


@gluon.jit
def _tiles(qo_indptr, b, n, bs, TOKENS: gl.constexpr, BLOCK: gl.constexpr):
    """(how many tiles, whether there is such a request) of BLOCK requests from b on."""
    i = b + gl.arange(0, BLOCK, gl.BlockedLayout([BLOCK // 32], [32], [gl.num_warps()], [0]))
    return ((lengths(qo_indptr, i, i < bs, n) + (TOKENS - 1)) // TOKENS).to(gl.int64), i < bs


@gluon.jit
def _find(qo_indptr, kv_indptr, turn, n, nnz, bs, TOKENS: gl.constexpr, BLOCK: gl.constexpr):
    """Of the tile that is `turn` from the last: (tiles in all, which of its request's it is, where the request's tokens
    start, how many, where its entries start, how many)."""
    zero = gl.to_tensor(0).to(gl.int64)
    every, request, before, base = zero, zero, zero, zero
    for b in range(0, bs, BLOCK):
        many, there = _tiles(qo_indptr, b, n, bs, TOKENS, BLOCK)
        every += gl.sum(many)
    c = every - 1 - turn
    for b in range(0, bs, BLOCK):
        many, there = _tiles(qo_indptr, b, n, bs, TOKENS, BLOCK)
        mine = (base + gl.associative_scan(many, 0, _add) <= c) & there
        request += gl.sum(mine.to(gl.int64))
        before += gl.sum(gl.where(mine, many, 0))
        base += gl.sum(many)
    first = entry(qo_indptr, request, n)
    begin = entry(kv_indptr, request, nnz)
    news = entry(qo_indptr, request + 1, n) - first
    return every, c - before, first, news, begin, entry(kv_indptr, request + 1, nnz) - begin


@gluon.jit
def _by_row(x, DIFFER: gl.constexpr):
    """What is one number for all rows, or one for each."""
    if DIFFER:
        x = x[:, None]
    return x


@gluon.jit
def _sums(p):
    """Of each row, those of the four threads that share it."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _edge(there, j, inner, full, WINDOW: gl.constexpr):
    """Whether some row does not see some key of a tile."""
    N: gl.constexpr = there.shape[0]
    EACH: gl.constexpr = gl.BlockedLayout([N // 32], [32], [gl.num_warps()], [0])
    edge = (j + N > full) | (gl.min(there.load(EACH), 0) == 0)
    if WINDOW:
        edge = edge | (j < inner)
    return edge


@gluon.jit
def _softmax(
    s, top, total, there, edge, j, high, position, window, by, cap, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    CAP: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """One step of the running softmax, over a tile of products; `there` says which of its keys are."""
    N: gl.constexpr = s.shape[1]
    KEYS: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    unit = by
    if CAP:
        s = cap * tanh(s * _by_row(by / cap, FP8))
        unit = LOG2E
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
    shifted = base
    if FP8:
        shifted = base - SHIFT
    p = gl.exp2(s * _by_row(unit, FP8 and not CAP) - shifted[:, None])
    keep = gl.exp2(top * unit - base)
    sums = _sums(p)
    total = total * gl.convert_layout(keep, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    return p, keep, new, total


@gluon.constexpr_function
def _threads(D, REST):
    """How many of a group give a tile back: each for itself, as one for all would wait for all. Heads above 128 lack
    the registers, and heads of 64 took 4 % more by it."""
    return 128 if D == 128 and not REST else 1


@gluon.jit
def _free(empty, THREADS: gl.constexpr):
    """A tile of keys or values is given back, by so many threads of a group."""
    if THREADS > 1:
        async_copy.mbarrier_arrive(empty, increment_count=False)
    else:
        mbarrier.arrive(empty)


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
    PART: gl.constexpr, q, out, lse, tile, lowest, low, high, q_tiles, k_ring, v_ring, there, barriers, q_row, q_head,
    out_row, out_head, window, by, sign, cap, v_factor, Q_HEADS: gl.constexpr, HEADS: gl.constexpr, REST: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, LSE: gl.constexpr, UNIT: gl.constexpr,
    FP8: gl.constexpr,
):  # fmt: skip
    """Rows [64 PART, 64 PART + 64) of a tile whose first token has position `lowest`."""
    q_full, k_full, k_empty, v_full, v_empty = barriers
    STAGES: gl.constexpr = v_ring.shape[0]
    N: gl.constexpr = v_ring.shape[1]
    D: gl.constexpr = v_ring.shape[2]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    THREADS: gl.constexpr = _threads(D, REST)
    dtype: gl.constexpr = v_ring.dtype
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
    acc = gl.zeros([ROWS, D], gl.float32, SUMS)
    none = gl.zeros([ROWS, N], gl.float32, LOGITS)
    total = _sums(none)
    if FP8:
        e = scaled(q, q_tiles[0].index(PART), PART, tile, q_row, q_head, sign, UNIT, HEADS)
        fence_async_shared()
        by = positive(without(by, gl.convert_layout(e, gl.SliceLayout(1, LOGITS))))
        if not CAP:
            by = by * LOG2E
    else:
        mbarrier.wait(q_full, 0)
    if high > low:
        stage = 0
        phase = 0
        # `wgmma` sees what was written only past a fence: the writers' (fp8), or one here, as copies end by themselves.
        mbarrier.wait(k_full.index(0), 0)
        if not FP8:
            fence_async_shared()
        s = warpgroup_mma_wait(0, [_logits(PART, 0, q_tiles, k_ring, none, REST)])
        p, keep, top, total = _softmax(
            s, top, total, there.index(0), _edge(there.index(0), low, inner, full, WINDOW), low, high, position, window,
            by, cap, CAUSAL, WINDOW, CAP, FP8,
        )  # fmt: skip
        _free(k_empty.index(0), THREADS)
        weights = gl.convert_layout(p.to(dtype), WEIGHTS)
        for j in range(low + N, high, N):
            before = stage
            before_phase = phase
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
            mbarrier.wait(k_full.index(stage), phase)
            if not FP8:
                fence_async_shared()
            # Asked here, it is known when the products are.
            edge = _edge(there.index(stage), j, inner, full, WINDOW)
            s_begun = _logits(PART, stage, q_tiles, k_ring, none, REST)
            mbarrier.wait(v_full.index(before), before_phase)
            if not FP8:
                fence_async_shared()
            acc_begun = warpgroup_mma(weights, v_ring.index(before), acc, is_async=True)
            s = warpgroup_mma_wait(1, [s_begun])
            p, keep, top, total = _softmax(
                s, top, total, there.index(stage), edge, j, high, position, window, by, cap, CAUSAL, WINDOW, CAP, FP8
            )
            _free(k_empty.index(stage), THREADS)
            acc = warpgroup_mma_wait(0, [acc_begun])
            _free(v_empty.index(before), THREADS)
            acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, SUMS))[:, None]
            weights = gl.convert_layout(p.to(dtype), WEIGHTS)
        mbarrier.wait(v_full.index(stage), phase)
        if not FP8:
            fence_async_shared()
        acc = warpgroup_mma(weights, v_ring.index(stage), acc)

    # By way of the queries' tile, which nobody reads any more, outputs leave in rows of whole sectors.
    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, LOGITS))
    some = total != 0.0
    share = v_factor / gl.where(some, total, 1.0)
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    to: gl.constexpr = out.dtype.element_ty
    mine = q_tiles[0].index(PART)
    mine = mine._reinterpret(to, [ROWS, D], mine.layout)
    mine.store((acc * gl.convert_layout(share, gl.SliceLayout(1, SUMS))[:, None]).to(to))
    rows = PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, ROW))
    at, head, asked = query(rows, tile, HEADS)
    d = gl.arange(0, D, gl.SliceLayout(0, ROW))[None, :]
    gl.store(out + ((at * out_row + head * out_head)[:, None] * UNIT + d), mine.load(ROW), asked[:, None])
    if LSE:
        unit = by
        if CAP:
            unit = LOG2E
        at, head, asked = query(r, tile, HEADS)
        if FP8:
            total *= 2.0**-SHIFT
        sums = top * unit + gl.log2(gl.where(some, total, 1.0))
        sums = gl.where(some, sums, ABSENT)
        gl.store(lse + (at * Q_HEADS + head), sums * LN2, asked)


@gluon.jit
def _barriers(MANY: gl.constexpr):
    return gl.allocate_shared_memory(gl.int64, [MANY, 1], mbarrier.MBarrierLayout())


@launch.jit(
    gluon=True,
    do_not_specialize=(
        "qo_indptr", "kv_indptr", "kv_indices", "lse", "k_scale", "v_scale", "q_row", "q_head", "kc_page", "kc_token",
        "kc_head", "vc_page", "vc_token", "vc_head", "out_row", "out_head", "num_slots", "nnz", "n", "bs", "around",
        "window", "scale", "cap",
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
    STAGES: gl.constexpr, BLOCK: gl.constexpr, FEW: gl.constexpr, PDL: gl.constexpr, K_KIND: gl.constexpr,
    V_KIND: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    FP8: gl.constexpr = k_cache.dtype.element_ty != q.dtype.element_ty
    by = scale * factor(k_scale, K_KIND)
    v_factor = factor(v_scale, V_KIND)
    sign = 1.0
    if FP8:
        # The greatest product is the greatest logit only by a factor above 0.
        sign = gl.where(by < 0, -1.0, 1.0)
        by = gl.abs(by)
    else:
        by = positive(by)
        if not CAP:
            by *= LOG2E

    # Of a thread that multiplies; as much of 504 as is left goes to each that fetches. Found by looking for spills.
    REGISTERS: gl.constexpr = 208 if D == 64 else 192 if FP8 else 216 if REST else 224
    dtype: gl.constexpr = gl.float16 if FP8 else q.dtype.element_ty
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
    k_rows = gl.allocate_shared_memory(gl.int64, [STAGES, N], FLAT)
    v_rows = k_rows
    if V_PAGE:
        v_rows = gl.allocate_shared_memory(gl.int64, [STAGES, N], FLAT)
    there = gl.allocate_shared_memory(gl.int32, [STAGES, N], FLAT)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full, k_empty, v_full, v_empty = (_barriers(STAGES), _barriers(STAGES), _barriers(STAGES), _barriers(STAGES))
    barriers = (q_full, k_full, k_empty, v_full, v_empty)

    # More than one round takes a qo_indptr that does not ascend.
    rounds = 0
    while rounds >= 0:
        block = gl.program_id(0) % BLOCKS
        turn = gl.program_id(0) // BLOCKS
        if not FP8:  # which lacks the registers
            KV_HEADS: gl.constexpr = Q_HEADS // GROUP
            ROW: gl.constexpr = (2 * D + REST) * k_cache.dtype.element_ty.primitive_bitwidth // 8
            if nnz * (KV_HEADS * ROW) > bs.to(gl.int64) * L2:
                # So many key/value heads at a time as the L2 holds the keys of, of a request of the mean length.
                fit = gl.maximum(bs.to(gl.float32) * (L2 // ROW) / nnz.to(gl.float32), 1).to(gl.int32)
                most = gl.cdiv(KV_HEADS, gl.cdiv(KV_HEADS, fit)) * (BLOCKS // KV_HEADS)
                many = around.to(gl.int32) * most
                done = gl.program_id(0) // many * most
                among = gl.minimum(most, BLOCKS - done)
                block = done + gl.program_id(0) % many % among
                turn = gl.program_id(0) % many // among
        kv_head = block // (BLOCKS * GROUP // Q_HEADS)
        member = block % (BLOCKS * GROUP // Q_HEADS) * HEADS
        turn = turn.to(gl.int64) + rounds * around
        if (bs <= BLOCK) & (n // TOKENS < 2**31 // BLOCK - 1):  # so that int32 holds their tiles
            if bs <= FEW:
                every, nth, first, news, begin, length = _find_at_once(
                    qo_indptr, kv_indptr, turn.to(gl.int32), n, nnz, bs, TOKENS, FEW
                )
            else:
                every, nth, first, news, begin, length = _find_at_once(
                    qo_indptr, kv_indptr, turn.to(gl.int32), n, nnz, bs, TOKENS, BLOCK
                )
        else:
            every, nth, first, news, begin, length = _find(qo_indptr, kv_indptr, turn, n, nnz, bs, TOKENS, BLOCK)
        mine = turn < every
        rounds = gl.where(turn + around < every, rounds + 1, -1)
        if mine:
            length = gl.maximum(length, 0)
            token = (nth * TOKENS).to(gl.int32)
            lowest = length - news + token
            low = 0
            high = length
            if CAUSAL:
                high = gl.minimum(length, gl.maximum(length - news + gl.minimum(token + TOKENS, news), 0))
            if WINDOW:
                low = gl.maximum(lowest - window, 0) // N * N
            tile = (
                first + token,
                gl.minimum(news - token, TOKENS),
                kv_head * GROUP + member,
                gl.minimum(GROUP - member, HEADS),
            )
            mbarrier.init(q_full, count=128)
            for i in gl.static_range(STAGES):
                mbarrier.init(k_full.index(i), count=1 if FP8 else 129)
                mbarrier.init(v_full.index(i), count=1 if FP8 else 128)
                mbarrier.init(k_empty.index(i), count=2 * _threads(D, REST))
                mbarrier.init(v_empty.index(i), count=2 * _threads(D, REST))
            gl.warp_specialize(
                [
                    (fetch_fp8 if FP8 else fetch, (
                        q, k_cache + kv_head * kc_head * UNIT, v_cache + kv_head * vc_head * UNIT, kv_indices + begin,
                        tile, low, high, q_tiles, k_ring, v_ring, (q_rows, k_rows, v_rows, there), barriers,
                        (q_row, q_head, kc_page, kc_token, vc_page, vc_token), num_slots, K_PAGE, V_PAGE, REST, UNIT,
                        HEADS,
                    )),
                    (_multiply, (
                        0, q, out, lse, tile, lowest, low, high, q_tiles, k_ring, v_ring, there, barriers, q_row,
                        q_head, out_row, out_head, window, by, sign, cap, v_factor, Q_HEADS, HEADS, REST, CAUSAL,
                        WINDOW, CAP, LSE, UNIT, FP8,
                    )),
                    (_multiply, (
                        1, q, out, lse, tile, lowest, low, high, q_tiles, k_ring, v_ring, there, barriers, q_row,
                        q_head, out_row, out_head, window, by, sign, cap, v_factor, Q_HEADS, HEADS, REST, CAUSAL,
                        WINDOW, CAP, LSE, UNIT, FP8,
                    )),
                ],
                [4, 4],
                [REGISTERS, REGISTERS],
            )  # fmt: skip
            if rounds >= 0:
                mbarrier.invalidate(q_full)
                for i in gl.static_range(STAGES):
                    mbarrier.invalidate(k_full.index(i))
                    mbarrier.invalidate(v_full.index(i))
                    mbarrier.invalidate(k_empty.index(i))
                    mbarrier.invalidate(v_empty.index(i))
