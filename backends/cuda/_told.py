# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""What those who multiply, in extend_attention's kernel for Hopper, are told of a tile by who fetches its rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

TOLD = gl.constexpr(8)
"""Room for the numbers that are told of a tile. `turns` are those of two tiles, the barriers at which they are told,
and those at which they are no more needed."""


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
    """The next tile after so many, to those who multiply; one of no rows says that there is none."""
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
    """(rows, position of the first token, entries from, entries to) of the next tile after so many."""
    numbers, full, _ = turns
    mbarrier.wait(full.index(done & 1), done >> 1 & 1)
    mine = numbers.index(done & 1)
    return _get(mine, 0), _get(mine, 1), _get(mine, 2), _get(mine, 3)


@gluon.jit
def tile_of(turns, done):
    """(first token, rows, first query head, rows ahead of it: `behind`) of that tile: read where it is needed, for want
    of registers."""
    numbers, _, _ = turns
    mine = numbers.index(done & 1)
    return _get(mine, 4), _get(mine, 0), _get(mine, 5), _get(mine, 6)


@gluon.jit
def line_of(turns, done):
    """Of that tile: the line of parts that it is, or -1; with LONG_FIRST `unpacked`."""
    numbers, _, _ = turns
    return _get(numbers.index(done & 1), 7)


@gluon.jit
def forget(turns, done):
    """A group needs no more of what it was told of that tile."""
    _, _, empty = turns
    gl.thread_barrier()
    mbarrier.arrive(empty.index(done & 1))


@gluon.jit
def counter_of(
    counters, first, tile, PART: gl.constexpr, Q_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCKS: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Of the parts of a group's rows of a tile whose first part has that line, behind the counter of items."""
    EACH: gl.constexpr = BLOCKS * GROUP // Q_HEADS
    head = tile[2]
    block = head // GROUP * EACH + head % GROUP // HEADS
    return counters.to(gl.pointer_type(gl.int32), bitcast=True) + (1 + (first * BLOCKS + block) * 2 + PART)
