# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, attr-defined"
"""Which tiles of queries a program of extend_attention on Hopper does, one after the other.

As many programs as run at once share all tiles of all requests, the last first, which are the longest of a causal
prompt: who has fetched a tile's rows takes the next by a counter, finds it while those are multiplied, and tells those
who multiply (`_told.py`). Where there are few tiles, and requests of many keys, these are in parts, each of which is a
tile here (`find_part`), and another launch merges what is left of them. Where there are many, requests of far more keys
than the mean are begun first, in parts that are merged by who is the last to leave one: else one program is still at
such a tile when all others are done.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hal.backends.cuda import _attention, _tiles

L2 = gl.constexpr(32 * 2**20)
"""Bytes of keys and values that programs may read at a time: of the 50 MB on the chip, most."""
SHORTEST = gl.constexpr(256)
"""Keys that a part has at least."""
WHOLE = gl.constexpr(1024)
"""No request is split if none has more keys: what is split takes another launch."""
LONGER = gl.constexpr(2)
"""A request of more than so many times the mean of keys is long, where requests differ."""
BESIDE = gl.constexpr(256)
"""As many keys take as long as what else there is to a tile."""
LINES_EACH = gl.constexpr(3)
"""Parts of tiles of long requests, for each tile of all key heads that runs at once; where they would be more, none is
split."""
PACKED = gl.constexpr(1024)
"""More than there are lines, or parts of a tile: by which three of these are one number."""
UNSPLIT = gl.constexpr(2**31 - 1)
"""Keys that a part has at most, where a request is one."""
MOST_ITEMS = gl.constexpr(2**30)
"""Of more there is no memory for the queries."""

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
    items = gl.minimum(every.to(gl.int64) * BLOCKS, MOST_ITEMS).to(gl.int32)
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
def _uniform(x):
    """A number that all lanes have, so that the assembler knows it: after a branch by one that it does not know to be
    the same, it takes what comes for divergent, and the loop that fetches then takes a third more instructions."""
    return gl.inline_asm_elementwise(
        "redux.sync.max.s32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _count(many):
    """Their sum, `_uniform`: one instruction makes it so of 32 numbers, which are one of each lane."""
    total = gl.sum(many)
    if many.shape[0] > 32:
        total = _uniform(total)
    return total


@gluon.jit
def _is_long(length, total, bs):
    """Which requests are, of all keys."""
    return length.to(gl.float32) * bs.to(gl.float32) > total.to(gl.float32) * LONGER


@gluon.jit
def _work(many, length):
    """What tiles of requests take, in keys of one tile."""
    return gl.sum(many.to(gl.float32) * (gl.maximum(length, 0) + BESIDE).to(gl.float32))


@gluon.jit
def _chunk(work, programs):
    """Keys that a part has at most: three quarters of what each program does. As it is begun first, what is not more
    does not end last; and it takes time to leave parts and to merge them."""
    each = gl.minimum(0.75 * work / programs.to(gl.float32), 2.0**30)
    return gl.maximum(each.to(gl.int32), SHORTEST)


@gluon.jit
def _parts_of(length, chunk):
    return (gl.maximum(length, 1) - 1) // chunk + 1


@gluon.jit
def _part_of(c, nth, length, chunk):
    """(which tile of its request it is, the part that it is of that: `unpacked`, or -1) of the c-th part of long
    requests' tiles, the nth of its own request's; below 0, of a tile of one that is not long."""
    parts = gl.where(c >= 0, _parts_of(length, chunk), 1)
    part = -1
    if parts > 1:
        part = (c + PACKED * (nth % parts + PACKED * parts)).to(gl.int32)
        nth = nth // parts
    return nth, part


@gluon.jit
def unpacked(part):
    """(the line of it, which part of its tile it is, how many these are, on lines side by side)."""
    return part % PACKED, part // PACKED % PACKED, part // (PACKED * PACKED)


@gluon.constexpr_function
def _most(BLOCK):
    """Tiles that the rows of n tokens are fewer than, where those of BLOCK requests, whatever these are said to begin
    at, are counted in int32 together with the requests."""
    return 2**29 // BLOCK**2


@gluon.jit
def _fit(n, bs, HEADS: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr):
    return (bs <= BLOCK) & (n * HEADS // ROWS < _most(BLOCK))


@gluon.jit
def _requests(first, BLOCK: gl.constexpr):
    return first + gl.arange(0, BLOCK, _each(BLOCK))


@gluon.jit
def _tiles_of(qo_indptr, i, n, bs, HEADS: gl.constexpr, ROWS: gl.constexpr):
    """How many each request has, of a block of heads. Of 2^31 rows there is no memory for the queries."""
    return (lengths(qo_indptr, i, i < bs, n) * HEADS + (ROWS - 1)) // ROWS


@gluon.jit
def _survey_at_once(
    batch, programs, HEADS: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, LONG_FIRST: gl.constexpr
):  # fmt: skip
    """As `survey`, of requests that `_fit` BLOCK."""
    qo_indptr, kv_indptr, n, nnz, bs = batch
    i = _requests(0, BLOCK)
    many = _tiles_of(qo_indptr, i, n, bs, HEADS, ROWS)
    every = _count(many)
    early = every
    chunk = every * 0 + UNSPLIT
    if LONG_FIRST:
        length = lengths(kv_indptr, i, i < bs, nnz)
        tiles = gl.where(_is_long(length, entry(kv_indptr, bs, nnz), bs), many, 0)
        longs = _count(tiles)
        if longs > 0:
            early -= longs
            split = _uniform(_chunk(_work(many, length), programs))
            parts = _parts_of(length, split)
            lines = _count(gl.minimum(tiles, PACKED) * gl.minimum(parts, PACKED))
            if lines <= programs * LINES_EACH:
                every = early + lines
                chunk = split
    return every, early, chunk


@gluon.jit
def survey(
    batch, programs, HEADS: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, FEW: gl.constexpr,
    LONG_FIRST: gl.constexpr,
):  # fmt: skip
    """Once for all tiles: (how many there are, from which of them on are those of long requests, or parts of them, how
    many keys a part has at most)."""
    n = batch[2]
    bs = batch[4]
    if _fit(n, bs, HEADS, ROWS, FEW):
        every, early, chunk = _survey_at_once(batch, programs, HEADS, ROWS, FEW, LONG_FIRST)
    elif _fit(n, bs, HEADS, ROWS, BLOCK):
        every, early, chunk = _survey_at_once(batch, programs, HEADS, ROWS, BLOCK, LONG_FIRST)
    elif _fit(n, bs, HEADS, ROWS, 2 * BLOCK):
        every, early, chunk = _survey_at_once(batch, programs, HEADS, ROWS, 2 * BLOCK, LONG_FIRST)
    else:
        total = n * 0
        for b in range(0, bs, 2 * BLOCK):
            total += gl.sum(_tiles_of(batch[0], _requests(b, 2 * BLOCK), n, bs, HEADS, ROWS).to(gl.int64))
        every = _uniform(gl.minimum(total, MOST_ITEMS).to(gl.int32))
        early = every
        chunk = every * 0 + UNSPLIT
    return every, early, chunk


@gluon.jit
def _find_at_once(
    c, batch, found, HEADS: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, LONG_FIRST: gl.constexpr
):  # fmt: skip
    """As `_find`, of requests that `_fit` BLOCK."""
    qo_indptr, kv_indptr, n, nnz, bs = batch
    every, early, chunk = found
    PAIR: gl.constexpr = 2 * BLOCK
    ONCE: gl.constexpr = BLOCK <= 32  # then to count takes less than to ask again
    i = _requests(0, BLOCK)
    many = _tiles_of(qo_indptr, i, n, bs, HEADS, ROWS)
    if ONCE:
        first, news = _starts(qo_indptr, i, i < bs, n)
        begin, length = _starts(kv_indptr, i, i < bs, nnz)
    if LONG_FIRST:  # noqa: SIM102, what is known when it is compiled stands alone
        if early < every:
            keys = lengths(kv_indptr, i, i < bs, nnz)
            long = _is_long(keys, entry(kv_indptr, bs, nnz), bs)
            which = c >= early
            many = gl.where(long == which, many * gl.where(which, _parts_of(keys, chunk), 1), 0)
            c = gl.where(which, c - early, c)
    upto = gl.associative_scan(many, 0, _add)
    if ONCE:
        mine = (upto > c) & (upto - many <= c)
        nth = c - _count(gl.where(mine, upto - many, 0))
        first = _count(gl.where(mine, first, 0))
        news = _count(gl.where(mine, news, 0))
        begin = _count(gl.where(mine, begin, 0))
        length = _count(gl.where(mine, length, 0))
    else:
        # Two numbers are counted as one, since it is to count that takes longest.
        both = _count(gl.where(upto <= c, many * PAIR + 1, 0))
        nth = c - both // PAIR
        first, news, begin, length = _ends(batch, both % PAIR)
    return nth, first, news, begin, length


@gluon.jit
def _ends(batch, request):
    """(where a request's tokens start, how many, where its entries start, how many)."""
    qo_indptr, kv_indptr, n, nnz, _ = batch
    first = entry(qo_indptr, request, n).to(gl.int32)
    news = entry(qo_indptr, request + 1, n).to(gl.int32) - first
    begin = entry(kv_indptr, request, nnz).to(gl.int32)
    return first, news, begin, entry(kv_indptr, request + 1, nnz).to(gl.int32) - begin


@gluon.jit
def _starts(indptr, i, there, size):
    """(where each request starts, how many it has), int32."""
    start = within(gl.load(indptr + i, there, other=0), size).to(gl.int32)
    return start, within(gl.load(indptr + i + 1, there, other=0), size).to(gl.int32) - start


@gluon.jit
def _find(c, batch, HEADS: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr):
    """Of tile c: (which of its request's tiles, or parts of them, it is, where the request's tokens start, how many,
    where its entries start, how many)."""
    n = batch[2]
    bs = batch[4]
    request = c * 0
    for b in range(0, bs, BLOCK):
        i = _requests(b, BLOCK)
        many = _tiles_of(batch[0], i, n, bs, HEADS, ROWS).to(gl.int64)
        # Those before the one that is looked for, if all up to here are.
        before = (gl.associative_scan(many, 0, _add) <= c) & (i < bs) & (request == b)
        request += gl.sum(before.to(gl.int32))
        c -= gl.sum(gl.where(before, many, 0)).to(gl.int32)
    first, news, begin, length = _ends(batch, request)
    return c, first, news, begin, length


@gluon.jit
def find(
    item, batch, found, window, Q_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr, HEADS: gl.constexpr,
    ROWS: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, BLOCK: gl.constexpr,
    FEW: gl.constexpr, ROW: gl.constexpr, LONG_FIRST: gl.constexpr,
):  # fmt: skip
    """Of an item, where `survey` found so much: (how many there are, (first token, rows, first query head, as many of
    that token's rows as are the tile's before), position of the first token, entries from, entries to, where the
    request's entries start, key head, the part of a tile that it is: `unpacked`, or -1)."""
    n = batch[2]
    nnz = batch[3]
    bs = batch[4]
    every, early, chunk = found
    KV_HEADS: gl.constexpr = Q_HEADS // GROUP
    items, block, turn = _place(item, every, nnz, bs, KV_HEADS, BLOCKS, ROW)
    c = every - 1 - turn
    if _fit(n, bs, HEADS, ROWS, FEW):
        nth, first, news, begin, length = _find_at_once(c, batch, found, HEADS, ROWS, FEW, LONG_FIRST)
    elif _fit(n, bs, HEADS, ROWS, BLOCK):
        nth, first, news, begin, length = _find_at_once(c, batch, found, HEADS, ROWS, BLOCK, LONG_FIRST)
    elif _fit(n, bs, HEADS, ROWS, 2 * BLOCK):
        nth, first, news, begin, length = _find_at_once(c, batch, found, HEADS, ROWS, 2 * BLOCK, LONG_FIRST)
    else:
        nth, first, news, begin, length = _find(c, batch, HEADS, ROWS, 2 * BLOCK)
    part = item * 0 - 1
    if LONG_FIRST:  # noqa: SIM102, what is known when it is compiled stands alone
        if early < every:
            nth, part = _part_of(c - early, nth, length, chunk)
    length = gl.maximum(length, 0)
    kv_head = block // (BLOCKS * GROUP // Q_HEADS)
    member = block % (BLOCKS * GROUP // Q_HEADS) * HEADS
    row = nth * ROWS
    rows = gl.minimum(news * HEADS - row, ROWS)
    if GROUP > HEADS:  # then a tile is of one token
        rows = gl.minimum(rows, GROUP - member)
    token = row // HEADS
    lowest = length - news + token
    low = 0
    high = length
    if CAUSAL:
        high = gl.minimum(length, gl.maximum(length - news + (row + rows - 1) // HEADS + 1, 0))
    if WINDOW:
        low = gl.maximum(lowest - window, 0)
    if LONG_FIRST:  # noqa: SIM102, what is known when it is compiled stands alone
        # The first is known to be the same in all lanes.
        if early < every:  # noqa: SIM102
            if part >= 0:
                _, mine, parts = unpacked(part)
                own = (gl.maximum(high - 1, 0) // parts + N) // N * N
                low = mine * own
                high = gl.minimum(low + own, high)
    tile = (first + token, rows, kv_head * GROUP + member, row - token * HEADS)
    return items, tile, lowest, low, high, begin, kv_head, part


@gluon.jit
def find_part(
    item, batch, split, window, Q_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr,
    HEADS: gl.constexpr, TOKENS: gl.constexpr, N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK: gl.constexpr, FEW: gl.constexpr,
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
            qo_indptr, kv_indptr, few, c, n, nnz, bs, programs, SHORTEST, 0, WHOLE, TOKENS, window, WINDOW
        )
    else:
        chunk, request, before, falls, every = find_tile(
            qo_indptr, kv_indptr, many, c, n, nnz, bs, programs, SHORTEST, 0, WHOLE, TOKENS, window, WINDOW
        )
    if item == gl.program_id(0):
        for token in range(item, n, gl.num_programs(0)):
            note_none(qo_indptr, part_lse, falls, token, n, bs, programs, LINES)
    zero = item * 0
    token, rows, line, begin, low, high, sees = zero, zero, zero - 1, zero, zero, zero, zero
    if (request < bs) & (c < every):
        tile, begin, low, high, sees = part_of(
            qo_indptr, kv_indptr, request, c, before, falls, n, nnz, chunk, TOKENS, CAUSAL, N, window, WINDOW
        )
        note(part_lse, gl.arange(0, 128, _each(128)), tile, c, falls, n, programs, LINES)
        token = tile[0]
        rows = tile[1]
        line = gl.where(tile[4] > 1, c, -1)
    kv_head = block // (BLOCKS // KV_HEADS)
    member = block % (BLOCKS // KV_HEADS) * HEADS
    asked = (token, rows * gl.minimum(GROUP - member, HEADS), kv_head * GROUP + member, 0)
    return every * BLOCKS, asked, sees - 1, low, high, begin, kv_head, line
