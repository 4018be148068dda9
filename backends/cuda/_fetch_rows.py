# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, attr-defined"
"""MLA's rows of 16 bits, and queries, on their way to `decode_attention_hopper_kernel`.

A tile's 64 rows come by the copy engine where it may be asked (`MAP`) and their slots follow each other, as in caches
by pages; others are copied one by one. Halves of a tile are asked for and handed over apart, first the one that its own
group sums. Rows of fp8: `_fetch_latent.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from hal.backends.cuda import _tiles
from hal.backends.cuda.extend_attention_hopper import ROWS, _zero

row_at = gluon.jit(_tiles.row_at.fn)

HALF = gl.constexpr(256)
"""Elements of a row that are fetched, multiplied and freed together: the values that a group sums."""
KEYS = gl.constexpr(64)
"""Keys of a tile."""
BOX = gl.constexpr(64)
"""Columns of a row that the copy engine puts side by side: 128 bytes."""


@gluon.jit
def _queries(to, q, heads, q_row, q_head, zero, UNIT: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr):
    """Queries into boxes, one after another, for want of registers; where rows begin is not kept for the next request
    either."""
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    r = zero + gl.arange(0, ROWS, gl.SliceLayout(1, ROW))
    d = gl.arange(0, BOX, gl.SliceLayout(0, ROW))[None, :]
    at = (row_at(r, q_row, q_head, GROUP, TOKENS) * UNIT)[:, None] + d
    for i in range(to.shape[0]):
        async_copy.async_copy_global_to_shared(to.index(i), q + i * BOX + at, (r < heads)[:, None])


@gluon.constexpr_function
def _rows(D):
    """[KEYS, D]: 16 bytes a thread. What a thread has is of few rows in eight, whose 16 bytes lie apart by the same
    swizzle, so that few registers say where."""
    lanes = [[0, d] for d in (8, 16, 32, 64, 128) if d < D]
    rows = [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [32, 0]]
    if len(lanes) == 5:
        return gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], rows[0], *rows[3:]], lanes, rows[1:3], [], [KEYS.value, D]
        )
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *rows[4:]], [*lanes, *rows[:2]], rows[2:4], [], [KEYS.value, D]
    )


@gluon.jit
def _copy(to, base, rows, whole, UNIT: gl.constexpr):
    """Rows, which begin at so many UNITs, into a tile; zeros for those that begin below 0, if not `whole`."""
    D: gl.constexpr = to.shape[1]
    ROW: gl.constexpr = _rows(D)
    d = base + gl.arange(0, D, gl.SliceLayout(0, ROW))
    at = (rows.load(gl.SliceLayout(1, ROW)) * UNIT)[:, None]
    if whole:
        async_copy.async_copy_global_to_shared(to, d[None, :] + at)
    else:
        async_copy.async_copy_global_to_shared(to, d[None, :] + gl.maximum(at, 0), at >= 0)


@gluon.jit
def _by_rows(
    W: gl.constexpr, cache, slot, ok, k, there, rows, full, empty, free, stride, UNIT: gl.constexpr, MAP: gl.constexpr
):
    """The rows of slots into buffer W: first the half that its own group sums, then the other and the rest."""
    whole = gl.min(ok.to(gl.int32), 0) != 0
    rows.index(W).store(gl.where(ok, slot, -1).to(gl.int64) * stride)
    gl.thread_barrier()
    for i in gl.static_range(2):
        mbarrier.wait(empty.index(2 * W + i), free)
        if i == 0:
            there.index(W).store(ok.to(gl.int8))
        _copy(k[(W + i) % 2].index(W), cache + (W + i) % 2 * HALF, rows.index(W), whole, UNIT)
        if i == 1:
            _copy(k[2].index(W), cache + 2 * HALF, rows.index(W), whole, UNIT)
        async_copy.mbarrier_arrive(full.index(2 * W + i), increment_count=False)
        if MAP:
            mbarrier.arrive(full.index(2 * W + i))  # in place of who asks for boxes


@gluon.jit
def _by_boxes(W: gl.constexpr, map, begin, ok, tiles, there, full, empty, free):
    """The same of slots that follow each other from `begin` on: boxes of rows, by the copy engine."""
    EACH: gl.constexpr = HALF // BOX
    for i in gl.static_range(2):
        mbarrier.wait(empty.index(2 * W + i), free)
        if i == 0:
            there.index(W).store(ok.to(gl.int8))
        mbarrier.expect(full.index(2 * W + i), KEYS * (HALF + i * BOX) * 2)
        for c in gl.static_range(EACH):
            to = tiles.index((2 * ((W + i) % 2) + W) * EACH + c)
            at = [begin, (W + i) % 2 * HALF + c * BOX]
            tma.async_copy_global_to_shared(map, at, full.index(2 * W + i), to)
        if i == 1:
            tma.async_copy_global_to_shared(map, [begin, 2 * HALF], full.index(2 * W + i), tiles.index(4 * EACH + W))
        async_copy.mbarrier_arrive(full.index(2 * W + i), increment_count=False)  # as those do who copy rows


@gluon.jit
def _fetch_tile(
    W: gl.constexpr, cache, map, begin, slot, k, tiles, there, rows, full, empty, free, stride, num_slots,
    UNIT: gl.constexpr, MAP: gl.constexpr,
):  # fmt: skip
    """The rows of slots, the first of which is `begin`, into buffer W."""
    ok = (slot >= 0) & (slot < num_slots)
    if MAP:
        n = gl.arange(0, KEYS, slot.type.layout)
        if gl.min((ok & (slot - n == begin)).to(gl.int32), 0) != 0:
            _by_boxes(W, map, begin.to(gl.int32), ok, tiles, there, full, empty, free)
        else:
            _by_rows(W, cache, slot, ok, k, there, rows, full, empty, free, stride, UNIT, MAP)
    else:
        _by_rows(W, cache, slot, ok, k, there, rows, full, empty, free, stride, UNIT, MAP)
    gl.thread_barrier()
    mbarrier.arrive(full.index(2 * W + 1))  # for `there`, which no asynchronous copy writes


@gluon.jit
def _slots_of(slots, j, high, MAP: gl.constexpr):
    """(slots of a tile from entry j on, -1 from `high` on; the first of them, of which only boxes are in need)."""
    # With a map each warp looks at all slots of a tile, so that none waits for another.
    SLOTS: gl.constexpr = gl.BlockedLayout([KEYS // 32 if MAP else 1], [32], [gl.num_warps()], [0])
    slots += j
    n = gl.arange(0, KEYS, SLOTS)
    slot = gl.load(slots + n, n < high - j, other=-1)
    first = j
    if MAP:
        first = gl.load(slots, j < high, other=-1)
    return slot, first


@gluon.jit
def fetch_rows(
    q, cache, map, slots, heads, low, high, tiles, q_boxes, k, all, there, rows, q_full, full, empty, q_row,
    q_head, stride, num_slots, UNIT: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, MAP: gl.constexpr,
):  # fmt: skip
    """The queries, then the rows of entries [low, high), tile by tile; slots are read two tiles ahead."""
    slot, first = _slots_of(slots, low, high, MAP)
    # Before the queries, or its slots would be there only after all of them, and with them the first tile's.
    coming, next = _slots_of(slots, low + KEYS, high, MAP)
    _queries(q_boxes, q, heads, q_row, q_head, _zero(low), UNIT, GROUP, TOKENS)
    async_copy.mbarrier_arrive(q_full, increment_count=False)
    free = 1
    stop = gl.maximum(high, low + 1)
    for j in range(low, stop, 2 * KEYS):
        for w in gl.static_range(2):
            if j + w * KEYS < stop:
                now, begin = slot, first
                slot, first = coming, next
                coming, next = _slots_of(slots, j + (w + 2) * KEYS, high, MAP)
                _fetch_tile(
                    w, cache, map, begin, now, k, all, there, rows, full, empty, free, stride, num_slots, UNIT, MAP
                )
        free ^= 1
    async_copy.wait_group(0)
