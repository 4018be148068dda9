"""Attention of many queries of a request: blocks of queries times blocks of keys, as matrix products.

An item is a block of a request's tokens, and a key/value head: their query heads are the rows. Keys and values are
packed, a block of them at a time, and used by all of these rows, a few at a time: scores, softmax with a running
maximum, and the weighted values, summed in fp32. Products are by the matrix unit for bf16 where the CPU has one
(`_tiles`), else by
vectors (`_panels`). Invariant: an offset into the cache is made only of a slot that was compared with its size.
"""

from __future__ import annotations

from array import array

import numpy as np
import torch
from torch import Tensor

from hal.backends.cpu._again import Call
from hal.backends.cpu._amx import begin_tiles, end_tiles
from hal.backends.cpu._bits import cast, load, move, shift, store, view
from hal.backends.cpu._call import FORMAT
from hal.backends.cpu._fma import LOG2E, logsum
from hal.backends.cpu._index import get
from hal.backends.cpu._jit import inline, with_tiles
from hal.backends.cpu._online import aligned, bits
from hal.backends.cpu._panels import pack_keys, pack_values, panel_scores, panel_weigh, soften_row, stretch
from hal.backends.cpu._pool import run
from hal.backends.cpu._team import take
from hal.backends.cpu._tiles import sort_row, tile_keys, tile_scores, tile_sums, tile_values
from hal.backends.cpu._vector import LANES

KEYS = 256
"""Keys in a block, a multiple of 64."""
ROWS = 512
"""Rows of an item, about: what is packed for them is paid for by them."""


@inline
def _place(slot, num_slots, page, page_bits, far, near):  # type: ignore[no-untyped-def]
    """Where a slot's row is; -1: no key is there."""
    if slot < 0 or slot >= num_slots:
        return -1
    whole = slot >> page_bits if page_bits else slot // page
    return whole * far + (slot - whole * page) * near


