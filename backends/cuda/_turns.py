# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, attr-defined"
"""Which tiles of queries a program of extend_attention on Hopper does, one after the other.

As many programs as run at once share all tiles of all requests, the last first, which are the longest of a causal
prompt: who has fetched a tile's rows takes the next by a counter, finds it while those are multiplied, and tells those
who multiply. Where there are few tiles, and requests of many keys, these are in parts, each of which is a tile here
(`find_part`), and another launch merges what is left of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from hal.backends.cuda import _attention, _tiles

L2 = gl.constexpr(32 * 2**20)
"""Bytes of keys and values that programs may read at a time: of the 50 MB on the chip, most."""
TOLD = gl.constexpr(8)
"""Room for the numbers that are told of a tile. `turns` are those of two tiles, the barriers at which they are told,
and those at which they are no more needed."""

SHORTEST = gl.constexpr(256)
"""Keys that a part has at least."""
WHOLE = gl.constexpr(1024)
"""No request is split if none has more keys: what is split takes another launch."""

entry = gluon.jit(_attention.entry.fn)
find_tile = gluon.jit(_tiles.find.fn)
note = gluon.jit(_tiles.note.fn)
note_none = gluon.jit(_tiles.note_none.fn)
part_of = gluon.jit(_tiles.part_of.fn)
lengths = gluon.jit(_attention.lengths.fn)
within = gluon.jit(_attention.within.fn)


@gluon.constexpr_function
def _each(BLOCK):
    """A few in every warp, which asks no other then; more shared by four warps, for want of registers."""
    return gl.BlockedLayout([max(1, BLOCK // 128)], [32], [4], [0])


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _place(item, every, nnz, bs, KV_HEADS: gl.constexpr, BLOCKS: gl.constexpr, ROW: gl.constexpr):
    """(how many items `every` tile is, block of heads of this one, its tile from the last): as many key heads at a time
    as the L2 holds the keys of, of a request of the mean length."""
    items = gl.minimum(every * BLOCKS, 2**30).to(gl.int32)  # of more there is no memory for the queries
    block = item % BLOCKS
    turn = item // BLOCKS
    if nnz * (KV_HEADS * ROW) > bs.to(gl.int64) * L2:
        fit = gl.maximum(bs.to(gl.float32) * (L2 // ROW) / nnz.to(gl.float32), 1).to(gl.int32)
        most = gl.cdiv(KV_HEADS, gl.cdiv(KV_HEADS, fit)) * (BLOCKS // KV_HEADS)
        many = gl.maximum(items // BLOCKS, 1) * most
        done = item // many * most
        among = gl.maximum(gl.minimum(most, BLOCKS - done), 1)
        block = done + item % many % among
        turn = item % many // among
    return items, block, turn


@gluon.jit
def _starts(indptr, i, there, size):
    """(where each request starts, how many it has), int32."""
    start = within(gl.load(indptr + i, there, other=0), size)
    return start, within(gl.load(indptr + i + 1, there, other=0), size) - start


@gluon.jit
def _find_at_once(
    item, qo_indptr, kv_indptr, n, nnz, bs, KV_HEADS: gl.constexpr, BLOCKS: gl.constexpr, TOKENS: gl.constexpr,
    BLOCK: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """As `_find`, of no more than BLOCK requests: all that is asked of them is asked together, and counted in int32."""
    i = gl.arange(0, BLOCK, _each(BLOCK))
    there = i < bs
    first, news = _starts(qo_indptr, i, there, n)
    begin, length = _starts(kv_indptr, i, there, nnz)
    many = (gl.maximum(news, 0) + (TOKENS - 1)) // TOKENS
    upto = gl.associative_scan(many, 0, _add)
    every = gl.sum(many)
    items, block, turn = _place(item, every.to(gl.int64), nnz, bs, KV_HEADS, BLOCKS, ROW)
    c = every - 1 - turn
    mine = (upto > c) & (upto - many <= c)
    before = gl.sum(gl.where(mine, upto - many, 0))
    first = gl.sum(gl.where(mine, first, 0))
    news = gl.sum(gl.where(mine, news, 0))
    begin = gl.sum(gl.where(mine, begin, 0))
    length = gl.sum(gl.where(mine, length, 0))
    return items, block, (c - before).to(gl.int64), first, news, begin, length


@gluon.jit
def _tiles_of(qo_indptr, b, n, bs, TOKENS: gl.constexpr, BLOCK: gl.constexpr):
    """(how many tiles, whether there is such a request) of BLOCK requests from b on."""
    i = b + gl.arange(0, BLOCK, _each(BLOCK))
    return ((lengths(qo_indptr, i, i < bs, n) + (TOKENS - 1)) // TOKENS).to(gl.int64), i < bs


@gluon.jit
def _find(
    item, qo_indptr, kv_indptr, n, nnz, bs, KV_HEADS: gl.constexpr, BLOCKS: gl.constexpr, TOKENS: gl.constexpr,
    BLOCK: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """Of an item: (how many there are, block of heads, which of its request's tiles it is, where the request's tokens
    start, how many, where its entries start, how many)."""
    zero = gl.to_tensor(0).to(gl.int64)
    every, request = zero, zero
    for b in range(0, bs, BLOCK):
        many, there = _tiles_of(qo_indptr, b, n, bs, TOKENS, BLOCK)
        every += gl.sum(many)
    items, block, turn = _place(item, every, nnz, bs, KV_HEADS, BLOCKS, ROW)
    nth = every - 1 - turn
    for b in range(0, bs, BLOCK):
        many, there = _tiles_of(qo_indptr, b, n, bs, TOKENS, BLOCK)
        # Those before the one that is looked for, if all up to here are.
        before = (gl.associative_scan(many, 0, _add) <= nth) & there & (request == b)
        request += gl.sum(before.to(gl.int64))
        nth -= gl.sum(gl.where(before, many, 0))
    first = entry(qo_indptr, request, n)
    begin = entry(kv_indptr, request, nnz)
    news = entry(qo_indptr, request + 1, n) - first
    length = entry(kv_indptr, request + 1, nnz) - begin
    return items, block, nth, first, news, begin, length


@gluon.jit
def find(
    item, batch, window, Q_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr, HEADS: gl.constexpr,
    TOKENS: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, BLOCK: gl.constexpr,
    FEW: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """Of an item: (how many there are, (first token, tokens, query head, heads), position of the first token, entries
    from, entries to, where the request's entries start, key head)."""
    qo_indptr, kv_indptr, n, nnz, bs = batch
    KV_HEADS: gl.constexpr = Q_HEADS // GROUP
    if (bs <= BLOCK) & (n // TOKENS < 2**31 // BLOCK - 1):  # so that int32 holds their tiles
        if bs <= FEW:
            items, block, nth, first, news, begin, length = _find_at_once(
                item, qo_indptr, kv_indptr, n, nnz, bs, KV_HEADS, BLOCKS, TOKENS, FEW, ROW
            )
        else:
            items, block, nth, first, news, begin, length = _find_at_once(
                item, qo_indptr, kv_indptr, n, nnz, bs, KV_HEADS, BLOCKS, TOKENS, BLOCK, ROW
            )
    else:
        items, block, nth, first, news, begin, length = _find(
            item, qo_indptr, kv_indptr, n, nnz, bs, KV_HEADS, BLOCKS, TOKENS, 2 * BLOCK, ROW
        )
    length = gl.maximum(length, 0)
    token = (nth * TOKENS).to(gl.int32)
    lowest = length - news + token
    low = 0
    high = length
    if CAUSAL:
        high = gl.minimum(length, gl.maximum(length - news + gl.minimum(token + TOKENS, news), 0))
    if WINDOW:
        low = gl.maximum(lowest - window, 0) // N * N
    kv_head = block // (BLOCKS * GROUP // Q_HEADS)
    member = block % (BLOCKS * GROUP // Q_HEADS) * HEADS
    tile = (
        first + token,
        gl.minimum(news - token, TOKENS),
        kv_head * GROUP + member,
        gl.minimum(GROUP - member, HEADS),
    )
    return items, tile, lowest, low, high, begin, kv_head


@gluon.jit
def find_part(
    item, batch, split, Q_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr, HEADS: gl.constexpr,
    TOKENS: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr, BLOCK: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """As `find`, of parts of tiles, and where what is left of it goes: the line of parts, or -1 if it is all of a tile.
    A tile of no tokens is none. Tells the launch that merges what it needs to know."""
    qo_indptr, kv_indptr, n, nnz, bs = batch
    part_lse, programs = split
    KV_HEADS: gl.constexpr = Q_HEADS // GROUP
    LINES: gl.constexpr = Q_HEADS * TOKENS
    n = n.to(gl.int32)
    block = item % BLOCKS
    c = item // BLOCKS
    few = gl.arange(0, FEW, _each(FEW))
    many = gl.arange(0, BLOCK, _each(BLOCK))
    if bs <= FEW:
        chunk, request, before, falls, every = find_tile(
            qo_indptr, kv_indptr, few, c, n, nnz, bs, programs, SHORTEST, 0, WHOLE, TOKENS
        )
    else:
        chunk, request, before, falls, every = find_tile(
            qo_indptr, kv_indptr, many, c, n, nnz, bs, programs, SHORTEST, 0, WHOLE, TOKENS
        )
    if item == gl.program_id(0):
        for token in range(item, n, gl.num_programs(0)):
            note_none(qo_indptr, part_lse, falls, token, n, bs, programs, LINES)
    zero = item * 0
    token, rows, line, begin, low, high, sees = zero, zero, zero - 1, zero, zero, zero, zero
    if (request < bs) & (c < every):
        tile, begin, low, high, sees = part_of(
            qo_indptr, kv_indptr, request, c, before, falls, n, nnz, chunk, TOKENS, CAUSAL, N
        )
        note(part_lse, gl.arange(0, 128, _each(128)), tile, c, falls, n, programs, LINES)
        token = tile[0]
        rows = tile[1]
        line = gl.where(tile[4] > 1, c, -1)
    kv_head = block // (BLOCKS // KV_HEADS)
    member = block % (BLOCKS // KV_HEADS) * HEADS
    asked = (token, rows, kv_head * GROUP + member, gl.minimum(GROUP - member, HEADS))
    return every * BLOCKS, asked, sees - 1, low, high, begin, kv_head, line


@gluon.jit
def _put(turn, i: gl.constexpr, x):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    turn.slice(i, 1).store(gl.full([1], x, gl.int32, ONE))


@gluon.jit
def _get(turn, i: gl.constexpr):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(turn.slice(i, 1).load(ONE), 0)


@gluon.jit
def tell(turns, done, tile, lowest, low, high, line=None):
    """The next tile after so many, to those who multiply; one of no tokens says that there is none."""
    numbers, full, empty = turns
    mbarrier.wait(empty.index(done & 1), (done >> 1 & 1) ^ 1)
    mine = numbers.index(done & 1)
    _put(mine, 0, tile[1])
    _put(mine, 1, lowest)
    _put(mine, 2, low)
    _put(mine, 3, high)
    _put(mine, 4, tile[0])
    _put(mine, 5, tile[2])
    _put(mine, 6, tile[3])
    if line is not None:
        _put(mine, 7, line)
    gl.thread_barrier()
    mbarrier.arrive(full.index(done & 1))


@gluon.jit
def told(turns, done):
    """(tokens, position of the first, entries from, entries to) of the next tile after so many."""
    numbers, full, _ = turns
    mbarrier.wait(full.index(done & 1), done >> 1 & 1)
    mine = numbers.index(done & 1)
    return _get(mine, 0), _get(mine, 1), _get(mine, 2), _get(mine, 3)


@gluon.jit
def tile_of(turns, done):
    """(first token, tokens, query head, heads) of that tile: read where it is needed, for want of registers."""
    numbers, _, _ = turns
    mine = numbers.index(done & 1)
    return _get(mine, 4), _get(mine, 0), _get(mine, 5), _get(mine, 6)


@gluon.jit
def line_of(turns, done):
    """Of that tile: the line of parts that it is, or -1."""
    numbers, _, _ = turns
    return _get(numbers.index(done & 1), 7)


@gluon.jit
def forget(turns, done):
    """A group needs no more of what it was told of that tile."""
    _, _, empty = turns
    gl.thread_barrier()
    mbarrier.arrive(empty.index(done & 1))
