"""Attention of few queries in one pass over the cache as it lies: no row is gathered, no thread wakes for little work.

An item is a request and one of its key/value heads. Its keys come in blocks: dot products with the query heads of the
group, four at a time, a running maximum, exp, and the values weighted into fp32 sums: by vectors (`_fma`), and for bf16
by the matrix unit where the CPU has one (`_amx`). Of caches beyond `NEAR` the next rows are asked for meanwhile.
Invariant: an offset into the cache is made only of a slot that was compared with its size.

Many queries of one request are matrix products: `MOST` draws the line.
"""

from __future__ import annotations

from array import array
from functools import cache
from math import gcd

import numpy as np
import torch
from torch import Tensor

from hal.backends.cpu import _pool
from hal.backends.cpu._again import Call, about
from hal.backends.cpu._amx import begin_tiles, end_tiles, merge_dims, pack_queries, tile_dots, tile_weigh, tile_weights
from hal.backends.cpu._bits import cast, load, move, shift, store, view
from hal.backends.cpu._call import FORMAT
from hal.backends.cpu._fma import LOG2E, dots, logsum, rescale, soften, weigh
from hal.backends.cpu._index import get, index
from hal.backends.cpu._jit import inline, with_tiles
from hal.backends.cpu._keys import BLOCK, SPREAD, join, list_rows, list_tiles, split
from hal.backends.cpu._pool import run
from hal.backends.cpu._stream import MOST as STREAM_DIMS
from hal.backends.cpu._stream import stream
from hal.backends.cpu._team import take
from hal.backends.cpu._vector import LANES

NEAR, NEAR_TILES = 8 << 20, 6 << 20
"""Bytes of keys and values that are in a cache near enough not to be asked for beforehand."""
TOGETHER, REREAD = 8, 1 << 16
"""Tokens of a request that read a block of keys one after the other, while it is near; elements of its keys and values
up to which each token had better read all."""
GROUP = 16
"""Query heads that share a key/value head; of more, torch makes a matrix product that is faster."""
COST = 4
"""A byte of the cache costs as much as so many that are copied: calls are shared by threads accordingly."""
SHARE = _pool.SHARE // COST
FEWEST = 64
"""Keys whose reading takes as long as what a token costs beside them."""
TURNS = 2
"""Turns of each thread at least, where keys of few requests are split."""
NO_COUNTS, NO_ROOM = array("q"), array("f")
NO_INDEX = index(None)
THIN = 16
"""Rows, tokens times query heads of a group, that are few for a matrix product."""
MOST = {torch.float32: (1 << 16, 1 << 13), torch.bfloat16: (1 << 16, 1 << 9), torch.float16: (1 << 10, 1 << 10)}
"""Tokens times keys of a request up to which a token at a time is faster: of few rows by `THIN`, of more."""


@inline
def clamped(p, wide, i, top):  # type: ignore[no-untyped-def]
    return min(max(get(p, wide, i), 0), top)


@inline
def by_blocks(tokens, keys, group, thin, thick):  # type: ignore[no-untyped-def]
    """Whether `_blocks` is faster, by what `MOST` has for a dtype. A single token never is."""
    return tokens > 1 and tokens * keys > (thin if tokens * group <= THIN else thick)


@inline
def aligned(address):  # type: ignore[no-untyped-def]
    """Vectors that cross a line take twice as long."""
    return (address + 63) // 64 * 64


