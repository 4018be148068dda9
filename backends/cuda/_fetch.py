# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""The warps that fetch, of extend_attention on Hopper: rows of 16 bits as they are, rows of fp8 as fp16.

`wgmma` takes fp8 only with fp8, so rows are widened on their way to shared memory, by those who fetch: through
registers, three loads of half a tile at a time. fp8 is exact in fp16, two elements an instruction. A query is, times
the power of two by which its largest element is about 2^15; the logits' factor takes that back (`without`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from hal.backends.cuda import _attention
from hal.backends.cuda._told import tell
from hal.backends.cuda._turns import find, find_part, survey
from hal.backends.cuda.decode_attention_lanes import E4M3, E5M2

ROWS = gl.constexpr(64)
"""Rows of a group of four warps: what one `wgmma` multiplies."""
BOX = gl.constexpr(64)
"""Columns of 16 bits that the copy engine puts side by side: 128 bytes."""
WORD = gl.constexpr(4)
"""Elements of an int32, as which rows of fp8 are loaded."""

exponent = gluon.jit(_attention.exponent.fn)
magnitude = gluon.jit(_attention.magnitude.fn)
place = gluon.jit(_attention.place.fn)
power = gluon.jit(_attention.power.fn)


@gluon.jit
def behind(r, ahead, HEADS: gl.constexpr):
    """Rows of a tile, counted from its first token's first, of whose HEADS those `ahead` are the tile's before."""
    if 2 * ROWS % HEADS:
        r += ahead
    return r


@gluon.jit
def query(r, tile, HEADS: gl.constexpr):
    """(token of q, query head, whether there is such a one) of rows of a tile."""
    token, rows, head, ahead = tile
    asked = r < rows
    r = behind(r, ahead, HEADS)
    return (token + r // HEADS).to(gl.int64), head + r % HEADS, asked


@gluon.constexpr_function
def _row_by_row(columns):
    """16 bytes a thread, and up to 128 of a row side by side."""
    lanes = min(8, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def _copy_columns(to, base, rows, FIRST: gl.constexpr, WIDTH: gl.constexpr, UNIT: gl.constexpr):
    """Columns from FIRST on of rows of WIDTH; zeros where there is none."""
    COLUMNS: gl.constexpr = to.shape[1]
    ROW: gl.constexpr = _row_by_row(COLUMNS)
    row = rows.load(gl.SliceLayout(1, ROW))[:, None]
    d = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, ROW))[None, :]
    some = row >= 0
    if FIRST + COLUMNS > WIDTH:
        some = some & (d < WIDTH)
    async_copy.async_copy_global_to_shared(to, (base + d) + row * UNIT, some)


@gluon.jit
def _copy(to, base, rows, WIDTH: gl.constexpr, UNIT: gl.constexpr):
    """Rows of WIDTH columns, which begin at so many UNITs, into tiles of these, side by side; zeros behind them, and
    where a row is -1.

    What a thread copies of a row lies 128 bytes apart, so that one address, with offsets, serves for all of it. By
    pieces, for want of registers.
    """
    N: gl.constexpr = to[0].shape[0]
    D: gl.constexpr = to[0].shape[1]
    PIECE: gl.constexpr = N if N * D < 32 * 256 else 32 * 256 // D
    for i in gl.static_range(0, N, PIECE):
        for part in gl.static_range(len(to)):
            _copy_columns(to[part].slice(i, PIECE), base, rows.slice(i, PIECE), part * D, WIDTH, UNIT)


@gluon.jit
def _each(tiles, i):
    """The i-th of each of one or two rings."""
    if len(tiles) == 1:
        return (tiles[0].index(i),)
    else:
        return (tiles[0].index(i), tiles[1].index(i))


