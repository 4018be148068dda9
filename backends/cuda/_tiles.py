# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated"
"""How the query tokens of requests are cut into tiles, and their keys into parts (`_split.py`): found by each program
from qo_indptr and kv_indptr alone, as decode_attention's are.

A tile is up to TOKENS tokens of one request, as many as fit the kernel's rows with their query heads, so that keys are
read once for all of them. All tiles of a request have as many parts, and those over the same keys run side by side, so
that most of them find the rows in the L2. Where a request ends before it begins, requests may overlap, and their tiles
be more than there are programs: then each token is a tile of one part, of the first request that has it.
"""

import triton
import triton.language as tl

from hal.backends.cuda import _split
from hal.backends.cuda._attention import entry, lengths, within
from hal.backends.cuda._shares import BEGUN
from hal.backends.cuda._split import counts, even, notes, shortest, total_of, wider


@triton.jit
def find(
    qo_indptr, kv_indptr, each, c, n, nnz, bs, programs, SHORTEST: tl.constexpr, FEW_PARTS: tl.constexpr,
    WHOLE: tl.constexpr, TOKENS: tl.constexpr, window=0, WINDOW: tl.constexpr = False,
):  # fmt: skip
    """(how many keys a part has at most, the request that c is a part of a tile of, or bs, those of requests before,
    whether a request ends before it begins, how many there are of all: no more than tiles and `programs`). Where no
    tile has more than WHOLE keys, none is split. WINDOW: a token sees `window` keys before its own, no more."""
    BLOCK: tl.constexpr = each.shape[0]
    request = tl.cast(0, tl.int32)
    before = tl.cast(0, tl.int32)
    falls = tl.cast(0, tl.int32)
    every = tl.cast(0, tl.int32)
    chunk = tl.maximum(nnz, 1).to(tl.int32)
    if bs <= BLOCK:
        tiles, keys, chunk, falls, _ = _cut(
            qo_indptr, kv_indptr, each, n, nnz, bs, programs, SHORTEST, FEW_PARTS, WHOLE, TOKENS, window, WINDOW
        )
        request, before, every = _placed(tiles, keys, chunk, each, c, bs)
    else:
        total = tl.cast(0, tl.int64)
        longest = tl.cast(0, tl.int32)
        for b in range(0, bs, BLOCK):
            tiles, falling = _tiles(qo_indptr, b + each, n, bs, TOKENS)
            keys = _seen(lengths(kv_indptr, b + each, b + each < bs, nnz), window, TOKENS, WINDOW)
            total += total_of(keys, tiles)
            longest = tl.maximum(longest, tl.max(keys))
            falls |= falling
        if programs > 1:
            split = tl.minimum(even(total, programs, shortest(total, SHORTEST, FEW_PARTS), 0), chunk)
            chunk = tl.where(longest > WHOLE, split, chunk) if WHOLE else split
        for b in range(0, bs, BLOCK):
            tiles, _ = _tiles(qo_indptr, b + each, n, bs, TOKENS)
            keys = _seen(lengths(kv_indptr, b + each, b + each < bs, nnz), window, TOKENS, WINDOW)
            parts = counts(keys, chunk) * tiles
            stop = every + tl.cumsum(parts, 0)
            mine = (stop <= c) & (b + each < bs)
            request += tl.sum(mine.to(tl.int32))
            before += tl.sum(tl.where(mine, parts, 0))
            every += tl.sum(parts)
    if falls != 0:
        request = _owner(qo_indptr, each, c, n, bs)
        every = n
    return chunk, request, before, falls != 0, every


