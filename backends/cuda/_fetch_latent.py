# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""MLA's rows of fp8 on their way to `decode_attention_hopper_kernel`: fetched through registers and widened to fp16.

The mechanism is `fetch_fp8`'s; the order in which halves of a tile are fetched and handed over is that kernel's. The
queries are made fp16 by the warps that multiply, each group half of them, while the first rows are on their way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from hal.backends.cuda import _tiles
from hal.backends.cuda._fetch import BOX, WORD, _half, _put, exponent, magnitude, power
from hal.backends.cuda._fetch_rows import HALF

row_at = gluon.jit(_tiles.row_at.fn)


@gluon.jit
def _begin(slot, num_slots, stride):
    """(where the rows of slots begin, -1 where there is none; which there are)."""
    ok = (slot >= 0) & (slot < num_slots)
    return gl.where(ok, gl.where(ok, slot, 0).to(gl.int64) * stride, -1), ok


@gluon.jit
def fetch_latent(
    q, cache, map, slots, heads, low, high, tiles, q_tiles, k, all, there, rows, q_full, full, empty, q_row,
    q_head, stride, num_slots, UNIT: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, MAP: gl.constexpr,
):  # fmt: skip
    """The rows of entries [low, high): of each tile the half that its own group sums, then the other half and the rest.

    By 32 rows at a time, two or three of which are under way, from tile to tile; slots are read two tiles ahead. What
    is stored here is seen by `wgmma` past the fences of those who wait for it.
    """
    N: gl.constexpr = rows.shape[1]
    W: gl.constexpr = k[0].shape[2] // WORD
    REST: gl.constexpr = k[2].shape[2] // WORD
    KIND: gl.constexpr = cache.dtype.element_ty
    words = cache.to(gl.pointer_type(gl.int32), bitcast=True)
    each = low + gl.arange(0, N, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    at, ok = _begin(gl.load(slots + each, each < high, other=-1), num_slots, stride)
    rows.index(0).store(at)
    each += N
    slot = gl.load(slots + each, each < high, other=-1)
    a = _half(words, rows.index(0), 0, UNIT, W)
    b = _half(words, rows.index(0), N // 2, UNIT, W)
    free = 1
    for t in range(0, tiles, 2):
        for w in gl.static_range(2):
            if t + w < tiles:
                own, other, rest = k[w].index(w), k[1 - w].index(w), k[2].index(w)
                # The other half of this tile is the own half of the next.
                half = words + (1 - w) * W
                c = _half(half, rows.index(w), 0, UNIT, W)
                c_rest = _half(words + 2 * W, rows.index(w), 0, UNIT, REST)
                mbarrier.wait(empty.index(2 * w), free)
                there.index(w).store(ok.to(gl.int8))
                _put(own, 0, a, KIND)
                d = _half(half, rows.index(w), N // 2, UNIT, W)
                d_rest = _half(words + 2 * W, rows.index(w), N // 2, UNIT, REST)
                _put(own, N // 2, b, KIND)
                mbarrier.arrive(full.index(2 * w))
                at, ok = _begin(slot, num_slots, stride)
                rows.index(1 - w).store(at)
                each += N
                slot = gl.load(slots + each, each < high, other=-1)
                a = _half(half, rows.index(1 - w), 0, UNIT, W)
                mbarrier.wait(empty.index(2 * w + 1), free)
                _put(other, 0, c, KIND)
                _put(rest, 0, c_rest, KIND)
                b = _half(half, rows.index(1 - w), N // 2, UNIT, W)
                _put(other, N // 2, d, KIND)
                _put(rest, N // 2, d_rest, KIND)
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