def _kernel(  # type: ignore[no-untyped-def]
    counter, grain, n,
    q, q_token, q_head, group, kv_heads, dim, v_dim,
    k_cache, k_page, k_row, k_head, v_cache, v_page, v_row, v_head, num_slots, page, page_bits,
    table, indices, indices_64, out, out_token, out_head, lse, lse_token, scale, window, causal, tokens,
):  # fmt: skip
    step, each = (32, 32) if TILES else (24, 16)  # rows that are done together; keys
    width = KEYS + LANES  # rows of scores are apart so that they do not share sets of the cache
    most = (tokens * group + step - 1) // step * step
    numbers = np.empty(step * width + KEYS + most * (2 + v_dim + dim) + KEYS * (dim + v_dim) + 64, np.float32)
    scores = view(aligned(numbers.ctypes.data), "fp32")
    alive = shift(scores, step * width)
    acc = shift(alive, KEYS)
    packed_k = shift(acc, most * v_dim)
    packed_v = shift(packed_k, KEYS * dim)
    query = shift(packed_v, KEYS * v_dim)
    tops = shift(query, most * dim)
    sums = shift(tops, most)
    listed = np.empty(2 * KEYS, np.int64)
    k_at = view(listed.ctypes.data, "i64")
    v_at = shift(k_at, KEYS)
    if TILES:
        saved = np.empty(64, np.uint8)
        begin_tiles(view(saved.ctypes.data, "u8"), "many")
    begin = take(counter, grain) if grain else 0
    while begin < n:
        for item in range(begin, min(begin + grain, n) if grain else n):
            h = item % kv_heads
            mine = shift(table, item // kv_heads * 5)
            t_first, t_last, stop, first, length = (
                load(mine, 0),
                load(mine, 1),
                load(mine, 2),
                load(mine, 3),
                load(mine, 4),
            )
            keys_, values_ = shift(k_cache, h * k_head), shift(v_cache, h * v_head)
            rows = (t_last - t_first) * group
            padded = (rows + step - 1) // step * step
            for r in range(padded):
                store(tops, r, np.float32(-np.inf))
                store(sums, r, np.float32(0.0))
                x = shift(
                    q, (t_first + min(r, rows - 1) // group) * q_token + (h * group + min(r, rows - 1) % group) * q_head
                )
                if TILES:
                    move(cast(shift(query, r * (dim // 2)), "bf16"), cast(x, "bf16"), dim)
                else:
                    for d in range(dim):
                        store(query, r * dim + d, load(x, d))
            for d in range(padded * v_dim):
                store(acc, d, np.float32(0.0))
            own_first, own_last = length - (stop - t_first), length - (stop - t_last) - 1
            low = max(0, own_first - window) if window >= 0 else 0
            high = min(length, own_last + 1) if causal else length
            for base in range(low, high, KEYS):
                count = min(KEYS, high - base)
                whole_ = True  # all keys are there
                room = (count + each - 1) // each * each
                for c in range(room):
                    at = -1
                    v_there = -1
                    if c < count:
                        slot = get(indices, indices_64, first + base + c)
                        at = _place(slot, num_slots, page, page_bits, k_page, k_row)
                        v_there = _place(slot, num_slots, page, page_bits, v_page, v_row)
                    if at < 0 and c < count:
                        whole_ = False
                    store(k_at, c, at)
                    store(v_at, c, v_there)
                    store(alive, c, np.float32(1.0) if at >= 0 else np.float32(0.0))
                if TILES:
                    tile_keys(cast(packed_k, "bf16"), keys_, k_at, room, dim)
                    tile_values(cast(packed_v, "bf16"), values_, v_at, room, v_dim)
                else:
                    pack_keys(packed_k, keys_, k_at, room, dim, KEYS)
                    pack_values(packed_v, values_, v_at, room, v_dim)
                for r in range(0, padded, step):
                    end = min(r + step, rows)
                    own_0, own_1 = own_first + r // group - base, own_first + (end - 1) // group - base
                    seen = min(count, own_1 + 1) if causal else count
                    if seen <= 0 or (window >= 0 and own_0 - window >= count):
                        continue
                    weighed = seen
                    seen = (seen + each - 1) // each * each
                    all_ = (
                        whole_
                        and seen <= count
                        and not (causal and own_0 < seen - 1)
                        and not (window >= 0 and own_1 - window > 0)
                    )
                    if TILES:
                        tile_scores(
                            scores, width, cast(shift(query, r * (dim // 2)), "bf16"), cast(packed_k, "bf16"), seen, dim
                        )
                    else:
                        panel_scores(scores, width, shift(query, r * dim), packed_k, seen, dim, KEYS)
                    for i in range(r, end):
                        row = shift(scores, (i - r) * width)
                        own = own_first + i // group - base
                        begin_, end_ = 0, seen
                        full = seen // 64 * 64
                        if not all_:
                            begin_ = max(0, own - window) if window >= 0 else 0
                            end_ = min(seen, own + 1) if causal else seen
                            full = max(0, min(end_, count)) // 64 * 64 if whole_ and begin_ == 0 else 0
                        if TILES:
                            keep = soften_row(
                                row,
                                cast(row, "bf16"),
                                seen,
                                full,
                                begin_,
                                end_,
                                alive,
                                shift(tops, i),
                                shift(sums, i),
                                scale,
                            )
                        else:
                            keep = soften_row(
                                row, row, seen, full, begin_, end_, alive, shift(tops, i), shift(sums, i), scale
                            )
                        if keep != np.float32(1.0) and base > low:  # before, there is nothing
                            stretch(shift(acc, i * v_dim), v_dim, keep)
                    if TILES:
                        tile_sums(
                            shift(acc, r * v_dim), v_dim, cast(scores, "bf16"), width, cast(packed_v, "bf16"), seen
                        )
                    else:
                        panel_weigh(shift(acc, r * v_dim), v_dim, scores, width, packed_v, weighed)
            for i in range(rows):
                t, g = t_first + i // group, h * group + i % group
                total = load(sums, i)
                by = np.float32(1.0) / total if total != 0.0 else np.float32(0.0)
                x, y = shift(acc, i * v_dim), shift(out, t * out_token + g * out_head)
                if TILES:
                    sort_row(y, x, v_dim, by)
                else:
                    for d in range(v_dim):
                        store(y, d, load(x, d) * by)
                if lse_token:
                    store(cast(lse, "fp32"), t * lse_token + g, logsum(total, load(tops, i)))
        begin = take(counter, grain) if grain else n
    # Their last use: numba frees an array right after that, whoever still holds its address.
    numbers[0], listed[0] = 0.0, 0
    if TILES:
        end_tiles(view(saved.ctypes.data, "u8"))
        saved[0] = 0


TILES = False  # as `with_tiles` has it
_TYPES = (
    "i64 int int  *x int int int int int int  *x int int int *x int int int int int int "
    "i64 u8 bool *x int int u8 int float int bool int"
)
kernel, tile_kernel, kernel_for = with_tiles(_kernel, _TYPES)


def attend(
    spans: list[tuple[int, int, int, int]],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indices: Tensor,
    out: Tensor,
    lse: Tensor | None,
    scale: float,
    sliding_window: int,
    causal: bool,
    call: Call | None,
) -> None:
    """Requests of `extend_attention`: (first row of q, the row after its last, first of kv_indices, how many)."""
    heads, dim = q.shape[1:]
    kv_heads, v_dim = k_cache.shape[-2], v_cache.shape[-1]
    group = heads // kv_heads
    total = sum(stop - begin for begin, stop, _, _ in spans)
    # Blocks of tokens, fewer where there would be too few for the threads; of whole tiles, the longest first.
    tokens = max(8, min(ROWS // group, total * kv_heads // (4 * torch.get_num_threads())))
    tokens -= tokens % 32 if tokens > 32 else 0
    blocks = [
        (t, min(t + tokens, stop), stop, first, length)
        for begin, stop, first, length in spans
        for t in range(begin, stop, tokens)
    ]
    if causal:
        blocks.sort(key=lambda b: b[2] - b[1] - b[4])
    table = array("q", [number for block in blocks for number in block])
    k_strides, v_strides = k_cache.stride(), v_cache.stride()
    if k_cache.ndim == 4:
        page, size = k_cache.shape[1], k_cache.shape[0] * k_cache.shape[1]
    else:
        size = page = k_cache.shape[0]
        k_strides, v_strides = (0, *k_strides), (0, *v_strides)
    work = sum((stop - t) * length for t, stop, _, _, length in blocks) * group
    run(
        kernel_for(q.dtype, dim, v_dim), (FORMAT[q.dtype],), len(blocks) * kv_heads, work // len(blocks) * dim // 2,
        (
            q.data_ptr(), *q.stride()[:2], group, kv_heads, dim, v_dim,
            k_cache.data_ptr(), *k_strides[:3], v_cache.data_ptr(), *v_strides[:3], size, page,
            bits(page, k_cache.ndim), table.buffer_info()[0], kv_indices.data_ptr(), kv_indices.dtype is torch.int64,
            out.data_ptr(), *out.stride()[:2], 0 if lse is None else lse.data_ptr(), 0 if lse is None else heads,
            scale * LOG2E, min(sliding_window, 1 << 40), causal, tokens,
        ),
        call=None if call is None else call._replace(table=table),
    )  # fmt: skip
