# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, attr-defined"
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


UNBOUNDED = 2**31
"""More lines than there are."""
AT_ONCE = 512
"""Elements of parts that a program of one warp reads at once, where it has whole lines."""
WIDE = (
    Form(64, 64, 1, 128, 2048),
    Form(128, 32, 1, 512, 4096),
    Form(256, 8, 1, 1024, 4096),
    Form(256, 4, 1, UNBOUNDED, 4096),
)
"""Of lines of 512 elements, MLA's. No piece is of both halves of a line, which two groups of warps leave."""
FEW = Form(32, 32, 1, 256, 1024)
"""Of shorter ones."""


@triton.jit
def column(d, HALVES: tl.constexpr):
    """Of which column element d of a part is, where pairs have changed places as `wgmma` leaves them: of 32 halves, 0 1
    8 9 16 17 24 25 2 3 10 11 ..., of 16 others, 0 1 8 9 2 3 10 11 ..."""
    if HALVES:
        return (d & ~30) | ((d & 6) << 2) | ((d & 24) >> 2)
    else:
        return (d & ~14) | ((d & 2) << 2) | ((d & 12) >> 1)


@launch.jit(do_not_specialize=("part_lse", "lse", "out_row", "out_head", "n", "programs"))
def merge_kernel(
    part, part_lse, out, lse, out_row: tl.int64, out_head: tl.int64, n: tl.int32, programs: tl.int32,
    Q_HEADS: tl.constexpr, TOKENS: tl.constexpr, DV: tl.constexpr, PIECE: tl.constexpr, LSE: tl.constexpr,
    ROWS: tl.constexpr, HALVES: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merges the parts of those requests that have more than one, ROWS at once: PIECE elements of a head of every so
    manieth request a program; TOKENS: of query tokens, in tiles of up to so many, of each token. EARLY: the next kernel
    may begin while parts are still made. Where those who make them share multiprocessors, its programs would crowd
    where the first of these end."""
    if PDL:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    LINES: tl.constexpr = Q_HEADS * ((DV + PIECE - 1) // PIECE)
    line = tl.program_id(0) % LINES
    head = line % Q_HEADS
    d = line // Q_HEADS * PIECE + tl.arange(0, PIECE)
    unit = line // Q_HEADS * PIECE // (DV // 2) if HALVES else 0
    apart = tl.num_programs(0) // LINES
    ROW: tl.constexpr = Q_HEADS * max(TOKENS, 1)
    NOTE: tl.constexpr = 4 if TOKENS else 2
    at = notes(part_lse, n, programs, ROW)
    for first in range(tl.program_id(0) // LINES, n, 16 * apart):
        # Mostly there is nothing to merge: seen by one look.
        mine = first + tl.arange(0, 16) * apart
        if tl.max(tl.load(at + NOTE * mine.to(tl.int64), mine < n, other=0.0).to(tl.int32, bitcast=True), 0) > 1:
            for request in range(first, tl.minimum(first + 16 * apart, n), apart):
                row = tl.cast(request, tl.int64)
                parts = tl.load(at + NOTE * row).to(tl.int32, bitcast=True)
                if parts > 1:
                    before = tl.load(at + NOTE * row + 1).to(tl.int32, bitcast=True)
                    own = head + tl.arange(0, 1)
                    behind = 1
                    line_of = own
                    if TOKENS:
                        behind = tl.load(at + NOTE * row + 2).to(tl.int32, bitcast=True)
                        line_of = own + Q_HEADS * tl.load(at + NOTE * row + 3).to(tl.int32, bitcast=True)
                    each = tl.arange(0, ROWS)
                    acc, sums = merged(
                        part, part_lse, before, behind, parts, line_of, each, d, own >= 0, ROW, DV, HALVES, unit
                    )
                    to = out + row * out_row + head * out_head + (column(d, HALVES) if PAIRED else d)[None, None, :]
                    tl.store(to, acc.to(out.dtype.element_ty), d[None, None, :] < DV)
                    if LSE:
                        tl.store(lse + row * Q_HEADS + own[:, None], sums * LN2, line < Q_HEADS)


def steps(
    run: launch.Launch, v_dim: int, args: tuple[Any, ...], some: tuple[tuple[str, int, int], ...], least: int, most: int
) -> Iterator[Step]:  # fmt: skip
    """What merges the parts that `run` leaves, in a form that follows from how many lines there are: of a request, or
    query token, more than `least` and no more than `most` of these, and head each."""
    heads = run.static["Q_HEADS"]
    same = {name: run.static[name] for name in ("Q_HEADS", "LSE", "PDL", "launch_pdl")}
    same |= {"TOKENS": run.static.get("TOKENS", 0)}
    same |= {name: run.static.get(name, False) for name in ("HALVES", "PAIRED")}
    same |= {"DV": v_dim, "EARLY": v_dim == 512}
    low = least
    for form in _forms(v_dim):
        high = min(form.lines // heads, most)
        if high <= low:
            continue
        merge = merge_kernel.bind(**same, PIECE=form.piece, ROWS=form.rows, num_warps=form.warps)
        lines = heads * -(-v_dim // form.piece)
        grid = length("q").at_most(max(FEW_MERGED, form.programs // lines)).times(lines)
        yield Step(merge, grid, args, (*some, ("q", low, high)))
        low = high


def _forms(v_dim: int) -> tuple[Form, ...]:
    if v_dim == 512:
        return WIDE
    pad = max(16, next_power_of_2(v_dim))
    whole = Form(pad, max(1, min(16, AT_ONCE // pad)), 1, UNBOUNDED, 1024)
    return (whole,) if v_dim % FEW.piece else (FEW, whole)
