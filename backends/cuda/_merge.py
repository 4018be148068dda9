# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, attr-defined, index"
"""The launch that merges the parts which decode_attention's kernels leave of requests, or of query tokens.

Of a tile of query tokens (`_tiles.py`) a line of a part is a token's and its query head's.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hal.backends.cuda._attention import LN2
from hal.backends.cuda._device import next_power_of_2
from hal.backends.cuda._split import merged, notes
from hal.triton import launch
from hal.triton.plans import Step, length

FEW_MERGED = 4
"""Requests that have programs of their own, however many a request takes."""


class Form(NamedTuple):
    """How the launch merges. The fewer lines there are, of a request, or query token, and head each, the more parts
    each may have, and the more programs share it. As measured: docs/performance-mla.md."""

    piece: int
    """Elements of a line that are a program's."""
    rows: int
    """Parts read at once."""
    warps: int
    lines: int
    """The form is for up to so many."""
    programs: int
    """At most, about one wave: mostly there is nothing to merge."""
    requests: int = 1
    """Whose parts a program merges side by side."""


UNBOUNDED = 2**31
"""More lines than there are."""
AT_ONCE = 512
"""Elements of parts that a program of one warp reads at once, where it has whole lines."""
WIDE = (
    Form(64, 64, 1, 128, 2048),
    Form(128, 32, 1, 512, 4096),
    Form(256, 8, 1, 1024, 4096),
    Form(256, 4, 1, 2048, 2048, 2),
    Form(256, 2, 1, UNBOUNDED, 4096),
)
"""Of lines of 512 elements, MLA's. No piece is of both halves of a line, which two groups of warps leave."""
FEW = Form(32, 32, 1, 256, 1024)
"""Of shorter ones."""