@gluon.jit
def _queries(
    q, q_tiles, q_rows, tile, full, empty, done, strides, DIM: gl.constexpr, UNIT: gl.constexpr, HEADS: gl.constexpr
):  # fmt: skip
    """Those of the next tile after so many, once nobody reads those that were in their place."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    PLACES: gl.constexpr = q_tiles[0].shape[0] // 2
    at, head, asked = query(gl.arange(0, 2 * ROWS, EACH), tile, HEADS)
    place = done % PLACES
    empty = empty.index(place)
    full = full.index(place)
    mbarrier.wait(empty, (done // PLACES & 1) ^ 1)
    q_rows.store(gl.where(asked, at * strides[0] + head * strides[1], -1))
    for part in gl.static_range(2):
        _copy(_each(q_tiles, 2 * place + part), q, q_rows.slice(part * ROWS, ROWS), DIM, UNIT)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _slots(slots, j, high, N: gl.constexpr, EACH: gl.constexpr):
    """The slots of a tile from entry j on, EACH a thread; -1 from `high` on."""
    n = gl.arange(0, N, gl.BlockedLayout([EACH], [32], [gl.num_warps()], [0]))
    return gl.load(slots + (j + n), j + n < high, other=-1)


@gluon.jit
def _run(slot, num_slots):
    """The first of a tile's slots where they follow each other, else -1. Each warp looks at all, so that none waits for
    another."""
    N: gl.constexpr = slot.shape[0]
    n = gl.arange(0, N, slot.type.layout)
    some = (slot >= 0) & (slot < num_slots)
    begin = gl.where(some, slot, -N).to(gl.int32) - n
    return gl.maximum(gl.where(gl.min(begin, 0) == gl.max(begin, 0), gl.min(begin, 0), -1), -1)


@gluon.jit
def _boxes(map, first, column, tiles, stage, full):
    """The columns of rows from slot `first` on, into one ring of tiles or two of a part each."""
    N: gl.constexpr = tiles[0].shape[1]
    WIDTH: gl.constexpr = tiles[0].shape[2] // BOX
    REST: gl.constexpr = 0 if len(tiles) == 1 else tiles[1].shape[2] // BOX
    BOXED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, BOX], tiles[0].dtype)
    STAGES: gl.constexpr = tiles[0].shape[0]
    mbarrier.expect(full, N * BOX * 2 * (WIDTH + REST))
    to = tiles[0]._reinterpret(tiles[0].dtype, [STAGES * WIDTH, N, BOX], BOXED)
    for c in gl.static_range(WIDTH):
        tma.async_copy_global_to_shared(map, [first, column + c * BOX], full, to.index(stage * WIDTH + c))
    if REST > 0:
        to = tiles[1]._reinterpret(tiles[1].dtype, [STAGES * REST, N, BOX], BOXED)
        for c in gl.static_range(REST):
            at = [first, column + (WIDTH + c) * BOX]
            tma.async_copy_global_to_shared(map, at, full, to.index(stage * REST + c))


@gluon.jit
def _tile(
    to, map, base, rows, first, column, stage, full, WIDTH: gl.constexpr, UNIT: gl.constexpr, MAP: gl.constexpr,
    THERE: gl.constexpr,
):  # fmt: skip
    """A tile's rows into one ring or two: by boxes where MAP and there is a `first`, else row by row. Who asks arrives
    beside the copies; so with THERE what was stored before is there too, which no asynchronous copy writes."""
    if MAP:
        if first >= 0:
            if THERE:
                gl.thread_barrier()
            _boxes(map, first, column, to, stage, full)
        else:
            _copy(_each(to, stage), base, rows.index(stage), WIDTH, UNIT)
            mbarrier.arrive(full)
    else:
        _copy(_each(to, stage), base, rows.index(stage), WIDTH, UNIT)
        if THERE:
            mbarrier.arrive(full)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _rows(
    q, k_base, v_base, slots, tile, low, high, stage, free, done, q_tiles, k_ring, v_ring, places, barriers, strides,
    num_slots, k_map, v_map, columns, DIM: gl.constexpr, WIDTH: gl.constexpr, K_PAGE: gl.constexpr,
    V_PAGE: gl.constexpr, UNIT: gl.constexpr, HEADS: gl.constexpr, MAP: gl.constexpr,
):  # fmt: skip
    """The keys and values of entries [low, high), tile by tile, and behind the first keys the queries; how far the
    rings are then. By boxes where MAP and the slots of a tile follow each other, else row by row."""
    q_rows, k_rows, v_rows, there = places
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    _, _, kc_page, kc_token, vc_page, vc_token = strides
    STAGES: gl.constexpr = v_ring.shape[0]
    N: gl.constexpr = v_ring.shape[1]
    slot = _slots(slots, low, high, N, 1)
    all = slot
    if MAP:
        all = _slots(slots, low, high, N, N // 32)
    if high <= low:
        _queries(q, q_tiles, q_rows, tile, q_full, q_empty, done, strides, DIM, UNIT, HEADS)
    for j in range(low, high, N):
        ok = (slot >= 0) & (slot < num_slots)
        mine = gl.where(ok, slot, 0).to(gl.int64)
        slot = _slots(slots, j + N, high, N, 1)
        first = -1
        if MAP:
            first = _run(all, num_slots)
            all = _slots(slots, j + N, high, N, N // 32)
        mbarrier.wait(k_empty.index(stage), free)
        there.index(stage).store(ok.to(gl.int32))
        k_rows.index(stage).store(gl.where(ok, place(mine, kc_page, kc_token, K_PAGE), -1))
        _tile(k_ring, k_map, k_base, k_rows, first, columns[0], stage, k_full.index(stage), DIM, UNIT, MAP, True)
        if j == low:
            _queries(q, q_tiles, q_rows, tile, q_full, q_empty, done, strides, DIM, UNIT, HEADS)
        mbarrier.wait(v_empty.index(stage), free)
        if V_PAGE:
            v_rows.index(stage).store(gl.where(ok, place(mine, vc_page, vc_token, V_PAGE), -1))
        # v_rows are k_rows where v lies as k does.
        _tile((v_ring,), v_map, v_base, v_rows, first, columns[1], stage, v_full.index(stage), WIDTH, UNIT, MAP, False)
        stage += 1
        if stage == STAGES:
            stage = 0
            free ^= 1
    return stage, free


@gluon.constexpr_function
def _words(MANY, W):
    """[rows, words], 16 bytes for each of 128 threads. Of eight that write together, four have every other 16 bytes of
    128 in one row, and four those between in the next: no two the same banks."""
    cols = [[0, 1 << i] for i in range(2, W.bit_length() - 1)]
    rows = [[1 << i, 0] for i in range(MANY.bit_length() - 1)]
    few = 7 - len(cols)
    order = cols[:2] + rows[:1] + cols[2:] + rows[1:few]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *rows[few:]], order[:5], order[5:], [], [MANY, W])


@gluon.jit
def _half(base, rows, i: gl.constexpr, UNIT: gl.constexpr, W: gl.constexpr, WIDTH: gl.constexpr):
    """Half a tile's rows of WIDTH elements, from row i on, loaded as W words; zeros where there is none."""
    MANY: gl.constexpr = rows.shape[0] // 2
    LAYOUT: gl.constexpr = _words(MANY, W)
    row = rows.slice(i, MANY).load(gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, W, gl.SliceLayout(0, LAYOUT))[None, :]
    some = (row >= 0)[:, None]
    if W * WORD > WIDTH:
        some = some & (d < WIDTH // WORD)
    return gl.load(base + ((row * (UNIT // WORD))[:, None] + d), some, other=0)


@gluon.jit
def _put(to, i: gl.constexpr, x, kind: gl.constexpr):
    """Words of fp8 into rows from i on of a tile of fp16, which is one of pairs in words as well."""
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    a, b = gl.inline_asm_elementwise(
        E5M2 if kind == gl.float8e5 else E4M3, "=&r,=&r,r", [x], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    words = to._reinterpret(gl.int32, [to.shape[0], to.shape[1] // 2], PAIRS)
    words.slice(i, x.shape[0]).store(gl.join(a, b).reshape([x.shape[0], 2 * x.shape[1]]))


@gluon.jit
def scaled(
    q, to, begin, tile, q_row, q_head, sign, DIM: gl.constexpr, UNIT: gl.constexpr, HEADS: gl.constexpr
):  # fmt: skip
    """A group's own rows of the queries, from `begin` on, times `sign`, put into a tile of fp16; by what powers of two
    (`exponent`)."""
    D: gl.constexpr = to.shape[1]
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, ROW))
    at, head, asked = query(row // 8 * 8 + (begin + row % 8), tile, HEADS)
    d = gl.arange(0, D, gl.SliceLayout(0, ROW))[None, :]
    some = asked[:, None]
    if D > DIM:
        some = some & (d < DIM)
    x = gl.load(q + (((at * q_row + head * q_head) * UNIT)[:, None] + d), some, other=0.0)
    e = gl.full([ROWS], 127, gl.int32, gl.SliceLayout(1, ROW))
    if q.dtype.element_ty != gl.float16:
        e = exponent(gl.max(magnitude(x), 1))
    to.store((x.to(gl.float32) * (power(e) * sign)[:, None]).to(gl.float16))
    return e


@gluon.jit
def _widened(
    k_base, v_base, slots, low, high, stage, free, k_ring, v_ring, places, barriers, strides, num_slots,
    WIDTH: gl.constexpr, K_PAGE: gl.constexpr, V_PAGE: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """As `_rows`, of fp8 and without queries. Two loads are under way while one is widened, from tile to tile."""
    _, k_rows, v_rows, there = places
    _, _, k_full, k_empty, v_full, v_empty = barriers
    _, _, kc_page, kc_token, vc_page, vc_token = strides
    STAGES: gl.constexpr = v_ring.shape[0]
    N: gl.constexpr = v_ring.shape[1]
    W: gl.constexpr = v_ring.shape[2] // WORD
    KIND: gl.constexpr = k_base.dtype.element_ty
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    each = gl.arange(0, N, EACH)
    k_words = k_base.to(gl.pointer_type(gl.int32), bitcast=True)
    v_words = v_base.to(gl.pointer_type(gl.int32), bitcast=True)
    slot = gl.load(slots + (low + each), low + each < high, other=-1)
    ok = (slot >= 0) & (slot < num_slots)
    mine = gl.where(ok, slot, 0).to(gl.int64)
    k_rows.index(stage).store(gl.where(ok, place(mine, kc_page, kc_token, K_PAGE), -1))
    if V_PAGE:
        v_rows.index(stage).store(gl.where(ok, place(mine, vc_page, vc_token, V_PAGE), -1))
    a = _half(k_words, k_rows.index(stage), 0, UNIT, W, WIDTH)
    b = _half(k_words, k_rows.index(stage), N // 2, UNIT, W, WIDTH)
    slot = gl.load(slots + (low + N + each), low + N + each < high, other=-1)
    for j in range(low, high, N):
        k, v, rows = k_ring[0].index(stage), v_ring.index(stage), v_rows.index(stage)
        c = _half(v_words, rows, 0, UNIT, W, WIDTH)
        mbarrier.wait(k_empty.index(stage), free)
        there.index(stage).store(ok.to(gl.int32))
        _put(k, 0, a, KIND)
        a = _half(v_words, rows, N // 2, UNIT, W, WIDTH)
        _put(k, N // 2, b, KIND)
        fence_async_shared()
        mbarrier.arrive(k_full.index(stage))
        following = stage + 1
        if following == STAGES:
            following = 0
        ok = (slot >= 0) & (slot < num_slots)
        mine = gl.where(ok, slot, 0).to(gl.int64)
        slot = gl.load(slots + (j + 2 * N + each), j + 2 * N + each < high, other=-1)
        rows = k_rows.index(following)
        rows.store(gl.where(ok, place(mine, kc_page, kc_token, K_PAGE), -1))
        if V_PAGE:
            v_rows.index(following).store(gl.where(ok, place(mine, vc_page, vc_token, V_PAGE), -1))
        b = _half(k_words, rows, 0, UNIT, W, WIDTH)
        mbarrier.wait(v_empty.index(stage), free)
        _put(v, 0, c, KIND)
        c = _half(k_words, rows, N // 2, UNIT, W, WIDTH)
        _put(v, N // 2, a, KIND)
        fence_async_shared()
        mbarrier.arrive(v_full.index(stage))
        a = b
        b = c
        stage = following
        if stage == 0:
            free ^= 1
    return stage, free


@gluon.jit
def _next(item, items, counter):
    """The item after one: by the counter, where programs do more than one."""
    programs = gl.num_programs(0)
    item += programs
    if items > programs:
        # Not before the last rows are asked for: else long tiles are taken by who is busy for long. Every item is
        # followed by one look at the counter: who sees the last number leaves it as it was found.
        after = gl.atomic_add(counter, 1, sem="relaxed")
        if after == items - 1:
            gl.store(counter, 0)
        item = after + programs
    return item


@gluon.jit
def fetch(
    q, k_cache, v_cache, kv_indices, batch, split, counters, window, turns, q_tiles, k_ring, v_ring, places, barriers,
    strides, kc_head, vc_head, num_slots, k_map, v_map, Q_HEADS: gl.constexpr, GROUP: gl.constexpr,
    BLOCKS: gl.constexpr, HEADS: gl.constexpr, TOKENS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK: gl.constexpr, FEW: gl.constexpr, K_PAGE: gl.constexpr, V_PAGE: gl.constexpr, DIM: gl.constexpr,
    WIDTH: gl.constexpr, UNIT: gl.constexpr, MAP: gl.constexpr, SPLIT: gl.constexpr, LONG_FIRST: gl.constexpr,
):  # fmt: skip
    """What the tiles of a program take, tile after tile (`_turns.py`)."""
    N: gl.constexpr = v_ring.shape[1]
    SIZE: gl.constexpr = k_cache.dtype.element_ty.primitive_bitwidth // 8
    ROW: gl.constexpr = (DIM + WIDTH) * SIZE
    counter = counters.to(gl.pointer_type(gl.int32), bitcast=True)
    item = gl.program_id(0)
    items = item + 1  # known with the first
    stage = 0
    free = 1
    done = 0
    if not SPLIT:
        found = survey(batch, split[1], HEADS, 2 * ROWS, BLOCK, FEW, LONG_FIRST)
    while item < items:
        if SPLIT:
            items, tile, lowest, low, high, begin, kv_head, line = find_part(
                item, batch, split, window, Q_HEADS, GROUP, BLOCKS, HEADS, TOKENS, N, CAUSAL, WINDOW, BLOCK, FEW
            )
            some = tile[1] > 0
        else:
            items, tile, lowest, low, high, begin, kv_head, line = find(
                item, batch, found, window, Q_HEADS, GROUP, BLOCKS, HEADS, 2 * ROWS, N, CAUSAL, WINDOW, BLOCK, FEW,
                ROW, LONG_FIRST,
            )  # fmt: skip
            some = item < items
        if some:
            if SPLIT or LONG_FIRST:
                tell(turns, done, tile, lowest, low, high, line)
            else:
                tell(turns, done, tile, lowest, low, high)
            k_base = k_cache + kv_head.to(gl.int64) * kc_head * UNIT
            v_base = v_cache + kv_head.to(gl.int64) * vc_head * UNIT
            columns = (kv_head * kc_head.to(gl.int32) * UNIT, kv_head * vc_head.to(gl.int32) * UNIT)
            if SIZE == 1:
                stage, free = _widened(
                    k_base, v_base, kv_indices + begin, low, high, stage, free, k_ring, v_ring, places, barriers,
                    strides, num_slots, WIDTH, K_PAGE, V_PAGE, UNIT,
                )  # fmt: skip
            else:
                stage, free = _rows(
                    q, k_base, v_base, kv_indices + begin, tile, low, high, stage, free, done, q_tiles, k_ring, v_ring,
                    places, barriers, strides, num_slots, k_map, v_map, columns, DIM, WIDTH, K_PAGE, V_PAGE, UNIT,
                    HEADS, MAP,
                )  # fmt: skip
            done += 1
            if not SPLIT:
                item = _next(item, items, counter)
        if SPLIT:  # noqa: SIM102, what is known when it is compiled stands alone
            if item < items:
                item = _next(item, items, counter)
    tell(turns, done, (0, 0, 0, 0), 0, 0, 0)
    if SIZE > 1:
        async_copy.wait_group(0)
