# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""How decode_attention's keys are split, and merged: equal parts of the requests, found by each program from kv_indptr
alone; the program that is the last of a request's to be done merges what they left.

`each` is ``arange(0, BLOCK)``, of so many requests as a program looks at together. The caller makes it, since in Gluon
it needs a layout; everything else here compiles as Triton and as Gluon.

Of requests with more than one query: `_tiles.py`.
"""

import triton
import triton.language as tl

from hal.backends.cuda._attention import LN2, entry, lengths


@triton.jit
def find(
    kv_indptr, each, c, nnz, bs, programs, window, SHORTEST: tl.constexpr, FEW_PARTS: tl.constexpr,
    WINDOW: tl.constexpr, LONGER: tl.constexpr = 0, SPLIT_FIRST: tl.constexpr = True,
):  # fmt: skip
    """(how many keys a part has at most, the request that program c has a part of, or bs, the parts before that
    request's, which of all parts it is).

    A part has all keys divided by `programs`, so that parts <= programs + bs; up to twice as many, if then there are no
    more parts than `programs`, which run at once: a second wave for a few of them costs a whole one, and fewer that run
    at once hardly any time. Who looks at all requests at once keeps their lengths, and asks for each width beside the
    others: until this is known, a program has nothing to fetch. With SPLIT_FIRST the first programs have the parts of
    requests that have several, which take longest (`_split_first`); where none has, as of many short ones, program c
    has request c, and nothing more is to be looked for.
    """
    BLOCK: tl.constexpr = each.shape[0]
    if bs <= BLOCK:
        n = seen(kv_indptr, each, nnz, bs, window, WINDOW)
        total = total_of(n, 1)
        most = even(total, programs, shortest(total, SHORTEST, FEW_PARTS), LONGER)
        if (bs > 1) & (bs < programs):
            most = wider(n, 1, most, programs)
    else:
        n = each * 0
        total = tl.cast(0, tl.int64)
        for b in range(0, bs, 2 * BLOCK):  # two at a time, as each waits for memory, and for the sums of all lanes
            some = tl.maximum(seen(kv_indptr, b + each, nnz, bs, window, WINDOW), 0)
            more = tl.maximum(seen(kv_indptr, b + BLOCK + each, nnz, bs, window, WINDOW), 0)
            total += tl.sum((some >> 16) + (more >> 16)).to(tl.int64) << 16
            total += tl.sum((some & 0xFFFF) + (more & 0xFFFF))
            if SPLIT_FIRST:
                n = tl.maximum(n, tl.maximum(some, more))
        most = even(total, programs, shortest(total, SHORTEST, FEW_PARTS), LONGER)
    chunk = tl.minimum(most, tl.maximum(nnz, 1)).to(tl.int32)
    request, before, part = c, c, c
    if SPLIT_FIRST:
        if bs <= BLOCK:
            several, split = _several(n, chunk)
        else:
            several, split = tl.cast(0, tl.int32), tl.cast(0, tl.int32)
            if tl.max(n) > chunk:
                for b in range(0, bs, BLOCK):
                    requests, parts = _several(seen(kv_indptr, b + each, nnz, bs, window, WINDOW), chunk)
                    several += requests
                    split += parts
        if several > 0:
            request, before, part = _split_first(
                kv_indptr, n, each, c, nnz, bs, programs, window, chunk, several, split, WINDOW
            )
    else:
        request, before, _ = _place(kv_indptr, n, each, c, nnz, bs, window, chunk, -1, 0, WINDOW, False)
    return chunk, request, before, part


@triton.jit
def _split_first(
    kv_indptr, n, each, c, nnz, bs, programs, window, chunk, several, split, WINDOW: tl.constexpr
):  # fmt: skip
    """(request, parts before, part) of program c where the first programs have all parts of requests that have several;
    then comes a program for each request, of which those of one part are left.

    Long parts begin first: nothing is left to run beside those that are still under way at the end. Parts of requests
    that have several may be more than `programs`, which the grid has beside the requests; then these have most of the
    keys, each request has a program for its first part, and other parts come last. `n`: lengths, if all are looked at
    at once.
    """
    apart = 0
    nth = c
    turn = tl.cast(-1, tl.int32)
    if several < bs:
        turn = c - split
        if split > programs:
            apart = 1
            nth = c - bs
            turn = tl.where(c < bs, c, -1)
    own = 0
    if turn >= 0:
        own = counts(seen(kv_indptr, turn, nnz, bs, window, WINDOW), chunk)
    request, before, part = turn, turn, turn
    if (turn < 0) | ((own > 1) & (apart > 0)):
        request, before, held = _place(kv_indptr, n, each, nth, nnz, bs, window, chunk, turn, apart, WINDOW, True)
        part = before + tl.where(turn < 0, apart + nth - held, 0)
    elif own > 1:
        request = bs
    return request, before, part


@triton.jit
def _several(n, chunk):
    """(how many requests of n keys each have several parts, their parts), by one sum: parts are no more than programs
    and requests."""
    parts = counts(n, chunk)
    both = tl.sum(tl.where(parts > 1, parts + (1 << 20), 0))
    return both >> 20, both & 0xFFFFF


@triton.jit
def _place(
    kv_indptr, n, each, c, nnz, bs, window, chunk, turn, apart, WINDOW: tl.constexpr, SPLIT_FIRST: tl.constexpr
):  # fmt: skip
    """(the request that part c is of, the parts of those before it, how many of these are counted by c). With
    SPLIT_FIRST c counts parts of requests that have several, all but the first `apart` of each; or, where `turn` is not
    below 0, that is the request."""
    BLOCK: tl.constexpr = each.shape[0]
    if bs <= BLOCK:
        request, before, held, _ = _before(n, each, c, bs, chunk, 0, turn, apart, SPLIT_FIRST)
    else:
        request = tl.cast(0, tl.int32)
        before = tl.cast(0, tl.int32)
        held = tl.cast(0, tl.int32)
        base = tl.cast(0, tl.int32)
        for b in range(0, bs, BLOCK):
            more = seen(kv_indptr, b + each, nnz, bs, window, WINDOW)
            requests, parts, counted, every = _before(more, b + each, c, bs, chunk, base, turn, apart, SPLIT_FIRST)
            request += requests
            before += parts
            held += counted
            base += every
    return request, before, held


@triton.jit
def _before(n, i, c, bs, chunk, base, turn, apart, SPLIT_FIRST: tl.constexpr):
    """(how many of requests `i`, of n keys each, are before that of program c, their parts, those of them that c
    counts, those that it counts of all)."""
    parts = counts(n, chunk)
    held = parts
    if SPLIT_FIRST:
        held = tl.where(parts > 1, parts - apart, 0)
    stop = base + tl.cumsum(held, 0)
    mine = stop <= c
    if SPLIT_FIRST:
        mine = tl.where(turn < 0, mine, i < turn)
    mine = mine & (i < bs)
    counted = tl.where(mine, held, 0)
    return tl.sum(mine.to(tl.int32)), tl.sum(tl.where(mine, parts, 0)), tl.sum(counted), tl.sum(held)


@triton.jit
def find_one(
    kv_indptr, c, nnz, programs, window, SHORTEST: tl.constexpr, FEW_PARTS: tl.constexpr, WINDOW: tl.constexpr,
    LONGER: tl.constexpr = 0,
):  # fmt: skip
    """`find`, where there is one request: sums over requests, of which each is a step that the next waits for, are not
    needed, and until they are there a program has nothing to fetch."""
    n = tl.maximum(entry(kv_indptr, 1, nnz) - entry(kv_indptr, 0, nnz), 0)
    if WINDOW:
        n = tl.minimum(n, window + 1)
    most = even(n.to(tl.int64), programs, shortest(n, SHORTEST, FEW_PARTS), LONGER)
    chunk = tl.minimum(most, tl.maximum(nnz, 1)).to(tl.int32)
    return chunk, (counts(n, chunk) <= c).to(tl.int32), tl.cast(0, tl.int32), c


@triton.jit
def seen(kv_indptr, i, nnz, bs, window, WINDOW: tl.constexpr):
    """How many keys of each request are seen, int32; -1 for what has no part."""
    n = tl.where(i < bs, lengths(kv_indptr, i, i < bs, nnz), -1)
    if WINDOW:
        n = tl.minimum(n, window + 1)
    return n


@triton.jit
def total_of(n, tiles):
    """The sum of what is not below 0, `tiles` times each, int64, by two sums of 32 bits: one in 64 takes twice the
    steps for each half."""
    n = tl.maximum(n, 0)
    return (tl.sum((n >> 16) * tiles).to(tl.int64) << 16) + tl.sum((n & 0xFFFF) * tiles)


@triton.jit
def shortest(total, SHORTEST: tl.constexpr, FEW_PARTS: tl.constexpr):
    """Keys that a part has at least: SHORTEST; up to twice as many where they would be more than FEW_PARTS parts, which
    take longer to merge than a part of twice the keys."""
    if FEW_PARTS:
        each = tl.minimum(total, 2 * SHORTEST * FEW_PARTS).to(tl.int32) // FEW_PARTS
        return tl.maximum(each, SHORTEST)
    else:
        return SHORTEST


@triton.jit
def even(total, programs, least, LONGER: tl.constexpr):
    """Keys of a part where `programs` share them evenly, but at least so many; more of few, where LONGER is how many
    query heads a key head has: merging what more programs leave takes longer than these save. In 32 bits: a division in
    64 is a call."""
    fits = total < 2**31 - 1
    most = (tl.where(fits, total, 1).to(tl.int32) - 1) // programs + 1
    if LONGER:
        few = tl.minimum(most, 48 * LONGER)
        most = tl.maximum(most, tl.minimum(few + few * LONGER // 8, 48 * LONGER))
    return tl.where(fits, tl.maximum(most, least), 2**31 - 1)


@triton.jit
def wider(n, tiles, most, programs):
    """The least of `most` and up to twice as many of which parts run at once; `most`, if of none. `tiles`: how often
    each request is split."""
    given = tl.minimum(most, 2**30 - 1)
    w1, w2, w3, w4 = given + given // 8, given + given // 4, given + given // 2, given * 2
    best = tl.where(tl.sum(counts(n, w4) * tiles) <= programs, w4, most)
    best = tl.where(tl.sum(counts(n, w3) * tiles) <= programs, w3, best)
    best = tl.where(tl.sum(counts(n, w2) * tiles) <= programs, w2, best)
    best = tl.where(tl.sum(counts(n, w1) * tiles) <= programs, w1, best)
    return tl.where(tl.sum(counts(n, most) * tiles) <= programs, most, best)


@triton.jit
def counts(n, chunk):
    """The parts of n keys each, at most `chunk` a part: 1 for none, 0 where n is below 0.

    The quotients are at most the programs, far below 2^18: so the estimate, which errs by 2^-21 and is made less by
    2^-20, is theirs or one less. Division of integers is five times as many instructions.
    """
    last = tl.maximum(n - 1, 0)
    parts = (last.to(tl.float32) * ((1.0 - 2.0**-20) / chunk.to(tl.float32))).to(tl.int32)
    parts += (last - parts * chunk >= chunk).to(tl.int32)
    return tl.where(n >= 0, parts + 1, 0)


@triton.jit
def unsplit(c, nnz):
    """`find`, where each request is one part: nothing is to be added up."""
    return tl.cast(tl.maximum(nnz, 1), tl.int32), c, c, c


@triton.jit
def keys_of(kv_indptr, request, c, before, nnz, chunk, window, STEP: tl.constexpr, WINDOW: tl.constexpr):
    """(where the keys of part c's request begin, its parts, the first key of c, the key after its last), in steps."""
    begin = entry(kv_indptr, request, nnz)
    length = tl.maximum(entry(kv_indptr, request + 1, nnz) - begin, 0)
    if WINDOW:
        seen = tl.minimum(length, window + 1)
        begin += length - seen
        length = seen
    parts = counts(length, chunk)
    own = (tl.maximum(length - 1, 0) // parts + STEP) // STEP * STEP
    low = (c - before) * own
    return begin, parts, low, tl.minimum(low + own, length)


@triton.jit
def merged(
    part, part_lse, first, apart, parts, heads, rows, d, there, Q_HEADS: tl.constexpr, DV: tl.constexpr,
    HALVES: tl.constexpr = False, unit=0, most=None,
):  # fmt: skip
    """(``[heads, 1, DV]`` normalised sums, ``[heads, 1]`` log-sum-exps) of parts first, first + apart, ..., in order.

    `rows` of them are read together, ``arange(0, ROWS)``; `heads`, `rows` and elements `d` are a tile's three dims.
    What is first, how far apart and how many they are may be of each head, ``[heads, 1]``, up to `most`.
    HALVES: sums are fp16 in the first half of a line, times what word `unit` of the other half says.
    """
    top = heads[:, None].to(tl.float32) * 0.0 + float("-inf")
    total = heads[:, None].to(tl.float32) * 0.0
    acc = total[:, :, None] + d[None, None, :].to(tl.float32) * 0.0
    for c in range(0, parts if most is None else most, rows.shape[0]):
        i = c + rows[None, :]
        at = (first + i * apart).to(tl.int64) * Q_HEADS + heads[:, None]
        ok = (i < parts) & there[:, None]
        sums = tl.load(part_lse + at, ok, other=float("-inf"))
        mask = ok[:, :, None]
        if d.shape[0] > DV:
            mask = mask & (d < DV)[None, None, :]
        if HALVES:
            halves = part.to(tl.pointer_type(tl.float16), bitcast=True) + (2 * at * DV)[:, :, None]
            x = tl.load(halves + d[None, None, :], mask, other=0.0).to(tl.float32)
            times = tl.load(part + (at * DV + (DV // 2 + unit)), ok, other=0.0)
        else:
            x = tl.load(part + (at * DV)[:, :, None] + d[None, None, :], mask, other=0.0)
        new = tl.maximum(top, tl.max(sums, 1, keep_dims=True))
        base = tl.where(new == float("-inf"), 0.0, new)
        w = tl.exp2(sums - base)
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(w, 1, keep_dims=True)
        if HALVES:
            w *= times
        acc = acc * keep[:, :, None] + tl.sum(x * w[:, :, None], 1, keep_dims=True)
        top = new
    some = total != 0.0
    total = tl.where(some, total, 1.0)
    return acc / total[:, :, None], tl.where(some, top + tl.log2(total), float("-inf"))


@triton.jit
def merge(
    out, lse, part, part_lse, counters, c, before, request, parts, block, heads, rows, d, there, out_head,
    Q_HEADS: tl.constexpr, BLOCKS: tl.constexpr, DV: tl.constexpr, LSE: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Count part c of a request as done, and merge those that it is the last of: up to TOGETHER into one, and so on
    until there is one, in an order that does not depend on who is last. `out` and `lse` are the request's.

    A request has a counter for each of its parts but one. They are found and left at 0.
    """
    i = c - before
    n = parts
    apart = 1
    counters += (before - request) * BLOCKS + block
    while n > 1:
        group = i // TOGETHER
        size = tl.minimum(n - group * TOGETHER, TOGETHER)
        n = (n + TOGETHER - 1) // TOGETHER
        tl.debug_barrier()  # what all warps have left is to be seen by who sees the count
        if tl.atomic_add(counters + group * BLOCKS, 1.0, sem="acq_rel", scope="gpu") == size - 1:
            tl.store(counters + group * BLOCKS, 0.0)
            first = before + group * TOGETHER * apart
            acc, sums = merged(part, part_lse, first, apart, size, heads, rows, d, there, Q_HEADS, DV)
            mask = there[:, None, None] & (d < DV)[None, None, :]
            if n == 1:
                to = out + (heads * out_head)[:, None, None] + d[None, None, :]
                tl.store(to, acc.to(out.dtype.element_ty), mask)
                if LSE:
                    tl.store(lse + heads[:, None], sums * LN2, there[:, None])
            else:
                tl.debug_barrier()  # all warps have read what is written over
                line = first.to(tl.int64) * Q_HEADS + heads
                tl.store(part + line[:, None, None] * DV + d[None, None, :], acc, mask)
                tl.store(part_lse + line[:, None], sums, there[:, None])
            counters += n * BLOCKS
            i = group
            apart *= TOGETHER
        else:
            n = 0


@triton.jit
def notes(part_lse, bs, programs, Q_HEADS: tl.constexpr):
    """Behind the sums: int32 pairs of a request's parts and those before it."""
    return part_lse + (tl.cast(bs, tl.int64) + programs) * Q_HEADS


@triton.jit
def note(part_lse, request, c, before, parts, bs, programs, Q_HEADS: tl.constexpr):
    """Tell the launch that merges of a request's parts, so that it need not look at lengths; the first part's program
    does, where there may be more than one."""
    if (c == before) & (programs > 1):
        at = notes(part_lse, bs, programs, Q_HEADS) + 2 * tl.cast(request, tl.int64)
        tl.store(at, parts.to(tl.float32, bitcast=True))
        tl.store(at + 1, before.to(tl.float32, bitcast=True))