@triton.jit
def in_order(x, HALVES: tl.constexpr):
    """A line's elements by column, where pairs have changed places as `wgmma` leaves them: of 32 halves, 0 1 8 9 16 17
    24 25 2 3 10 11 ..., of 16 others, 0 1 8 9 2 3 10 11 ..."""
    PAIRS: tl.constexpr = 4 if HALVES else 2
    pairs = tl.reshape(x, (x.shape[0] * x.shape[2] // (8 * PAIRS), 4, PAIRS, 2))
    return tl.reshape(tl.permute(pairs, (0, 2, 1, 3)), x.shape)


@triton.jit
def _told(at, there, REQUESTS: tl.constexpr):
    """A word of notes: of one request, or of those that are `there`."""
    return (tl.load(at, there, other=0.0) if REQUESTS > 1 else tl.load(at)).to(tl.int32, bitcast=True)


@launch.jit(do_not_specialize=("part_lse", "lse", "out_row", "out_head", "n", "programs"))
def merge_kernel(
    part, part_lse, out, lse, out_row: tl.int64, out_head: tl.int64, n: tl.int32, programs: tl.int32,
    Q_HEADS: tl.constexpr, TOKENS: tl.constexpr, DV: tl.constexpr, PIECE: tl.constexpr, LSE: tl.constexpr,
    ROWS: tl.constexpr, REQUESTS: tl.constexpr, HALVES: tl.constexpr, PAIRED: tl.constexpr, UNIT: tl.constexpr,
    PDL: tl.constexpr, EARLY: tl.constexpr, TOLD: tl.constexpr,
):  # fmt: skip
    """Merges the parts of those requests that have more than one, ROWS at once: PIECE elements of a head of every so
    manieth request a program, of REQUESTS of them side by side; TOKENS: of query tokens, in tiles of up to so many, of
    each token. EARLY: the next kernel may begin while parts are still made. Where those who make them share
    multiprocessors, its programs would crowd where the first of these end. TOLD: ahead of the sums it says whether
    there is anything to merge, before this launch may begin."""
    NOTE: tl.constexpr = 4 if TOKENS else 2
    ROW: tl.constexpr = Q_HEADS * max(TOKENS, 1)
    at = notes(part_lse, n, programs, ROW)
    if PDL and EARLY:
        gdc_launch_dependents()
    idle = n < 0
    if TOLD:
        # One program waits none the less: whoever waits for this launch's end waits for that of the one before.
        told = tl.load(part_lse - 1, volatile=True).to(tl.int32, bitcast=True)
        idle = (tl.program_id(0) > 0) & (told == 0)
        n = tl.where(idle, 0, n)
    if PDL:
        if not idle:
            gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    out_row, out_head = out_row * UNIT, out_head * UNIT
    LINES: tl.constexpr = Q_HEADS * ((DV + PIECE - 1) // PIECE)
    line = tl.program_id(0) % LINES
    head = line % Q_HEADS
    d = line // Q_HEADS * PIECE + tl.arange(0, PIECE)
    unit = line // Q_HEADS * PIECE // (DV // 2) if HALVES else 0
    apart = tl.num_programs(0) // LINES
    each = tl.arange(0, ROWS)
    for first in range(tl.program_id(0) // LINES, n, 16 * apart):
        # Mostly there is nothing to merge: seen by one look.
        mine = first + tl.arange(0, 16) * apart
        if tl.max(tl.load(at + NOTE * mine.to(tl.int64), mine < n, other=0.0).to(tl.int32, bitcast=True), 0) > 1:
            for request in range(first, tl.minimum(first + 16 * apart, n), REQUESTS * apart):
                # Of one they are scalars: as a tensor of one element they take up to 3 % of a call more.
                row = tl.cast(request + tl.arange(0, REQUESTS) * apart if REQUESTS > 1 else request, tl.int64)
                note = at + NOTE * row
                parts = _told(note, row < n, REQUESTS)
                most = tl.max(parts, 0) if REQUESTS > 1 else parts
                if most > 1:
                    before = _told(note + 1, parts > 1, REQUESTS)
                    behind = 1
                    lines = head + tl.zeros([REQUESTS], tl.int32)
                    there = (lines >= 0) & (parts > 1)
                    if TOKENS:
                        behind = _told(note + 2, parts > 1, REQUESTS)
                        lines += Q_HEADS * _told(note + 3, parts > 1, REQUESTS)
                    if REQUESTS > 1:
                        acc, sums = merged(
                            part, part_lse, before[:, None], behind[:, None] if TOKENS else 1, parts[:, None], lines,
                            each, d, there, ROW, DV, HALVES, unit, most,
                        )  # fmt: skip
                    else:
                        acc, sums = merged(
                            part, part_lse, before, behind, parts, lines, each, d, there, ROW, DV, HALVES, unit
                        )
                    acc = acc.to(out.dtype.element_ty)
                    rows = row + tl.zeros([REQUESTS], tl.int64)
                    to = out + (rows * out_row + head * out_head)[:, None, None] + d[None, None, :]
                    # Values change places, not where they go: whole sectors are written.
                    ordered = in_order(acc, HALVES) if PAIRED else acc
                    tl.store(to, ordered, there[:, None, None] & (d < DV)[None, None, :])
                    if LSE:
                        tl.store(lse + (rows * Q_HEADS + head)[:, None], sums * LN2, there[:, None] & (line < Q_HEADS))


def steps(
    run: launch.Launch, v_dim: int, args: tuple[Any, ...], some: tuple[tuple[str, int, int], ...], least: int,
    most: int, told: bool = False,
) -> Iterator[Step]:  # fmt: skip
    """What merges the parts that `run` leaves, in a form that follows from how many lines there are: of a request, or
    query token, more than `least` and no more than `most` of these, and head each. `told`: `run` says whether any."""
    heads = run.static["Q_HEADS"]
    same = {name: run.static[name] for name in ("Q_HEADS", "LSE", "UNIT", "PDL", "launch_pdl")}
    same |= {"TOKENS": run.static.get("TOKENS", 0)}
    same |= {name: run.static.get(name, False) for name in ("HALVES", "PAIRED")}
    same |= {"DV": v_dim, "EARLY": v_dim == 512, "TOLD": told}
    row = tuple(step // run.static["UNIT"] for step in args[4:6])
    args = (*args[:4], *row, *args[6:])
    low = least
    for form in _forms(v_dim):
        high = min(form.lines // heads, most)
        if high <= low:
            continue
        of = {"PIECE": form.piece, "ROWS": form.rows, "REQUESTS": form.requests, "num_warps": form.warps}
        merge = merge_kernel.bind(**same, **of)
        lines = heads * -(-v_dim // form.piece)
        grid = length("q", per=form.requests).at_most(max(FEW_MERGED, form.programs // lines)).times(lines)
        yield Step(merge, grid, args, (*some, ("q", low, high)))
        low = high


def _forms(v_dim: int) -> tuple[Form, ...]:
    if v_dim == 512:
        return WIDE
    pad = max(16, next_power_of_2(v_dim))
    whole = Form(pad, max(1, min(16, AT_ONCE // pad)), 1, UNBOUNDED, 1024)
    return (whole,) if v_dim % FEW.piece else (FEW, whole)