def _kernel(  # type: ignore[no-untyped-def]
    counter, grain, n,
    q, q_token, q_head, group, kv_heads, dim, v_dim, rows,
    k_cache, k_page, k_row, k_head, v_cache, v_page, v_row, v_head, num_slots, page, page_bits,
    indptr, indptr_64, indices, indices_64, nnz, with_qo, qo, qo_64, out, out_token, out_head, lse, lse_token,
    scale, window, causal, thin, thick, far, pieces, partial, arrived,
):  # fmt: skip
    parts = (group + 3) // 4
    most = parts * (TOGETHER if with_qo else 1)
    # By parts of four heads of a token: logits, what they multiply, queries, the output so far and before it
    # each head's largest logit and sum of weights.
    scratch = np.empty(max(4 * BLOCK, v_dim) + most * (64 + 4 * dim + 4 * v_dim) + 32, np.float32)
    saved = view(aligned(scratch.ctypes.data), "fp32")
    logits = shift(saved, 16)
    state = shift(logits, max(4 * BLOCK, v_dim))
    query = shift(state, most * 48)
    acc = shift(query, most * (16 + 4 * dim))
    ends = shift(acc, -2 * group)
    listed = np.empty(4 * BLOCK, np.int64)
    here = view(listed.ctypes.data, "i64")
    there = shift(here, 2 * BLOCK)
    if TILES:
        # Keys and values that do not lie evenly, weights; of each 16 rows, where they are and how far apart.
        more = np.empty(BLOCK * (dim + v_dim + 16) + 32, np.int16)
        p = view(aligned(more.ctypes.data), "bf16")
        keys = shift(p, BLOCK * 16)
        values = shift(keys, BLOCK * dim)
        spans = np.empty(4 * SPREAD, np.int64)
        k_by = view(spans.ctypes.data, "i64")
        v_by = shift(k_by, 2 * SPREAD)
        if v_dim <= STREAM_DIMS:
            begin_tiles(saved, "stream")
        else:
            begin_tiles(saved, "few")
    begin = take(counter, grain) if grain else 0
    while begin < n:
        for item in range(begin, min(begin + grain, n) if grain else n):
            i, h, piece = item // pieces // kv_heads, item // pieces % kv_heads, item % pieces
            first = clamped(indptr, indptr_64, i, nnz)
            last = max(first, clamped(indptr, indptr_64, i + 1, nnz))
            t_first, t_last = i, i + 1
            if with_qo:
                t_first, t_last = clamped(qo, qo_64, i, rows), clamped(qo, qo_64, i + 1, rows)
                if by_blocks(t_last - t_first, last - first, group, thin, thick):
                    continue
            # A piece of an item is some of its keys, or of its tokens where there may be several.
            if with_qo:
                each = (t_last - t_first + pieces - 1) // pieces
                t_first, t_stop = min(t_first + piece * each, t_last), min(t_first + (piece + 1) * each, t_last)
            else:
                t_stop = t_last
            keys_, values_ = shift(k_cache, h * k_head), shift(v_cache, h * v_head)
            together = TOGETHER if (last - first) * (dim + v_dim) > REREAD else 1
            for t0 in range(t_first, t_stop, together):
                tokens = min(together, t_stop - t0)
                # Keys that all of these tokens see; before them and behind, some see a few.
                own = last - (t_last - t0)
                low = max(first, own + tokens - 1 - window) if window >= 0 else first
                high = own + 1 if causal else last
                if tokens > 1 and low >= high:
                    low, high = last, last
                middle, behind, count = low, high, 1
                if not with_qo:
                    low, high, count = split(low, high, pieces, piece)
                    if piece >= count:
                        continue
                for k in range(tokens):
                    for part in range(parts):
                        heads, w = min(4, group - 4 * part), k * parts + part
                        x = shift(q, (t0 + k) * q_token + (h * group + 4 * part) * q_head)
                        if TILES:
                            pack_queries(cast(shift(query, w * 4 * dim), "bf16"), x, q_head, heads, dim)
                        else:
                            for g in range(heads):
                                for d in range(dim):
                                    store(query, (w * 4 + g) * dim + d, load(x, g * q_head + d))
                        for g in range(LANES):
                            store(state, w * 48 + g, np.float32(-np.inf))
                            store(state, w * 48 + LANES + g, np.float32(0.0))
                fresh = True
                for stretch in range(2 * tokens + 1 if tokens > 1 else 1):
                    w_first, w_last = 0, tokens * parts
                    if stretch:
                        k = (stretch - 1) // 2
                        w_first, w_last = k * parts, (k + 1) * parts
                        low = max(first, own + k - window) if window >= 0 else first
                        high = own + k + 1 if causal else last
                        if stretch % 2:
                            high = min(high, middle)
                        else:
                            low = max(low, behind)
                        if low >= high:
                            continue
                    if TILES:
                        j, m = list_tiles(
                            low, high, indices, indices_64, num_slots, page, page_bits, keys_, k_page, k_row, dim,
                            values_, v_page, v_row, v_dim, here, keys, values, k_by, v_by,
                        )  # fmt: skip
                    else:
                        j, m = list_rows(
                            low, high, indices, indices_64, num_slots, page, page_bits, k_page, k_row, v_page, v_row,
                            here, shift(here, BLOCK),
                        )  # fmt: skip
                    if fresh and (not TILES or not m):
                        for d in range(tokens * parts * 4 * v_dim):
                            store(acc, d, np.float32(0.0))
                        fresh = TILES and m > 0
                    while m:
                        padded, v_at, ahead = (m + 31) // 32 * 32, shift(here, BLOCK), 0
                        if not TILES:
                            j, ahead = list_rows(
                                j, high, indices, indices_64, num_slots, page, page_bits, k_page, k_row, v_page, v_row,
                                there, shift(there, BLOCK),
                            )  # fmt: skip
                        for w in range(w_first, w_last):
                            mine = shift(query, w * 4 * dim)
                            tops = shift(state, w * 48)
                            sums, keep = shift(tops, LANES), shift(tops, 2 * LANES)
                            y = shift(acc, w * 4 * v_dim)
                            heads, asked = min(4, group - 4 * (w % parts)), ahead if far and w == w_first else 0
                            if TILES and v_dim <= STREAM_DIMS:
                                stream(
                                    y, fresh, v_dim, cast(mine, "bf16"), dim, k_by, shift(k_by, SPREAD), v_by,
                                    shift(v_by, SPREAD), m, logits, p, tops, scale, far and w == w_first,
                                )  # fmt: skip
                            elif TILES:
                                for c in range(0, padded, 32):
                                    tile_dots(
                                        shift(logits, 4 * c), cast(mine, "bf16"), dim, shift(k_by, c // LANES),
                                        shift(k_by, SPREAD + c // LANES),
                                    )  # fmt: skip
                                for c in range(4 * m, 4 * padded):
                                    store(logits, c, np.float32(np.inf) if scale < 0 else np.float32(-np.inf))
                                by = scale if scale != 0 else np.float32(2.0**-120)  # as good as 0, and -inf stays
                                tile_weights(p, logits, padded, tops, sums, keep, by)
                                if not fresh:
                                    rescale(y, v_dim, keep, 4)
                                tile_weigh(y, fresh, v_dim, v_by, shift(v_by, SPREAD), padded, p)
                            elif heads == 4:
                                dots(logits, mine, dim, keys_, here, (m + 3) // 4 * 4, 4, there, asked)
                                soften(logits, 4 * m, (4 * m + 15) // 16 * 16, tops, sums, keep, scale, 4)
                                weigh(y, v_dim, values_, v_at, logits, m, keep, 4, shift(there, BLOCK), asked)
                            elif heads == 3:
                                dots(logits, mine, dim, keys_, here, (m + 3) // 4 * 4, 3, there, asked)
                                soften(logits, 4 * m, (4 * m + 15) // 16 * 16, tops, sums, keep, scale, 3)
                                weigh(y, v_dim, values_, v_at, logits, m, keep, 3, shift(there, BLOCK), asked)
                            elif heads == 2:
                                dots(logits, mine, dim, keys_, here, (m + 7) // 8 * 8, 2, there, asked)
                                soften(logits, 2 * m, (2 * m + 15) // 16 * 16, tops, sums, keep, scale, 2)
                                weigh(y, v_dim, values_, v_at, logits, m, keep, 2, shift(there, BLOCK), asked)
                            else:
                                dots(logits, mine, dim, keys_, here, (m + 15) // 16 * 16, 1, there, asked)
                                soften(logits, m, (m + 15) // 16 * 16, tops, sums, keep, scale, 1)
                                weigh(y, v_dim, values_, v_at, logits, m, keep, 1, shift(there, BLOCK), asked)
                        here, there, m, fresh = there, here, ahead, False
                        if TILES:
                            j, m = list_tiles(
                                j, high, indices, indices_64, num_slots, page, page_bits, keys_, k_page, k_row, dim,
                                values_, v_page, v_row, v_dim, here, keys, values, k_by, v_by,
                            )  # fmt: skip
                for k in range(tokens):
                    t, mine = t0 + k, shift(acc, k * parts * 4 * v_dim)
                    for g in range(group):
                        part = (k * parts + g // 4) * 48
                        lanes = 4 if TILES or group - g // 4 * 4 > 2 else group - g // 4 * 4
                        total = np.float32(0.0)
                        for lane in range(g % 4, LANES, lanes):
                            total += load(state, part + LANES + lane)
                        store(ends, g, load(state, part + g % 4))
                        store(ends, group + g, total)
                    if count > 1:
                        size = group * (v_dim + 2)
                        all_ = shift(cast(partial, "fp32"), item // pieces * pieces * size)
                        move(shift(all_, piece * size), ends, size)
                        if take(shift(arrived, item // pieces), 1) < count - 1:
                            continue
                        join(ends, acc, group, v_dim, all_, count)
                    for g in range(group):
                        y = shift(out, t * out_token + (h * group + g) * out_head)
                        total = load(ends, group + g)
                        by = np.float32(1.0) / total if total != 0.0 else np.float32(0.0)
                        x = shift(mine, g * v_dim)
                        if TILES:
                            merge_dims(y, x, v_dim, by)
                        else:
                            for d in range(v_dim):
                                store(y, d, load(x, d) * by)
                        if lse_token:
                            store(cast(lse, "fp32"), t * lse_token + h * group + g, logsum(total, load(ends, g)))
        begin = take(counter, grain) if grain else n
    # Their last use: numba frees an array right after that, whoever still holds its address.
    scratch[0], listed[0] = 0.0, 0
    if TILES:
        end_tiles(saved)
        more[0], spans[0] = 0, 0


VARIANT = {dtype: (FORMAT[dtype],) for dtype in MOST}
TILES = False  # as `with_tiles` has it
_TYPES = (
    "i64 int int  *x int int int int int int int  *x int int int *x int int int int int int "
    "u8 bool u8 bool int bool u8 bool *x int int u8 int  float int bool int int bool int u8 i64"
)
kernel, tile_kernel, kernel_for = with_tiles(_kernel, _TYPES)


@cache
def split_calls(items: int, threads: int) -> int:
    """Into how many pieces the keys of an item are split: each thread has as many turns then, and TURNS at least."""
    if threads == 1 or not 0 < items < TURNS * threads:
        return 1
    each = threads // gcd(items, threads)
    return -(-TURNS * threads // items // each) * each


@cache
def bits(page: int, dims: int) -> int:
    """By how many bits a slot is shifted to give its page; 0: `page` is no power of two."""
    if dims == 3:  # all slots are one page
        return 62
    return page.bit_length() - 1 if page & (page - 1) == 0 else 0


def fits(q: Tensor, k_cache: Tensor, v_cache: Tensor, logit_cap: float) -> bool:
    """Whether the kernel computes this, and best: heads of whole vectors, few a group, a cache of q's dtype, no cap."""
    _, heads, dim = q.shape
    return _fits(q.dtype, k_cache.dtype, heads, k_cache.shape[-2], dim, v_cache.shape[-1], logit_cap)


def _fits(
    dtype: torch.dtype, cached: torch.dtype, heads: int, kv_heads: int, dim: int, v_dim: int, logit_cap: float
) -> bool:
    return cached is dtype and heads <= GROUP * kv_heads and not (dim % LANES or v_dim % LANES or logit_cap)


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor | None,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    sliding_window: int,
    logit_cap: float,
    causal: bool,
    call: Call | None,
) -> bool:
    """Either op, for all requests of one query (qo_indptr None: all of them), or of few by `MOST`. False: not `fits`.

    Each attribute of a tensor is asked for once: the first layer of a step that has new sizes waits for it.
    """
    dtype, k_shape = q.dtype, k_cache.shape
    rows, heads, dim = q.shape
    kv_heads, v_dim = k_shape[-2], v_cache.shape[-1]
    if not _fits(dtype, k_cache.dtype, heads, kv_heads, dim, v_dim, logit_cap):
        return False
    k_strides, v_strides = k_cache.stride(), v_cache.stride()
    if len(k_shape) == 4:
        size, page = k_shape[:2]
        size *= page
        k_page, k_row, k_head, _ = k_strides
        v_page, v_row, v_head, _ = v_strides
    else:
        size = k_shape[0]
        page, k_page, v_page = max(1, size), 0, 0  # all slots are one page
        k_row, k_head, _ = k_strides
        v_row, v_head, _ = v_strides
    bs, (nnz,) = kv_indptr.shape[0] - 1, kv_indices.shape
    q_strides, out_strides = q.stride(), out.stride()
    group, items = heads // max(1, kv_heads), bs * kv_heads
    # So that who does what seldom changes as requests grow.
    work = cached = about.py_func(nnz) * (dim + v_dim) * dtype.itemsize
    pieces, room, counts = 1, NO_ROOM, NO_COUNTS
    if rows > bs:
        work = max(work, FEWEST * bs * (dim + v_dim) * dtype.itemsize) * -(-rows // max(1, bs))
    if work * kv_heads > SHARE and (rows > bs or qo_indptr is None):
        pieces = split_calls(items, torch.get_num_threads())
    if pieces > 1 and qo_indptr is None:  # how many pieces of an item are done, and what they have found
        counts, room = array("q", bytes(8 * items)), array("f", bytes(4 * items * pieces * group * (v_dim + 2)))
        if call is not None:
            call = call._replace(room=(len(room), items, room.buffer_info()[0], counts.buffer_info()[0]))
    chosen = kernel_for(dtype, dim, v_dim)
    run(
        chosen, VARIANT[dtype], items * pieces, work * COST // max(1, bs * pieces),
        (
            q.data_ptr(), q_strides[0], q_strides[1], group, kv_heads, dim, v_dim, rows,
            k_cache.data_ptr(), k_page, k_row, k_head, v_cache.data_ptr(), v_page, v_row, v_head,
            size, page, bits(page, len(k_shape)),
            kv_indptr.data_ptr(), kv_indptr.dtype is torch.int64, kv_indices.data_ptr(),
            kv_indices.dtype is torch.int64, nnz, qo_indptr is not None,
            *(NO_INDEX if qo_indptr is None else index(qo_indptr)),
            out.data_ptr(), out_strides[0], out_strides[1], 0 if lse is None else lse.data_ptr(),
            0 if lse is None else heads, scale * LOG2E, min(sliding_window, 1 << 40), causal, *MOST[dtype],
            cached * kv_heads > (NEAR_TILES if chosen is tile_kernel else NEAR),
            pieces, room.buffer_info()[0], counts.buffer_info()[0],
        ),
        call=call,
    )  # fmt: skip
    return True
