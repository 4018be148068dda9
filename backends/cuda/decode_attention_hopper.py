# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""decode_attention over MLA's shared rows on Hopper, in Gluon: rows of 576 are read once, as keys and as values.

Sixteen warps in four roles: one group fetches rows, one multiplies them with 64 query heads and keeps the running
softmax, two multiply its weights with a half of the values each, since 64 x 512 sums do not fit the registers of one.
Shared memory holds the queries and two tiles of 64 keys, so a tile's fetch waits for the sums of the one before the
last: that chain, not bytes nor products, is what the time is made of (docs/performance.md). Which keys are a program's
is as in `decode_attention_kernel`; `decode_merge_kernel` merges the parts.
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

from hal.backends.cuda import _attention, _split
from hal.backends.cuda._attention import LN2, LOG2E
from hal.backends.cuda.extend_attention_hopper import ABSENT, ROWS, _barriers, _softmax
from hal.triton import launch

entry = gluon.jit(_attention.entry.fn)
chunk_of = gluon.jit(_split.chunk_of.fn)
seek = gluon.jit(_split.seek.fn)

HALF = gl.constexpr(256)
"""Elements of a row that one group of warps takes for its values."""
REST = gl.constexpr(64)
"""Elements of a row past the values: the rotated part of the keys."""
DIMS = (2 * HALF.value + REST.value, 2 * HALF.value)
"""The head_dim and v_head_dim that the kernel is for."""


@gluon.jit
def _slots(slots, j, high, N: gl.constexpr, ROW: gl.constexpr):
    """Slots of entries [j, j + N) as the threads of a copy in layout ROW need them; -1 from `high` on."""
    entries = j + gl.arange(0, N, gl.SliceLayout(1, ROW))
    return gl.load(slots + entries, entries < high, other=-1)


@gluon.jit
def _rows(base, slot, num_slots, stride, UNIT: gl.constexpr):
    """Where the rows of slots begin, and whether there is such a one."""
    ok = (slot >= 0) & (slot < num_slots)
    at = gl.where(ok, slot, 0).to(gl.int64) * stride
    return base + (at * UNIT)[:, None], ok[:, None]


@gluon.jit
def _fetch(
    q, cache, slots, head, heads, low, high, q_tiles, k_ring, there, q_full, k_full, k_empty, q_head, stride,
    num_slots, UNIT: gl.constexpr,
):  # fmt: skip
    """The queries, then the rows of entries [low, high), tile by tile; slots are read a tile ahead."""
    STAGES: gl.constexpr = k_ring[0].shape[0]
    N: gl.constexpr = k_ring[0].shape[1]
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    wide = gl.arange(0, HALF, gl.SliceLayout(0, WIDE))[None, :]
    narrow = gl.arange(0, REST, gl.SliceLayout(0, NARROW))[None, :] + 2 * HALF
    each = gl.arange(0, N, EACH)
    slot = gl.load(slots + (low + each), low + each < high, other=-1)
    slot_wide = _slots(slots, low, high, N, WIDE)
    slot_narrow = _slots(slots, low, high, N, NARROW)
    PIECE: gl.constexpr = 16
    for i in gl.static_range(0, ROWS, PIECE):
        r = i + gl.arange(0, PIECE, gl.SliceLayout(1, WIDE))
        at = q + ((head + r) * q_head * UNIT)[:, None] + wide
        mine = (r < heads)[:, None]
        async_copy.async_copy_global_to_shared(q_tiles[0].slice(i, PIECE), at, mine)
        async_copy.async_copy_global_to_shared(q_tiles[1].slice(i, PIECE), at + HALF, mine)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, NARROW))
    at = q + ((head + r) * q_head * UNIT)[:, None] + narrow
    async_copy.async_copy_global_to_shared(q_tiles[2], at, (r < heads)[:, None])
    async_copy.mbarrier_arrive(q_full, increment_count=False)
    stage = 0
    free = 1
    for j in range(low, high, N):
        mbarrier.wait(k_empty.index(stage), free)
        there.index(stage).store(((slot >= 0) & (slot < num_slots)).to(gl.int8))
        rows, ok = _rows(cache, slot_wide, num_slots, stride, UNIT)
        async_copy.async_copy_global_to_shared(k_ring[0].index(stage), rows + wide, ok)
        async_copy.async_copy_global_to_shared(k_ring[1].index(stage), rows + (wide + HALF), ok)
        rows, ok = _rows(cache, slot_narrow, num_slots, stride, UNIT)
        async_copy.async_copy_global_to_shared(k_ring[2].index(stage), rows + narrow, ok)
        async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
        gl.thread_barrier()
        mbarrier.arrive(k_full.index(stage))  # for `there`, which no asynchronous copy writes
        slot = gl.load(slots + (j + N + each), j + N + each < high, other=-1)
        slot_wide = _slots(slots, j + N, high, N, WIDE)
        slot_narrow = _slots(slots, j + N, high, N, NARROW)
        stage += 1
        if stage == STAGES:
            stage = 0
            free ^= 1
    async_copy.wait_group(0)


