# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""MLA's rows of fp8 under few query heads, in `decode_attention_hopper_kernel`: fetched as they are, and widened where
they are multiplied.

`wgmma` takes fp8 only with fp8, but its left operand from registers. So products are turned over: keys times queries,
and values times weights, where keys and values are the left operand, widened to fp16 between shared memory and
registers, and the right one is queries or weights. A row takes half the room of fp16's and is written once, so that
more of them are under way; and a product is as wide as there are query heads. Two groups of warps take the tiles in
turn: each makes the weights of every second tile, and sums half of the values of all.

What a thread reads at once is 16 bytes of a key, whose elements the queries are put in the order of, or 8 bytes of the
values of a key, of which its rows of the product are made: as in `decode_attention_lanes.py`. What weights are measured
by follows their largest only where that outgrows fp16; until then nothing is shrunk.

Source of shrinking rarely: FlashAttention-4 (Dao-AILab/flash-attention, 2025).
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

from hal.backends.cuda import _attention, _tiles
from hal.backends.cuda._attention import LN2, LOG2E
from hal.backends.cuda._fetch_latent import as_fp16, queries
from hal.backends.cuda._fetch_rows import HALF, KEYS
from hal.backends.cuda._parts import leave_part
from hal.backends.cuda.decode_attention_lanes import SHIFT, WORD, _halves, _value_pairs
from hal.backends.cuda.extend_attention_hopper import ABSENT, _barriers, _zero

positive = gluon.jit(_attention.positive.fn)
row_at = gluon.jit(_tiles.row_at.fn)
token_of = gluon.jit(_tiles.token_of.fn)
without = gluon.jit(_attention.without.fn)

MOST = gl.constexpr(32)
"""Rows of a tile that this is for: of more, sums and logits by columns would take too long, and registers be short."""
CHUNK = gl.constexpr(64)
"""Elements of a row that lie side by side in shared memory, the chunks of a tile one behind the other."""
CHUNKS = gl.constexpr(9)
WORDS = gl.constexpr(16)
"""Of a chunk of a row."""
MAIN = gl.constexpr(gl.SwizzledSharedLayout(4, 2, 4, [2, 1, 0]))
"""Words of a tile's chunks: 16 bytes of a row change places by its number, so that no banks are asked for twice."""
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))
"""Of one chunk."""
HEADROOM = gl.constexpr(4)
"""By so many powers of two weights may outgrow what all are measured by before that is found anew."""
UNITS = SHIFT - HEADROOM
"""A logit that is what all are measured by has the weight 2^UNITS, so that none is above 2^SHIFT."""
NONE = gl.constexpr(-(2.0**126))
"""What logits are measured by before there are any."""
QUERIES = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
"""As `wgmma` reads chunks of queries."""


def fits(group: int, tokens: int) -> bool:
    """Whether this is for tiles of so many query heads, of tokens each."""
    return group * max(tokens, 1) <= int(MOST.value)


@gluon.constexpr_function
def rows_of(group, tokens):
    """Query heads, of tokens each, that a product is wide."""
    return 16 if group * max(tokens, 1) <= 16 else MOST


@gluon.constexpr_function
def stages_of(rows):
    """Tiles that shared memory is for."""
    return {16: 5, 32: 4}[rows]


@gluon.constexpr_function
def _sums_layout(rows):
    """[heads, elements]: what a thread has of the sums, 8 elements of a row side by side."""
    regs = [[0, 1], [0, 2], [0, 4], [1, 0], *([r, 0] for r in (8, 16) if r < rows)]
    lanes = [[2, 0], [4, 0], [0, 8], [0, 16], [0, 32]]
    return gl.DistributedLinearLayout(regs, lanes, [[0, 64], [0, 128]], [], [rows, 256])


