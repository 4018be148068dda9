# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, attr-defined"
"""How a tile of extend_attention's kernel for Hopper is left by a group of warps: what is found of its 64 rows.

Of all of a tile's keys that is its outputs. Of a part of them it is sums in fp32, which another launch merges
(`_merge.py`), or, where few requests are split (`_turns.find`), the group that is the last of its rows' to be done.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from hal.backends.cuda._attention import LN2
from hal.backends.cuda._fetch import ROWS, behind, query
from hal.backends.cuda._told import forget, tile_of

SHIFT = gl.constexpr(15)
"""Weights in fp16 are up to 2^SHIFT: what is above 2^-29 of the largest is as exact as fp16 can have it."""
ABSENT = gl.constexpr(float("-inf"))
TOGETHER = gl.constexpr(4)
"""Parts that are read at once, as each waits for memory."""


@gluon.jit
def _log_sums(top, total, FP8: gl.constexpr):
    """Of weights, in units of log 2."""
    some = total != 0.0
    if FP8:
        total *= 2.0**-SHIFT
    sums = top + gl.log2(gl.where(some, total, 1.0))
    return gl.where(some, sums, ABSENT)


@gluon.constexpr_function
def _rows_of(D):
    """[rows, elements]: 16 bytes of 16 bits a thread, whole rows side by side."""
    return gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def _columns(D):
    """Of sums that are merged at once. With twice as many registers are put aside, if not in the loop that multiplies,
    and then the assembler orders that otherwise: 3 % slower."""
    return 32 if D <= 128 else 16


@gluon.jit
def leave(
    found, where, out, lse, mine, v_factor, r, out_row, out_head, Q_HEADS: gl.constexpr, HEADS: gl.constexpr,
    WIDTH: gl.constexpr, LSE: gl.constexpr, UNIT: gl.constexpr, FP8: gl.constexpr, OWN: gl.constexpr,
):  # fmt: skip
    """A tile's outputs: by way of shared memory, where there is none left that of the queries, so that they leave in
    rows of whole sectors."""
    acc, top, total = found
    turns, done, begin, q_empty = where
    D: gl.constexpr = acc.shape[1]
    share = v_factor / gl.where(total != 0.0, total, 1.0)
    ROW: gl.constexpr = _rows_of(D)
    to: gl.constexpr = out.dtype.element_ty
    mine = mine._reinterpret(to, [ROWS, D], mine.layout)
    mine.store((acc * gl.convert_layout(share, gl.SliceLayout(1, acc.type.layout))[:, None]).to(to))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, ROW))
    rows = row // 8 * 8 + (begin + row % 8)
    tile = tile_of(turns, done)
    at, head, asked = query(rows, tile, HEADS)
    d = gl.arange(0, D, gl.SliceLayout(0, ROW))[None, :]
    left = mine.load(ROW)
    if not OWN:
        gl.thread_barrier()
        mbarrier.arrive(q_empty)
    some = asked[:, None]
    if D > WIDTH:
        some = some & (d < WIDTH)
    gl.store(out + ((at * out_row + head * out_head)[:, None] * UNIT + d), left, some)
    forget(turns, done)
    if LSE:
        at, head, asked = query(r, tile, HEADS)
        gl.store(lse + (at * Q_HEADS + head), _log_sums(top, total, FP8) * LN2, asked)


@gluon.jit
def _line_of(r, head, tile, Q_HEADS: gl.constexpr, HEADS: gl.constexpr):
    """Where rows of a tile are among the lines of a part: of each of its tokens, one for each query head."""
    return behind(r, tile[3], HEADS) // HEADS * Q_HEADS + head


@gluon.jit
def leave_part(
    found, where, part, part_lse, line, v_factor, r, Q_HEADS: gl.constexpr, HEADS: gl.constexpr, LINES: gl.constexpr,
    WIDTH: gl.constexpr, FP8: gl.constexpr, OWN: gl.constexpr,
):  # fmt: skip
    """What is found over a part of a tile's keys, for the merge: a row is a token's of the tile, and a head's."""
    acc, top, total = found
    turns, done, begin, q_empty = where
    SUMS: gl.constexpr = acc.type.layout
    tile = tile_of(turns, done)
    forget(turns, done)
    if not OWN:
        gl.thread_barrier()
        mbarrier.arrive(q_empty)
    _, head, asked = query(r, tile, HEADS)
    first = line.to(gl.int64) * LINES
    line = _line_of(r, head, tile, Q_HEADS, HEADS)
    gl.store(part_lse + (first + line), _log_sums(top, total, FP8), asked)
    share = gl.convert_layout(v_factor / gl.where(total != 0.0, total, 1.0), gl.SliceLayout(1, SUMS))
    r = begin + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
    _, head, asked = query(r, tile, HEADS)
    d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, SUMS))[None, :]
    at = _line_of(r, head, tile, Q_HEADS, HEADS)[:, None] * WIDTH + d
    some = asked[:, None]
    if acc.shape[1] > WIDTH:
        some = some & (d < WIDTH)
    gl.store(part + first * WIDTH + at, acc * share[:, None], some)