@gluon.jit
def _logits(q_tiles, k_ring, stage, none):
    """Queries times the rows of a tile, begun."""
    s = warpgroup_mma(q_tiles[0], k_ring[0].index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
    s = warpgroup_mma(q_tiles[1], k_ring[1].index(stage).permute((1, 0)), s, is_async=True)
    return warpgroup_mma(q_tiles[2], k_ring[2].index(stage).permute((1, 0)), s, is_async=True)


@gluon.jit
def _give(s, top, total, there, j, high, by, weights, keeps, w_full, w_empty, free):
    """One step of the running softmax; its weights, and what earlier sums shrink by, go to the groups that sum."""
    nowhere = gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, s.type.layout))
    p, keep, top, total = _softmax(
        s, top, total, there, j, 0, high, high, nowhere, 0, by, 0.0, False, False, False
    )  # fmt: skip
    mbarrier.wait(w_empty, free)
    weights.store(p.to(weights.dtype))
    keeps.store(keep)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(w_full)
    return top, total


@gluon.jit
def _weigh(
    lse, part_lse, line, at, head, heads, alone, low, high, q_tiles, k_ring, there, weights, keeps, shares, q_full,
    k_full, w_full, w_empty, done, by, LSE: gl.constexpr,
):  # fmt: skip
    """Logits and their running softmax, tile by tile."""
    STAGES: gl.constexpr = k_ring[0].shape[0]
    N: gl.constexpr = k_ring[0].shape[1]
    BUFFERS: gl.constexpr = weights.shape[0]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    top = gl.full([ROWS], ABSENT, gl.float32, gl.SliceLayout(1, LOGITS))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LOGITS))
    none = gl.zeros([ROWS, N], gl.float32, LOGITS)
    mbarrier.wait(q_full, 0)
    stage = 0
    phase = 0
    buffer = 0
    free = 1
    for j in range(low, high, N):
        mbarrier.wait(k_full.index(stage), phase)
        fence_async_shared()
        s = warpgroup_mma_wait(0, [_logits(q_tiles, k_ring, stage, none)])
        top, total = _give(
            s, top, total, there.index(stage), j, high, by, weights.index(buffer), keeps.index(buffer),
            w_full.index(buffer), w_empty.index(buffer), free,
        )  # fmt: skip
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
        buffer += 1
        if buffer == BUFFERS:
            buffer = 0
            free ^= 1
    some = total != 0.0
    full = gl.where(some, total, 1.0)
    shares.store(1.0 / full)
    gl.thread_barrier()
    mbarrier.arrive(done)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, LOGITS))
    sums = gl.where(some, top * by + gl.log2(full), ABSENT)
    if alone:
        if LSE:
            gl.store(lse + (at + head + r), sums * LN2, r < heads)
    else:
        gl.store(part_lse + (line + head + r), sums, r < heads)