@gluon.jit
def share_few(GROUP: gl.constexpr, TOKENS: gl.constexpr):
    """(queries, rows, weights, (which rows there are, whether a tile lacks some, where they begin), (what logits are
    measured by, what sums shrink by, whether they do, sums of weights, exponents and factors of queries), barriers), in
    shared memory."""
    ROWS: gl.constexpr = rows_of(GROUP, TOKENS)
    STAGES: gl.constexpr = stages_of(ROWS)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    CHUNKED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CHUNK], gl.float16)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], gl.float16)
    q_tiles = gl.allocate_shared_memory(gl.float16, [CHUNKS, ROWS, CHUNK], CHUNKED)
    p = gl.allocate_shared_memory(gl.float16, [2, KEYS, ROWS], WEIGHTS)
    all = gl.allocate_shared_memory(gl.int32, [STAGES * CHUNKS, KEYS, WORDS], PLAIN)
    places = (
        gl.allocate_shared_memory(gl.int8, [STAGES, KEYS], FLAT),
        gl.allocate_shared_memory(gl.int32, [STAGES, 1], FLAT),
        gl.allocate_shared_memory(gl.int64, [2, KEYS], FLAT),
    )
    columns = (
        gl.allocate_shared_memory(gl.float32, [1, ROWS], FLAT),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT),
        gl.allocate_shared_memory(gl.int32, [2, 1], FLAT),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT),
        gl.allocate_shared_memory(gl.int32, [ROWS], FLAT),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT),
    )
    q_full, done = _barriers(1).index(0), _barriers(1).index(0)
    full, empty, p_full, p_empty = _barriers(STAGES), _barriers(STAGES), _barriers(2), _barriers(2)
    return q_tiles, all, p, places, columns, (q_full, full, empty, p_full, p_empty, done)


@gluon.jit
def begin_few(barriers):
    """Before a request: how many arrive at each."""
    q_full, full, empty, p_full, p_empty, done = barriers
    ALL: gl.constexpr = full.shape[0]
    mbarrier.init(q_full, count=2)
    mbarrier.init(done, count=2)
    for w in gl.static_range(2):
        mbarrier.init(p_full.index(w), count=1)
        mbarrier.init(p_empty.index(w), count=1)
    for stage in gl.static_range(ALL):
        mbarrier.init(full.index(stage), count=129)
        mbarrier.init(empty.index(stage), count=2)


@gluon.jit
def end_few(barriers):
    """Behind a request, before the next begins them anew."""
    q_full, full, empty, p_full, p_empty, done = barriers
    ALL: gl.constexpr = full.shape[0]
    mbarrier.invalidate(q_full)
    mbarrier.invalidate(done)
    for w in gl.static_range(2):
        mbarrier.invalidate(p_full.index(w))
        mbarrier.invalidate(p_empty.index(w))
    for stage in gl.static_range(ALL):
        mbarrier.invalidate(full.index(stage))
        mbarrier.invalidate(empty.index(stage))


@gluon.jit
def _say(to, yes):
    """Whether, for all of the program."""
    to.store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) + yes.to(gl.int32))


@gluon.jit
def _said(where):
    return gl.max(where.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0) != 0


@gluon.jit
def _slots_of(slots, j, high, LAYOUT: gl.constexpr):
    """Those of a tile from entry j on; -1 from `high` on."""
    n = gl.arange(0, KEYS, LAYOUT)
    return gl.load(slots + (j + n), j + n < high, other=-1)