@triton.jit
def _seen(keys, window, TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """How many of a request's keys a tile of its tokens sees at most."""
    if WINDOW:
        keys = tl.minimum(keys, window + TOKENS)
    return keys


@triton.jit
def _cut(
    qo_indptr, kv_indptr, each, n, nnz, bs, programs, SHORTEST: tl.constexpr, FEW_PARTS: tl.constexpr,
    WHOLE: tl.constexpr, TOKENS: tl.constexpr, window=0, WINDOW: tl.constexpr = False,
):  # fmt: skip
    """Of requests that are looked at at once: (tiles of each and keys of one of them, how many keys a part has at most,
    whether one ends before it begins, the keys of all tiles)."""
    tiles, falls = _tiles(qo_indptr, each, n, bs, TOKENS)
    keys = _seen(lengths(kv_indptr, each, each < bs, nnz), window, TOKENS, WINDOW)
    chunk = tl.maximum(nnz, 1).to(tl.int32)
    total = tl.cast(0, tl.int64)
    if programs > 1:
        total = total_of(keys, tiles)
        most = even(total, programs, shortest(total, SHORTEST, FEW_PARTS), 0)
        split = tl.minimum(wider(keys, tiles, most, programs), chunk)
        chunk = tl.where(tl.max(keys) > WHOLE, split, chunk) if WHOLE else split
    return tiles, keys, chunk, falls, total


@triton.jit
def _placed(tiles, keys, chunk, each, c, bs):
    """(the request that c is a part of a tile of, the parts of those before, of all)."""
    parts = counts(keys, chunk) * tiles
    stop = tl.cumsum(parts, 0)
    mine = (stop <= c) & (each < bs)
    return tl.sum(mine.to(tl.int32)), tl.max(tl.where(mine, stop, 0)), tl.max(stop)


@triton.jit
def find_shares(
    qo_indptr, kv_indptr, few, many, c, n, nnz, bs, programs, SHORTEST: tl.constexpr, FEW_PARTS: tl.constexpr,
    TOKENS: tl.constexpr, STEP: tl.constexpr, SLACK: tl.constexpr,
):  # fmt: skip
    """(keys, share, request, which tile of it, tiles before, before, falls): `find`; or, where equal parts would leave
    programs idle that run at once, by shares as in `_shares.py`: of all tiles of query tokens one behind the other,
    each as long as its request."""
    if bs <= few.shape[0]:
        keys, share, request, tile, unit, before, falls = _find_shares(
            qo_indptr, kv_indptr, few, c, n, nnz, bs, programs, SHORTEST, FEW_PARTS, TOKENS, STEP, SLACK
        )
    else:
        keys, share, request, tile, unit, before, falls = _find_shares(
            qo_indptr, kv_indptr, many, c, n, nnz, bs, programs, SHORTEST, FEW_PARTS, TOKENS, STEP, SLACK
        )
    return keys, share, request, tile, unit, before, falls


@triton.jit
def _find_shares(
    qo_indptr, kv_indptr, each, c, n, nnz, bs, programs, SHORTEST: tl.constexpr, FEW_PARTS: tl.constexpr,
    TOKENS: tl.constexpr, STEP: tl.constexpr, SLACK: tl.constexpr,
):  # fmt: skip
    share, tile, unit = c * 0, c * 0, c * 0
    if bs > each.shape[0]:
        chunk, request, before, falls, _ = find(
            qo_indptr, kv_indptr, each, c, n, nnz, bs, programs, SHORTEST, FEW_PARTS, 0, TOKENS
        )
    else:
        tiles, keys, chunk, fell, total = _cut(
            qo_indptr, kv_indptr, each, n, nnz, bs, programs, SHORTEST, FEW_PARTS, 0, TOKENS
        )
        request, before, every = _placed(tiles, keys, chunk, each, c, bs)
        falls = fell != 0
        if falls:
            request = _owner(qo_indptr, each, c, n, bs)
        elif programs > 1:
            part = (tl.minimum(chunk, tl.max(keys)) + (STEP - 1)) // STEP
            waves = (every - 1) // programs + 1
            even_share = (tl.minimum(total, 2**30).to(tl.int32) // STEP + every) // programs
            if (total < 2**30) & (waves * part > even_share + SLACK):
                own = tl.where(tiles > 0, BEGUN + (tl.maximum(keys, 1) + (STEP - 1)) // STEP, 0)
                ends = tl.cumsum(own * tiles, 0)
                share = (tl.max(ends) - 1) // programs + 1
                low = c * share
                ended = (ends <= low) & (each < bs)
                request = tl.sum(ended.to(tl.int32))
                before = tl.max(tl.where(ended, ends, 0))
                whole = tl.maximum(tl.max(tl.where(each == request, own, 0)), 1)
                tile = (low - before) // whole
                unit = tl.sum(tl.where(ended, tiles, 0)) + tile
                before += tile * whole
                if before + BEGUN >= low + share:
                    request = bs
    return chunk, share, request, tile, unit, before, falls


@triton.jit
def _tiles(qo_indptr, i, n, bs, TOKENS: tl.constexpr):
    """(the tiles of each request, whether one of them ends before it begins)."""
    first = within(tl.load(qo_indptr + i, i < bs, other=0), n)
    tokens = within(tl.load(qo_indptr + i + 1, i < bs, other=0), n) - first
    return (tl.maximum(tokens, 0) + (TOKENS - 1)) // TOKENS, tl.max((tokens < 0).to(tl.int32))


@triton.jit
def _owner(qo_indptr, each, token, n, bs):
    """The first request that has a token, or bs."""
    found = bs
    for b in range(0, bs, each.shape[0]):
        i = b + each
        first = within(tl.load(qo_indptr + i, i < bs, other=0), n)
        stop = within(tl.load(qo_indptr + i + 1, i < bs, other=0), n)
        found = tl.minimum(found, tl.min(tl.where((token >= first) & (token < stop), i, bs)))
    return found


@triton.jit
def find_own(
    qo_indptr, kv_indptr, few, many, c, n, nnz, bs, programs, window, SHORTEST: tl.constexpr, FEW_PARTS: tl.constexpr,
    LONGER: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr, SPLIT_FIRST: tl.constexpr,
):  # fmt: skip
    """What program c of the kernel that loads into lanes is for, as `find` has it, without how many there are of all: a
    part of a tile of up to TOKENS query tokens; 0: of a request (`_split.py`). Requests are looked at by `few` at once,
    where there are no more, or by `many`. The first programs have parts of requests that have several where no more
    than SPLIT_FIRST requests are looked at at once."""
    falls = c < 0
    part = c
    if TOKENS:
        if bs <= few.shape[0]:
            chunk, request, before, falls, _ = find(
                qo_indptr, kv_indptr, few, c, n, nnz, bs, programs, SHORTEST, FEW_PARTS, 0, TOKENS, window, WINDOW
            )
        else:
            chunk, request, before, falls, _ = find(
                qo_indptr, kv_indptr, many, c, n, nnz, bs, programs, SHORTEST, FEW_PARTS, 0, TOKENS, window, WINDOW
            )
    elif programs == 1:
        chunk, request, before, part = _split.unsplit(c, nnz)
    elif bs == 1:
        chunk, request, before, part = _split.find_one(
            kv_indptr, c, nnz, programs, window, SHORTEST, FEW_PARTS, WINDOW, LONGER
        )
    elif bs <= few.shape[0]:
        chunk, request, before, part = _split.find(
            kv_indptr, few, c, nnz, bs, programs, window, SHORTEST, FEW_PARTS, WINDOW, LONGER,
            few.shape[0] <= SPLIT_FIRST,
        )  # fmt: skip
    else:
        chunk, request, before, part = _split.find(
            kv_indptr, many, c, nnz, bs, programs, window, SHORTEST, FEW_PARTS, WINDOW, LONGER,
            many.shape[0] <= SPLIT_FIRST,
        )  # fmt: skip
    return chunk, request, before, part, falls


@triton.jit
def idle(qo_indptr, few, many, c, n, bs, programs, TOKENS: tl.constexpr):
    """Whether program c has no part, by its number: there are more programs than tiles and parts, so that there is one
    for each token where a request ends before it begins. To be told so takes half of what `find` does."""
    none = c >= (n + (TOKENS - 1)) // TOKENS + bs + programs
    if none:
        falls = c * 0
        if bs <= few.shape[0]:
            _, falls = _tiles(qo_indptr, few, n, bs, TOKENS)
        else:
            for b in range(0, bs, many.shape[0]):
                _, falling = _tiles(qo_indptr, b + many, n, bs, TOKENS)
                falls |= falling
        none = falls == 0
    return none


@triton.jit
def part_of(
    qo_indptr, kv_indptr, request, c, before, falls, n, nnz, chunk, TOKENS: tl.constexpr, CAUSAL: tl.constexpr,
    STEP: tl.constexpr, window=0, WINDOW: tl.constexpr = False,
):  # fmt: skip
    """Of c: ((first token of its tile, tokens, tiles of the request, which part it is, parts), where the request's keys
    begin, the first key of c, the key after its last, how many keys the tile's first token sees; each next token one
    more, if CAUSAL, as it is where there is a WINDOW: then those are counted from the request's first key)."""
    first = entry(qo_indptr, request, n)
    tokens = entry(qo_indptr, request + 1, n) - first
    begin = entry(kv_indptr, request, nnz)
    keys = tl.maximum(entry(kv_indptr, request + 1, nnz) - begin, 0)
    tiles = tl.maximum(tokens + (TOKENS - 1), 1) // TOKENS
    at = tl.where(falls, c - first, (c - before) % tiles * TOKENS)
    rows = tl.where(falls, 1, tl.minimum(tokens - at, TOKENS))
    parts = tl.where(falls, 1, counts(_seen(keys, window, TOKENS, WINDOW), chunk))
    part = tl.where(falls, 0, (c - before) // tiles)
    sees = keys
    last = keys
    if CAUSAL:
        sees = keys - tokens + at + 1
        last = tl.maximum(sees + rows - 1, 0)
    lowest = 0
    if WINDOW:
        lowest = tl.maximum(sees - 1 - window, 0)
    own = (tl.maximum(last - lowest - 1, 0) // parts + STEP) // STEP * STEP
    low = lowest + part * own
    return (first + at, rows, tiles, part, parts), begin, low, tl.minimum(low + own, last), sees


@triton.jit
def share_of(
    qo_indptr, kv_indptr, request, tile, c, before, share, n, nnz, TOKENS: tl.constexpr, CAUSAL: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """`part_of`, of a tile that program c has a share of; then `before` of the next tile, and the tiles of the
    request. The parts of a tile follow each other."""
    first = entry(qo_indptr, request, n)
    tokens = entry(qo_indptr, request + 1, n) - first
    begin = entry(kv_indptr, request, nnz)
    keys = tl.maximum(entry(kv_indptr, request + 1, nnz) - begin, 0)
    at = tile * TOKENS
    rows = tl.minimum(tokens - at, TOKENS)
    sees = keys
    last = keys
    if CAUSAL:
        sees = keys - tokens + at + 1
        last = tl.maximum(sees + rows - 1, 0)
    whole = (tl.maximum(keys, 1) + (STEP - 1)) // STEP
    start = before + BEGUN
    after = start + whole
    leads = start // share
    parts = (after - 1) // share - leads + 1
    low = tl.maximum(c * share - start, 0) * STEP
    high = tl.minimum(tl.minimum((c + 1) * share - start, whole) * STEP, last)
    return (first + at, rows, 1, c - leads, parts), begin, low, high, sees, after, (tokens + (TOKENS - 1)) // TOKENS


@triton.jit
def after(qo_indptr, request, tile, tiles, n, bs, TOKENS: tl.constexpr):
    """(request, tile) of the tile that follows, of a request that has tokens, or (bs, 0)."""
    tile += 1
    if tile >= tiles:
        tile = 0
        request += 1
        while (request < bs) & (entry(qo_indptr, request + 1, n) <= entry(qo_indptr, request, n)):
            request += 1
    return request, tile


@triton.jit
def note(part_lse, each, tile, c, falls, n, programs, LINES: tl.constexpr):
    """Tell the launch that merges, of each token of a tile: its parts, the first of them, how far each is behind the
    one before, and where in the tile the token is. The program of the first part does."""
    token, rows, apart, part, parts = tile
    if (part == 0) & (programs > 1) & ~falls:
        at = notes(part_lse, n, programs, LINES) + 4 * (token + each)
        mine = each < rows
        zero = each * 0
        tl.store(at, (zero + parts).to(tl.float32, bitcast=True), mine)
        tl.store(at + 1, (zero + c).to(tl.float32, bitcast=True), mine)
        tl.store(at + 2, (zero + apart).to(tl.float32, bitcast=True), mine)
        tl.store(at + 3, each.to(tl.float32, bitcast=True), mine)


@triton.jit
def note_none(qo_indptr, part_lse, falls, token, n, bs, programs, LINES: tl.constexpr):
    """The same of a token that may be in no request, or of which nothing is split: no parts."""
    if (token < n) & (programs > 1):
        none = (token < entry(qo_indptr, 0, n)) | (token >= entry(qo_indptr, bs, n))
        if falls | none:
            tl.store(notes(part_lse, n, programs, LINES) + 4 * token, 0.0)


@triton.jit
def row_at(r, token, head, GROUP: tl.constexpr, TOKENS: tl.constexpr):
    """Where row r of a tile begins: a query head's, or that of a token and its query head."""
    if TOKENS > 1:
        which = token_of(r, GROUP, TOKENS)
        return which * token + (r - which * GROUP) * head
    else:
        return r * head


@triton.jit
def token_of(r, GROUP: tl.constexpr, TOKENS: tl.constexpr):
    """Which of a tile's tokens row r is of, ``r // GROUP``: what a quotient by no power of two needs is kept in
    registers over the loop, which has none left."""
    if GROUP & (GROUP - 1) == 0:
        return r // GROUP
    else:
        token = r * 0
        for t in tl.static_range(1, TOKENS):
            token += (r >= t * GROUP).to(token.dtype)
        return token