@gluon.jit
def _sum(
    PART: gl.constexpr, out, part, line, head, heads, alone, low, high, v_ring, weights, keeps, shares, k_full, k_empty,
    w_full, w_empty, done, out_head, UNIT: gl.constexpr,
):  # fmt: skip
    """Weights times elements [256 PART, 256 PART + 256) of the rows."""
    STAGES: gl.constexpr = v_ring.shape[0]
    N: gl.constexpr = v_ring.shape[1]
    BUFFERS: gl.constexpr = weights.shape[0]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 128, 16])
    acc = gl.zeros([ROWS, HALF], gl.float32, SUMS)
    stage = 0
    phase = 0
    buffer = 0
    ready = 0
    for _ in range(low, high, N):
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.wait(w_full.index(buffer), ready)
        fence_async_shared()
        acc = acc * keeps.index(buffer).load(gl.SliceLayout(1, SUMS))[:, None]
        acc = warpgroup_mma(weights.index(buffer), v_ring.index(stage), acc)
        gl.thread_barrier()
        mbarrier.arrive(w_empty.index(buffer))
        mbarrier.arrive(k_empty.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
        buffer += 1
        if buffer == BUFFERS:
            buffer = 0
            ready ^= 1
    mbarrier.wait(done, 0)
    acc = acc * shares.load(gl.SliceLayout(1, SUMS))[:, None]
    r = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
    d = PART * HALF + gl.arange(0, HALF, gl.SliceLayout(0, SUMS))[None, :]
    if alone:
        gl.store(
            out + (((head + r) * out_head)[:, None] * UNIT + d),
            acc.to(out.dtype.element_ty),
            (r < heads)[:, None],
        )
    else:
        gl.store(part + ((line + head + r)[:, None] * (2 * HALF) + d), acc, (r < heads)[:, None])


@launch.jit(
    gluon=True,
    do_not_specialize=(
        "kv_indptr", "kv_indices", "lse", "part", "part_lse", "q_row", "q_head", "kc_page", "kc_token", "kc_head",
        "vc_page", "vc_token", "vc_head", "out_row", "out_head", "num_slots", "nnz", "bs", "programs", "window",
        "scale", "cap",
    ),
)  # fmt: skip
def decode_attention_hopper_kernel(
    q, k_cache, v_cache, kv_indptr, kv_indices, out, lse, part, part_lse, k_scale, v_scale,
    q_row: gl.int64, q_head: gl.int64, kc_page: gl.int64, kc_token: gl.int64, kc_head: gl.int64,
    vc_page: gl.int64, vc_token: gl.int64, vc_head: gl.int64, out_row: gl.int64, out_head: gl.int64,
    num_slots: gl.int64, nnz: gl.int64, bs: gl.int32, programs: gl.int32, window: gl.int32, scale, cap,
    Q_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr, N: gl.constexpr,
    WINDOW: gl.constexpr, LSE: gl.constexpr, UNIT: gl.constexpr, STAGES: gl.constexpr,
    BUFFERS: gl.constexpr, SHORTEST: gl.constexpr, BLOCK: gl.constexpr, FEW: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = gl.program_id(0) % BLOCKS
    c = gl.program_id(0) // BLOCKS
    few = gl.arange(0, FEW, gl.BlockedLayout([FEW // 32], [32], [gl.num_warps()], [0]))
    many = gl.arange(0, BLOCK, gl.BlockedLayout([BLOCK // 32], [32], [gl.num_warps()], [0]))
    if bs <= FEW:
        chunk = chunk_of(kv_indptr, few, nnz, bs, programs, window, SHORTEST, WINDOW)
        request, before = seek(kv_indptr, few, c, nnz, bs, chunk, window, WINDOW)
    else:
        chunk = chunk_of(kv_indptr, many, nnz, bs, programs, window, SHORTEST, WINDOW)
        request, before = seek(kv_indptr, many, c, nnz, bs, chunk, window, WINDOW)

    dtype: gl.constexpr = q.dtype.element_ty
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, HALF], dtype)
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, REST], dtype)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, N], dtype)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = (
        gl.allocate_shared_memory(dtype, [ROWS, HALF], WIDE),
        gl.allocate_shared_memory(dtype, [ROWS, HALF], WIDE),
        gl.allocate_shared_memory(dtype, [ROWS, REST], NARROW),
    )
    k_ring = (
        gl.allocate_shared_memory(dtype, [STAGES, N, HALF], WIDE),
        gl.allocate_shared_memory(dtype, [STAGES, N, HALF], WIDE),
        gl.allocate_shared_memory(dtype, [STAGES, N, REST], NARROW),
    )
    weights = gl.allocate_shared_memory(dtype, [BUFFERS, ROWS, N], WEIGHTS)
    keeps = gl.allocate_shared_memory(gl.float32, [BUFFERS, ROWS], FLAT)
    shares = gl.allocate_shared_memory(gl.float32, [ROWS], FLAT)
    there = gl.allocate_shared_memory(gl.int8, [STAGES, N], FLAT)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full, k_empty = _barriers(STAGES), _barriers(STAGES)
    w_full, w_empty = _barriers(BUFFERS), _barriers(BUFFERS)

    # Of a thread of each group after the first, which has what is left of 512.
    REGISTERS: gl.constexpr = (96, 160, 160)
    if request < bs:
        begin = entry(kv_indptr, request, nnz)
        length = gl.maximum(entry(kv_indptr, request + 1, nnz) - begin, 0)
        parts = gl.maximum(length - 1, 0) // chunk + 1
        own = (gl.maximum(length - 1, 0) // parts + N) // N * N
        low = (c - before) * own
        high = gl.minimum(low + own, length)
        kv_head = (block // (BLOCKS * GROUP // Q_HEADS)).to(gl.int64)
        member = block % (BLOCKS * GROUP // Q_HEADS) * ROWS
        heads = gl.minimum(GROUP - member, ROWS)
        head = kv_head * GROUP + member
        row = request.to(gl.int64)
        line = c.to(gl.int64) * Q_HEADS
        alone = parts == 1
        by = gl.maximum(scale, 1e-30) * LOG2E
        mbarrier.init(q_full, count=128)
        mbarrier.init(done, count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_full.index(i), count=129)
            mbarrier.init(k_empty.index(i), count=2)
        for i in gl.static_range(BUFFERS):
            mbarrier.init(w_full.index(i), count=1)
            mbarrier.init(w_empty.index(i), count=2)
        gl.warp_specialize(
            [
                (_fetch, (
                    q + row * q_row * UNIT, k_cache + kv_head * kc_head * UNIT, kv_indices + begin, head, heads, low,
                    high, q_tiles, k_ring, there, q_full, k_full, k_empty, q_head, kc_page, num_slots, UNIT,
                )),
                (_weigh, (
                    lse, part_lse, line, row * Q_HEADS, head, heads, alone, low, high, q_tiles, k_ring, there, weights,
                    keeps, shares, q_full, k_full, w_full, w_empty, done, by, LSE,
                )),
                (_sum, (
                    0, out + row * out_row * UNIT, part, line, head, heads, alone, low, high, k_ring[0], weights, keeps,
                    shares, k_full, k_empty, w_full, w_empty, done, out_head, UNIT,
                )),
                (_sum, (
                    1, out + row * out_row * UNIT, part, line, head, heads, alone, low, high, k_ring[1], weights, keeps,
                    shares, k_full, k_empty, w_full, w_empty, done, out_head, UNIT,
                )),
            ],
            [4, 4, 4],
            REGISTERS,
        )  # fmt: skip