@gluon.jit
def _copied(to, words, rows, whole, UNIT: gl.constexpr):
    """Rows into chunks of a tile, `to` ``[chunks, 64, 16]`` words, by pieces, for want of registers."""
    MANY: gl.constexpr = to.shape[0]
    WIDE: gl.constexpr = 4 if MANY > 1 else 1
    ROW: gl.constexpr = gl.BlockedLayout([1, 1, 4], [WIDE, 8 // WIDE, 4], [1, gl.num_warps(), 1], [2, 1, 0])
    c = gl.arange(0, MANY, gl.SliceLayout(1, gl.SliceLayout(2, ROW)))[:, None, None]
    d = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, ROW)))[None, None, :]
    PIECE: gl.constexpr = 32 if MANY > 1 else 64
    for i in gl.static_range(0, KEYS, PIECE):
        row = rows.slice(i, PIECE).load(gl.SliceLayout(0, gl.SliceLayout(2, ROW)))[None, :, None]
        at = words + (c * WORDS + d)
        if whole:
            async_copy.async_copy_global_to_shared(to.slice(i, PIECE, dim=1), at + row * (UNIT // WORD))
        else:
            async_copy.async_copy_global_to_shared(
                to.slice(i, PIECE, dim=1), at + gl.maximum(row, 0) * (UNIT // WORD), row >= 0
            )


@gluon.jit
def fetch_few(cache, slots, low, high, tiles, room, stride, num_slots, UNIT: gl.constexpr):
    """The rows of entries [low, high), tile by tile; slots are read two tiles ahead."""
    _, all, _, places, _, barriers = room
    there, lacks, rows = places
    _, full, empty, _, _, _ = barriers
    STAGES: gl.constexpr = there.shape[0]
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    words = cache.to(gl.pointer_type(gl.int32), bitcast=True)
    slot = _slots_of(slots, low, high, EACH)
    coming = _slots_of(slots, low + KEYS, high, EACH)
    stage = 0
    free = 1
    for t in range(tiles):
        ok = (slot >= 0) & (slot < num_slots)
        whole = gl.min(ok.to(gl.int32), 0) != 0
        at = rows.index(t % 2)
        at.store(gl.where(ok, slot, -1).to(gl.int64) * stride)
        slot = coming
        coming = _slots_of(slots, low + (t + 2) * KEYS, high, EACH)
        gl.thread_barrier()
        mbarrier.wait(empty.index(stage), free)
        there.index(stage).store(ok.to(gl.int8))
        _say(lacks.index(stage), whole == 0)
        _copied(all.index(stage * CHUNKS)._reinterpret(gl.int32, [8, KEYS, WORDS], MAIN), words, at, whole, UNIT)
        _copied(
            all.index(stage * CHUNKS + 8)._reinterpret(gl.int32, [1, KEYS, WORDS], MAIN), words + 8 * WORDS, at, whole,
            UNIT,
        )  # fmt: skip
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        gl.thread_barrier()
        mbarrier.arrive(full.index(stage))  # for `there`, which no asynchronous copy writes
        stage += 1
        if stage == STAGES:
            stage = 0
            free ^= 1
    async_copy.wait_group(0)


@gluon.jit
def _put(to, x):
    """Queries into their chunks, in the order of `_keys`."""
    N: gl.constexpr = x.shape[0]
    x = x.reshape([N, x.shape[1] // CHUNK, 4, 4, 2, 2]).permute((1, 0, 3, 4, 2, 5))
    to.store(x.reshape([to.shape[0], N, CHUNK]))


@gluon.jit
def _scale_queries(
    q, q_tiles, exponents, FIRST: gl.constexpr, heads, q_row, q_head, sign, UNIT: gl.constexpr,
    GROUP: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """`queries` put into chunks."""
    MANY: gl.constexpr = exponents.shape[0]
    ROWS: gl.constexpr = q_tiles.shape[1]
    x0, x1, x2, by = queries(q, exponents, FIRST, heads, q_row, q_head, sign, UNIT, GROUP, TOKENS)
    to = q_tiles.index(0)._reinterpret(gl.float16, [8, ROWS, CHUNK], QUERIES)
    _put(to.slice(0, 4).slice(FIRST, MANY, dim=1), as_fp16(x0, by))
    _put(to.slice(4, 4).slice(FIRST, MANY, dim=1), as_fp16(x1, by))
    rest = q_tiles.index(8)._reinterpret(gl.float16, [1, ROWS, CHUNK], QUERIES)
    _put(rest.slice(FIRST, MANY, dim=1), as_fp16(x2, by))
    fence_async_shared()


@gluon.jit
def _key_words(chunk):
    """A chunk of a tile's rows: 16 bytes of two rows a thread."""
    READ: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [KEYS, WORDS]
    )
    return chunk.load(READ)


@gluon.jit
def _keys(words, KIND: gl.constexpr, OPERAND: gl.constexpr):
    """They as the left operand: each word of a thread's is a step of 16."""
    x = _halves(words, KIND).reshape([KEYS, 4, 4, 2, 2]).permute((0, 2, 3, 1, 4))
    return gl.convert_layout(x.reshape([KEYS, CHUNK]), OPERAND)


@gluon.jit
def _value_words(words):
    """Four chunks of 16 rows ``[4, 16, 16]``: a warp has the elements of a chunk, a thread 8 of them, of four rows."""
    READ: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 2, 0], [0, 8, 0]], [[0, 1, 0], [0, 4, 0], [0, 0, 2], [0, 0, 4], [0, 0, 8]],
        [[1, 0, 0], [2, 0, 0]], [], [4, 16, WORDS],
    )  # fmt: skip
    return words.load(READ)


@gluon.jit
def _values(words, KIND: gl.constexpr, OPERAND: gl.constexpr):
    """They as columns of the left operand."""
    # [chunk, 8s of a row's number, 4s, 2s, 1s, eighths of a chunk, words]
    x = words.reshape([4, 2, 2, 2, 2, 8, 2]).permute((0, 1, 2, 4, 5, 6, 3))
    # [chunk, 8s, 4s, 1s, eighths, words, 2, 2: element of the word, 2: 2s]
    x = _value_pairs(x, KIND).permute((5, 6, 0, 7, 4, 1, 2, 3, 8))
    return gl.convert_layout(x.reshape([HALF, 16]), OPERAND)


@gluon.jit
def _logits(all, q_tiles, stage, none, zero, KIND: gl.constexpr):
    """A tile's keys times the queries; the last product is under way."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, none.type.layout, 2)
    MANY: gl.constexpr = q_tiles.shape[0]
    s = none
    words = _key_words(all.index(stage * MANY))
    for d in gl.static_range(MANY):
        coming = words
        if d + 1 < MANY:
            coming = _key_words(all.index(stage * MANY + d + 1))
        k = _keys(words, KIND, OPERAND)
        s = warpgroup_mma(k, q_tiles.index(d + zero).permute((1, 0)), s, use_acc=d > 0, is_async=True)
        if d > 0:
            s = warpgroup_mma_wait(1, [s])
        words = coming
    return s


@gluon.jit
def _summed(PART: gl.constexpr, acc, all, stage, weights, empty, KIND: gl.constexpr):
    """Sums, and half PART of a tile's values times its weights; the tile is given back, the last product under way."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    from_ = all.index(stage * CHUNKS)._reinterpret(gl.int32, [8, KEYS, WORDS], MAIN).slice(4 * PART, 4)
    words = _value_words(from_.slice(0, 16, dim=1))
    for i in gl.static_range(0, KEYS, 16):
        coming = words
        if i + 16 < KEYS:
            coming = _value_words(from_.slice(i + 16, 16, dim=1))
        v = _values(words, KIND, OPERAND)
        if i + 16 == KEYS:
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage))
        acc = warpgroup_mma(v, weights.slice(i, 16), acc, is_async=True)
        if i > 0:
            acc = warpgroup_mma_wait(1, [acc])
        words = coming
    return acc


