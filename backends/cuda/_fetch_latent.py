# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""MLA's rows of fp8 on their way to `decode_attention_hopper_kernel`: fetched through registers and widened to fp16.

The mechanism is `fetch_fp8`'s; the order in which halves of a tile are fetched and handed over is that kernel's. The
queries are made fp16 by the warps that multiply, each group half of them, while the first rows are on their way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from hal.backends.cuda import _tiles
from hal.backends.cuda._fetch import BOX, WORD, _put, exponent, magnitude, power
from hal.backends.cuda._fetch_rows import HALF, KEYS

row_at = gluon.jit(_tiles.row_at.fn)

MANY = gl.constexpr(KEYS.value // 2)
"""Rows that are loaded, widened and stored together."""


@gluon.constexpr_function
def _lanes(W):
    """[rows, words]: 64 bytes of a row by four threads, 16 each, and then those 64 bytes further. So all that a thread
    loads of a tile is of two rows, at offsets that are known; and of eight threads that store together, four have every
    other 16 bytes of 128 in one row, and four those between in the next: no two the same banks."""
    cols = [[0, 1 << i] for i in range(W.bit_length() - 1)]
    rows = [[1 << i, 0] for i in range(5)]
    return gl.DistributedLinearLayout(cols[:2] + cols[4:], cols[2:4] + rows[:3], rows[3:], [], [MANY.value, W])


@gluon.jit
def _slots(slots, j, high):
    """Those of MANY entries from j on; -1 from `high` on."""
    n = gl.arange(0, MANY, gl.SliceLayout(1, _lanes(HALF // WORD)))
    return gl.load(slots + j + n, n < high - j, other=-1)


@gluon.jit
def _there(slot, num_slots):
    """Slots that there are, as int32; -1 for others."""
    if slot.dtype == gl.int32:
        ok = slot.to(gl.uint32, bitcast=True) < num_slots.to(gl.uint32)
    else:
        ok = slot.to(gl.uint64, bitcast=True) < num_slots.to(gl.uint64)
    return gl.where(ok, slot, -1).to(gl.int32)


@gluon.jit
def _load(base, slot, stride, UNIT: gl.constexpr, W: gl.constexpr):
    """W words of rows, which begin `stride` UNITs apart; zeros where there is none."""
    LAYOUT: gl.constexpr = _lanes(W)
    slot = gl.convert_layout(slot, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    row = slot.to(gl.int64) * stride * (UNIT // WORD)
    d = gl.arange(0, W, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.load(base + (row[:, None] + d), (slot >= 0)[:, None], other=0)


@gluon.jit
def fetch_latent(
    q, cache, map, slots, heads, low, high, tiles, q_boxes, k, all, there, rows, q_full, full, empty, q_row,
    q_head, stride, num_slots, UNIT: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, MAP: gl.constexpr,
):  # fmt: skip
    """The rows of entries [low, high): of each tile the half that its own group sums, then the other half and the rest.

    By 32 rows at a time, two or three of which are under way, from tile to tile; slots are read a tile ahead. What is
    stored here is seen by `wgmma` past the fences of those who wait for it.
    """
    W: gl.constexpr = HALF // WORD
    REST: gl.constexpr = BOX // WORD
    KIND: gl.constexpr = cache.dtype.element_ty
    words = cache.to(gl.pointer_type(gl.int32), bitcast=True)
    num_slots = gl.minimum(num_slots, 2**31 - 1).to(gl.int32)
    upper = _there(_slots(slots, low, high), num_slots)
    lower = _there(_slots(slots, low + MANY, high), num_slots)
    a = _load(words, upper, stride, UNIT, W)
    b = _load(words, lower, stride, UNIT, W)
    free = 1
    stop = gl.maximum(high, low + 1)
    for j in range(low, stop, 2 * KEYS):
        for w in gl.static_range(2):
            if j + w * KEYS < stop:
                own, other, rest = k[w].index(w), k[1 - w].index(w), k[2].index(w)
                # The other half of this tile is the own half of the next.
                half = words + (1 - w) * W
                next_upper = _slots(slots, j + (w + 1) * KEYS, high)
                next_lower = _slots(slots, j + (w + 1) * KEYS + MANY, high)
                c = _load(half, upper, stride, UNIT, W)
                c_rest = _load(words + 2 * W, upper, stride, UNIT, REST)
                mbarrier.wait(empty.index(2 * w), free)
                there.index(w).slice(0, MANY).store((upper >= 0).to(gl.int8))
                there.index(w).slice(MANY, MANY).store((lower >= 0).to(gl.int8))
                _put(own, 0, a, KIND)
                d = _load(half, lower, stride, UNIT, W)
                d_rest = _load(words + 2 * W, lower, stride, UNIT, REST)
                upper = _there(next_upper, num_slots)
                lower = _there(next_lower, num_slots)
                _put(own, MANY, b, KIND)
                mbarrier.arrive(full.index(2 * w))
                a = _load(half, upper, stride, UNIT, W)
                mbarrier.wait(empty.index(2 * w + 1), free)
                _put(other, 0, c, KIND)
                b = _load(half, lower, stride, UNIT, W)
                _put(rest, 0, c_rest, KIND)
                _put(other, MANY, d, KIND)
                _put(rest, MANY, d_rest, KIND)
                mbarrier.arrive(full.index(2 * w + 1))
        free ^= 1


@gluon.jit
def _queries(
    q, first, start, heads, q_row, q_head, N: gl.constexpr, D: gl.constexpr, UNIT: gl.constexpr, GROUP: gl.constexpr,
    TOKENS: gl.constexpr,
):  # fmt: skip
    """N rows from row `first` of a tile on: D elements from `start` on."""
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    r = first + gl.arange(0, N, gl.SliceLayout(1, ROW))
    d = start + gl.arange(0, D, gl.SliceLayout(0, ROW))[None, :]
    at = q + ((row_at(r, q_row, q_head, GROUP, TOKENS) * UNIT)[:, None] + d)
    return gl.load(at, (r < heads)[:, None], other=0.0)


@gluon.jit
def queries(
    q, exponents, FIRST: gl.constexpr, heads, q_row, q_head, sign, UNIT: gl.constexpr, GROUP: gl.constexpr,
    TOKENS: gl.constexpr,
):  # fmt: skip
    """(two halves and the rest of rows from FIRST on of the queries, as many as `exponents` has places, what they are
    multiplied by in fp16: `sign` and a power of two each, whose `exponent` is left in `exponents`)."""
    MANY: gl.constexpr = exponents.shape[0]
    x2 = _queries(q, FIRST, 2 * HALF, heads, q_row, q_head, MANY, BOX, UNIT, GROUP, TOKENS)
    x0 = _queries(q, FIRST, 0, heads, q_row, q_head, MANY, HALF, UNIT, GROUP, TOKENS)
    x1 = _queries(q, FIRST, HALF, heads, q_row, q_head, MANY, HALF, UNIT, GROUP, TOKENS)
    e = gl.full([MANY], 127, gl.int32, gl.SliceLayout(1, x0.type.layout))
    if q.dtype.element_ty != gl.float16:
        most = gl.maximum(gl.max(magnitude(x0), 1), gl.max(magnitude(x1), 1))
        rest = gl.convert_layout(gl.max(magnitude(x2), 1), most.type.layout)
        e = exponent(gl.maximum(most, rest))
    exponents.store(e)
    return x0, x1, x2, power(e) * sign


@gluon.jit
def as_fp16(x, by):
    """Elements times a number a row."""
    by = gl.convert_layout(by, gl.SliceLayout(1, x.type.layout))
    return (x.to(gl.float32) * by[:, None]).to(gl.float16)


@gluon.jit
def scale_queries(
    q, q_tiles, exponents, FIRST: gl.constexpr, heads, q_row, q_head, sign, UNIT: gl.constexpr,
    GROUP: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """`queries` put into the three tiles."""
    MANY: gl.constexpr = exponents.shape[0]
    x0, x1, x2, by = queries(q, exponents, FIRST, heads, q_row, q_head, sign, UNIT, GROUP, TOKENS)
    q_tiles[0].index(0).slice(FIRST, MANY).store(as_fp16(x0, by))
    q_tiles[1].index(0).slice(FIRST, MANY).store(as_fp16(x1, by))
    q_tiles[2].index(0).slice(FIRST, MANY).store(as_fp16(x2, by))
    fence_async_shared()