@gluon.jit
def merge_last(
    tile, begin, first, parts, counter, out, lse, part, part_lse, out_row, out_head, Q_HEADS: gl.constexpr,
    HEADS: gl.constexpr, LINES: gl.constexpr, WIDTH: gl.constexpr, LSE: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """Count a part of a group's rows as left, and merge all of them if it is the last, in an order that does not depend
    on which one is. The counter is found and left at 0."""
    gl.thread_barrier()  # what all warps have left is to be seen by who sees the count
    if gl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
        gl.store(counter, 0)
        COLUMNS: gl.constexpr = _columns(WIDTH)
        ROW: gl.constexpr = _rows_of(COLUMNS)
        to: gl.constexpr = out.dtype.element_ty
        r = begin + gl.arange(0, ROWS, gl.SliceLayout(1, ROW))
        at, head, asked = query(r, tile, HEADS)
        row = first * LINES + _line_of(r, head, tile, Q_HEADS, HEADS)
        top = gl.full([ROWS], ABSENT, gl.float32, gl.SliceLayout(1, ROW))
        for c in range(0, parts, TOGETHER):
            for i in gl.static_range(TOGETHER):
                top = gl.maximum(top, _sums_of(part_lse, row, c + i, parts, asked, LINES))
        base = gl.where(top == ABSENT, 0.0, top)
        for piece in range((WIDTH + (COLUMNS - 1)) // COLUMNS):
            d = piece * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, ROW))[None, :]
            total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, ROW))
            acc = gl.zeros([ROWS, COLUMNS], gl.float32, ROW)
            for c in range(0, parts, TOGETHER):
                for i in gl.static_range(TOGETHER):
                    w = gl.exp2(_sums_of(part_lse, row, c + i, parts, asked, LINES) - base)
                    some = (asked & (c + i < parts))[:, None]
                    if WIDTH % COLUMNS:
                        some = some & (d < WIDTH)
                    x = part + (((row + (c + i) * LINES) * WIDTH)[:, None] + d)
                    acc += gl.load(x, some, other=0.0, cache_modifier=".cg") * w[:, None]
                    total += w
            total = gl.where(total != 0.0, total, 1.0)
            some = asked[:, None]
            if WIDTH % COLUMNS:
                some = some & (d < WIDTH)
            gl.store(out + ((at * out_row + head * out_head)[:, None] * UNIT + d), (acc / total[:, None]).to(to), some)
            if LSE:
                sums = gl.where(top == ABSENT, ABSENT, (base + gl.log2(total)) * LN2)
                gl.store(lse + (at * Q_HEADS + head), sums, asked)


@gluon.jit
def _sums_of(part_lse, row, i, parts, asked, LINES: gl.constexpr):
    """Of part i of each row, in units of log 2; as of no keys, of one that is not."""
    return gl.load(part_lse + (row + i * LINES), asked & (i < parts), other=ABSENT, cache_modifier=".cg")
