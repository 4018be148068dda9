# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated, attr-defined"
"""How decode_attention's keys are split: equal parts of the requests, found by each program from kv_indptr alone.

`each` is ``arange(0, BLOCK)``, of so many requests as a program looks at together. The caller makes it, since in Gluon
it needs a layout; everything else here compiles as Triton and as Gluon.
"""

import triton
import triton.language as tl

from hal.backends.cuda._attention import entry, lengths


@triton.jit
def chunk_of(kv_indptr, each, nnz, bs, programs, window, SHORTEST: tl.constexpr, WINDOW: tl.constexpr):
    """How many keys a part has at most: all keys divided by `programs`, so that parts <= programs + bs; more, if with
    more there are no more parts than `programs`, which run at once: a second wave for a few of them costs a whole one.
    In 32 bits: a division in 64 is a call.
    """
    BLOCK: tl.constexpr = each.shape[0]
    total = tl.cast(0, tl.int64)
    for b in range(0, bs, BLOCK):
        i = b + each
        n = lengths(kv_indptr, i, i < bs, nnz)
        if WINDOW:
            n = tl.minimum(n, window + 1)
        total += tl.sum(n.to(tl.int64))
    fits = total < 2**31 - 1
    most = (tl.where(fits, total, 1).to(tl.int32) - 1) // programs + 1
    most = tl.where(fits, tl.maximum(most, SHORTEST), 2**31 - 1)
    if (bs > 1) & (bs < programs):
        count = tl.sum(counts(kv_indptr, each, nnz, bs, most, window, WINDOW))
        if (count > programs) & (bs <= BLOCK):
            most = wider(most, count, programs)
            count = tl.sum(counts(kv_indptr, each, nnz, bs, most, window, WINDOW))
            most = tl.where(count > programs, wider(most, count, programs), most)
    return tl.minimum(most, tl.maximum(nnz, 1)).to(tl.int32)


@triton.jit
def wider(most, count, programs):
    """`most` times count / programs, or about that; never less."""
    about = most.to(tl.float32) * (count.to(tl.float32) / programs.to(tl.float32))
    return tl.maximum(most, tl.minimum(about, 2.0**30).to(tl.int32) + 1)


@triton.jit
def counts(kv_indptr, i, nnz, bs, chunk, window, WINDOW: tl.constexpr):
    n = lengths(kv_indptr, i, i < bs, nnz)
    if WINDOW:
        n = tl.minimum(n, window + 1)
    return tl.where(i < bs, tl.maximum(n - 1, 0) // chunk + 1, 0)


@triton.jit
def seek(kv_indptr, each, c, nnz, bs, chunk, window, WINDOW: tl.constexpr):
    """(the request that part c is of, or bs, and the parts before that request's)."""
    BLOCK: tl.constexpr = each.shape[0]
    request = tl.cast(0, tl.int32)
    before = tl.cast(0, tl.int32)
    base = tl.cast(0, tl.int32)
    for b in range(0, bs, BLOCK):
        n = counts(kv_indptr, b + each, nnz, bs, chunk, window, WINDOW)
        stop = base + tl.cumsum(n, 0)
        mine = (stop <= c) & (n > 0)
        request += tl.sum(mine.to(tl.int32))
        before += tl.sum(tl.where(mine, n, 0))
        base += tl.sum(n)
    return request, before


@triton.jit
def keys_of(kv_indptr, request, c, before, nnz, chunk, window, STEP: tl.constexpr, WINDOW: tl.constexpr):
    """(where the keys of part c's request begin, its parts, the first key of c, the key after its last), in steps."""
    begin = entry(kv_indptr, request, nnz)
    length = tl.maximum(entry(kv_indptr, request + 1, nnz) - begin, 0)
    if WINDOW:
        seen = tl.minimum(length, window + 1)
        begin += length - seen
        length = seen
    parts = tl.maximum(length - 1, 0) // chunk + 1
    own = (tl.maximum(length - 1, 0) // parts + STEP) // STEP * STEP
    low = (c - before) * own
    return begin, parts, low, tl.minimum(low + own, length)


@triton.jit
def ahead(kv_indptr, each, request, nnz, bs, chunk, window, WINDOW: tl.constexpr):
    """Parts of the requests before this one."""
    BLOCK: tl.constexpr = each.shape[0]
    before = tl.cast(0, tl.int32)
    for b in range(0, request, BLOCK):
        i = b + each
        n = counts(kv_indptr, i, nnz, bs, chunk, window, WINDOW)
        before += tl.sum(tl.where(i < request, n, 0))
    return before