@gluon.jit
def _shrunk(x, by):
    """Sums of columns that have grown in smaller units."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, x.type.layout)
    return x * by.load(COLUMN)[None, :]


@gluon.jit
def _measured(s, scale, top):
    """Products as powers of two of weights."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    return s * scale.load(COLUMN)[None, :] - top.load(COLUMN)[None, :]


@gluon.jit
def _partly(w):
    """The sums of a tile's weights as far as a thread has them: the rest is added up at the end."""
    ROWS: gl.constexpr = w.shape[1]
    return gl.sum(w.reshape([4, 2, 8, ROWS]), 1).reshape([32, ROWS])


@gluon.jit
def _left(
    PART: gl.constexpr, acc, out, lse, part, part_lse, heads, parts, tops, totals, done, v_factor, out_row, out_head,
    LSE: gl.constexpr, UNIT: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """What is left of a program's sums: outputs, or a part for the merge."""
    ROWS: gl.constexpr = acc.shape[1]
    COLUMN: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    gl.thread_barrier()
    mbarrier.arrive(done)
    mbarrier.wait(done, 0)
    whole = totals.index(0).load(COLUMN) + totals.index(1).load(COLUMN)
    seen = whole != 0.0
    whole = gl.where(seen, whole, 1.0)
    if PART == 0:
        r = gl.arange(0, ROWS, COLUMN)
        logs = gl.where(seen, tops.index(0).load(COLUMN) + gl.log2(whole), ABSENT)
        if parts == 1:
            if LSE:
                gl.store(lse + r, logs * LN2, r < heads)
        else:
            gl.store(part_lse + r, logs, r < heads)
    # [2: words, 2: pairs of a word, chunk, 2: of a pair, eighths, heads]
    acc = acc.reshape([2, 2, 4, 2, 8, ROWS]).permute((5, 2, 4, 0, 1, 3)).reshape([ROWS, HALF])
    TO: gl.constexpr = _sums_layout(ROWS)
    ROW: gl.constexpr = gl.SliceLayout(1, TO)
    acc = gl.convert_layout(acc, TO)
    share = gl.convert_layout(v_factor / whole, ROW)
    r = gl.arange(0, ROWS, ROW)
    if parts == 1:
        d = PART * HALF + gl.arange(0, HALF, gl.SliceLayout(0, TO))[None, :]
        at = row_at(r, out_row, out_head, GROUP, TOKENS)[:, None] * UNIT + d
        gl.store(out + at, (acc * share[:, None]).to(out.dtype.element_ty), (r < heads)[:, None])
    else:
        leave_part(acc, gl.max(gl.abs(acc), 1), share, part, r, r < heads, 2 * HALF, PART, True, False)


@gluon.jit
def work_few(
    PART: gl.constexpr, q, out, lse, part, part_lse, heads, parts, low, high, first, tiles, room, by, sign, v_factor,
    q_row, q_head, out_row, out_head, LSE: gl.constexpr, UNIT: gl.constexpr, WIDE_EXPONENT: gl.constexpr,
    GROUP: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Weights of tiles PART, PART + 2, ..., and half PART of the sums of all."""
    q_tiles, all, p, places, columns, barriers = room
    there, lacks, _ = places
    q_full, full, empty, p_full, p_empty, done = barriers
    tops, keeps, grew, totals, exponents, scales = columns
    STAGES: gl.constexpr = there.shape[0]
    KIND: gl.constexpr = gl.float8e5 if WIDE_EXPONENT else gl.float8e4nv
    ROWS: gl.constexpr = q_tiles.shape[1]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, LOGITS)
    ENTRY: gl.constexpr = gl.SliceLayout(1, LOGITS)
    _scale_queries(
        q, q_tiles, exponents.slice(PART * ROWS // 2, ROWS // 2), PART * ROWS // 2, heads, q_row, q_head, sign, UNIT,
        GROUP, TOKENS,
    )  # fmt: skip
    if PART == 0:
        tops.index(0).store(gl.full([ROWS], NONE, gl.float32, COLUMN))
    gl.thread_barrier()
    mbarrier.arrive(q_full)
    mbarrier.wait(q_full, 0)
    scales.index(PART).store(positive(without(by, exponents.load(COLUMN))) * LOG2E)
    gl.thread_barrier()
    none = gl.zeros([KEYS, ROWS], gl.float32, LOGITS)
    acc = gl.zeros([HALF, ROWS], gl.float32, LOGITS)
    total = _partly(none)
    for t in range(PART, tiles, 2):
        zero = _zero(t)
        mine = PART + zero
        theirs = 1 - PART + zero
        stage = t % STAGES
        mbarrier.wait(full.index(stage), t // STAGES % 2)
        s_begun = _logits(all, q_tiles, stage, none, zero, KIND)
        j = low + t * KEYS
        edge = (j + KEYS > high) | _said(lacks.index(stage))
        if TOKENS > 1:
            edge = edge | (j + KEYS > first)
        s = warpgroup_mma_wait(0, [s_begun])
        if edge:
            entries = j + gl.arange(0, KEYS, ENTRY)
            seen = ((there.index(stage).load(ENTRY) != 0) & (entries < high))[:, None]
            if TOKENS > 1:
                last = first + token_of(gl.arange(0, ROWS, COLUMN), GROUP, TOKENS)
                seen = seen & (entries[:, None] < last[None, :])
            s = gl.where(seen, s, ABSENT)
        if t > 0:
            mbarrier.wait(p_full.index(theirs), (t - 1) // 2 % 2)
            if _said(grew.index(theirs)):
                total = _shrunk(total, keeps.index(theirs))
                acc = _shrunk(acc, keeps.index(theirs))
        grown = gl.max(_measured(s, scales.index(mine), tops.index(zero))) > SHIFT
        if grown:
            old = tops.index(zero).load(COLUMN)
            new = gl.maximum(old, gl.max(s, 0) * scales.index(mine).load(COLUMN) - UNITS)
            gl.thread_barrier()
            tops.index(zero).store(new)
            keeps.index(mine).store(gl.exp2(old - new))
            gl.thread_barrier()
            total = _shrunk(total, keeps.index(mine))
        _say(grew.index(mine), grown)
        w = gl.exp2(_measured(s, scales.index(mine), tops.index(zero)))
        w16 = w.to(gl.float16)
        mbarrier.wait(p_empty.index(mine), t // 2 % 2 ^ 1)
        p.index(mine).store(w16.reshape([KEYS // 4, 2, 2, ROWS]).permute((0, 2, 1, 3)).reshape([KEYS, ROWS]))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(p_full.index(mine))
        total += _partly(w)
        if t > 0:
            acc = _summed(PART, acc, all, (t - 1) % STAGES, p.index(theirs), empty, KIND)
            acc = warpgroup_mma_wait(0, [acc])
            gl.thread_barrier()
            mbarrier.arrive(p_empty.index(theirs))
        if grown:
            acc = _shrunk(acc, keeps.index(mine))
        acc = _summed(PART, acc, all, stage, p.index(mine), empty, KIND)
        acc = warpgroup_mma_wait(0, [acc])
    if (tiles - 1) % 2 != PART:
        t = tiles - 1
        mbarrier.wait(p_full.index(1 - PART), t // 2 % 2)
        if _said(grew.index(1 - PART)):
            total = _shrunk(total, keeps.index(1 - PART))
            acc = _shrunk(acc, keeps.index(1 - PART))
        acc = _summed(PART, acc, all, t % STAGES, p.index(1 - PART), empty, KIND)
        acc = warpgroup_mma_wait(0, [acc])

    totals.index(PART).store(gl.convert_layout(gl.sum(total, 0), COLUMN))
    _left(
        PART, acc, out, lse, part, part_lse, heads, parts, tops, totals, done, v_factor, out_row, out_head, LSE, UNIT,
        GROUP, TOKENS,
    )  # fmt: skip
