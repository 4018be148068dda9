# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, attr-defined"
"""The launch that merges the parts which decode_attention's kernels leave of requests, or of query tokens.

Of a tile of query tokens (`_tokens.py`) who leads it is noted, and a line of a part is a token's and its query head's.
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
    each may have, and the more programs share it. As measured: docs/performance.md."""

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
WIDE = (Form(64, 64, 2, 128, 2048), Form(128, 16, 1, 512, 4096), Form(512, 4, 2, UNBOUNDED, 2048))
"""Of lines of 512 elements, MLA's."""
FEW = Form(32, 32, 1, 256, 1024)
"""Of shorter ones."""


@triton.jit
def _leader(tokens, t, mask, TOKENS: tl.constexpr):
    """(who leads the tile of each token, how far behind it is)."""
    if TOKENS > 1:
        behind = tl.maximum(-tl.load(tokens + 4 * t + 2, mask, other=0.0).to(tl.int32, bitcast=True), 0)
        return t - behind, behind
    else:
        return t, 0


@triton.jit
def column(d):
    """Of which column element d of a part is, where pairs of 16 have changed places as `wgmma` leaves them: 0 1 8 9 2
    3 10 11 4 5 12 13 6 7 14 15."""
    return (d & ~14) | ((d & 2) << 2) | ((d & 12) >> 1)


@launch.jit(do_not_specialize=("tokens", "part_lse", "lse", "out_row", "out_head", "n", "programs"))
def merge_kernel(
    tokens, part, part_lse, out, lse, out_row: tl.int64, out_head: tl.int64, n: tl.int32, programs: tl.int32,
    Q_HEADS: tl.constexpr, TOKENS: tl.constexpr, DV: tl.constexpr, PIECE: tl.constexpr, LSE: tl.constexpr,
    ROWS: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merges the parts of those requests that have more than one, ROWS at once: PIECE elements of a head of every so
    manieth request a program. Of query tokens in tiles of up to TOKENS, of each token; else `tokens` is not read.
    EARLY: the next kernel may begin while parts are still made. Where those who make them share multiprocessors, its
    programs would crowd where the first of these end."""
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
    apart = tl.num_programs(0) // LINES
    at = notes(part_lse, n, programs, Q_HEADS * TOKENS)
    for first in range(tl.program_id(0) // LINES, n, 16 * apart):
        # Mostly there is nothing to merge: seen by one look.
        mine = first + tl.arange(0, 16) * apart
        leaders, _ = _leader(tokens, mine, mine < n, TOKENS)
        if tl.max(tl.load(at + 2 * leaders.to(tl.int64), mine < n, other=0.0).to(tl.int32, bitcast=True), 0) > 1:
            for request in range(first, tl.minimum(first + 16 * apart, n), apart):
                row = tl.cast(request, tl.int64)
                leader, behind = _leader(tokens, row, True, TOKENS)
                parts = tl.load(at + 2 * leader).to(tl.int32, bitcast=True)
                if parts > 1:
                    before = tl.load(at + 2 * leader + 1).to(tl.int32, bitcast=True)
                    own = head + tl.arange(0, 1)
                    each = tl.arange(0, ROWS)
                    acc, sums = merged(
                        part, part_lse, before, 1, parts, behind * Q_HEADS + own, each, d, own >= 0, Q_HEADS * TOKENS,
                        DV,
                    )  # fmt: skip
                    to = out + row * out_row + head * out_head + (column(d) if PAIRED else d)[None, None, :]
                    tl.store(to, acc.to(out.dtype.element_ty), d[None, None, :] < DV)
                    if LSE:
                        tl.store(lse + row * Q_HEADS + own[:, None], sums * LN2, line < Q_HEADS)


def steps(
    run: launch.Launch, v_dim: int, args: tuple[Any, ...], some: tuple[str, int, int], tokens: object = None
) -> Iterator[Step]:
    """What merges the parts that `run` leaves, in a form that follows from how many lines there are: of a request, or
    query token, and head each."""
    heads, grouped = run.static["Q_HEADS"], run.static.get("TOKENS", 1)
    same = {name: run.static[name] for name in ("Q_HEADS", "LSE", "PDL", "launch_pdl")}
    same |= {"TOKENS": grouped, "DV": v_dim, "PAIRED": run.static.get("PAIRED", False), "EARLY": v_dim == 512}
    low = -1
    for form in _forms(v_dim):
        high = max(form.lines // heads, low)
        merge = merge_kernel.bind(**same, PIECE=form.piece, ROWS=form.rows, num_warps=form.warps)
        lines = heads * -(-v_dim // form.piece)
        grid = length("q").at_most(max(FEW_MERGED, form.programs // lines)).times(lines)
        yield Step(merge, grid, (tokens if grouped > 1 else None, *args), (some, ("q", low, high)))
        low = high


def _forms(v_dim: int) -> tuple[Form, ...]:
    if v_dim == 512:
        return WIDE
    pad = max(16, next_power_of_2(v_dim))
    whole = Form(pad, max(1, min(16, AT_ONCE // pad)), 1, UNBOUNDED, 1024)
    return (whole,) if v_dim % FEW.piece else (FEW, whole)
