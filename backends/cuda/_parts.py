# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated"
"""How `decode_attention_hopper_kernel` leaves the sums of a part for the launch that merges parts (`_merge.py`).

In fp16, times a power of two a row, by which its largest is about 2^15: outputs are 16 bits too, and what parts take is
how long they are written and read. A line has room for fp32: halves are in its first half, and what they are to be
multiplied by is in the other, a word for each group of warps that leaves columns of a row. Or in fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hal.backends.cuda import _attention

exponent = gluon.jit(_attention.exponent.fn)
power = gluon.jit(_attention.power.fn)


@gluon.constexpr_function
def _paired(columns, many):
    """Of 64 rows of sums whose pairs of columns have changed places: what a thread has by `wgmma`, so many elements
    side by side."""
    regs = [[0, c] for c in (1, 2, 4) if c < many] + [[8, 0]]
    regs += [[0, c] for c in (16, 32, 64, 128) if 4 * many <= c < columns]
    return gl.DistributedLinearLayout(
        regs, [[0, many], [0, 2 * many], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, columns]
    )


@gluon.jit
def leave_part(
    acc, most, by, part, line, there, DV: gl.constexpr, PART: gl.constexpr, HALVES: gl.constexpr, PAIRED: gl.constexpr
):
    """Rows of sums, times `by` each, into the columns of lines of DV that are group PART's; HALVES: in fp16, where
    `most` is the greatest magnitude of each row. PAIRED: as `wgmma` leaves 64 rows, by 16 bytes a thread, for which
    pairs of columns change places (`_merge.in_order`)."""
    ROWS: gl.constexpr = acc.shape[0]
    D: gl.constexpr = acc.shape[1]
    MANY: gl.constexpr = 8 if HALVES else 4
    TO: gl.constexpr = _paired(D, MANY) if PAIRED else acc.type.layout
    at = line
    if HALVES:
        # Beside a sum that is not finite the others are as they are.
        e = exponent(gl.where(most < float("inf"), most, 2.0**14))
        gl.store(part + (line * DV + (DV // 2 + PART)), by * power(254 - e), there)
        x = (acc * power(e)[:, None]).to(gl.float16)
        part = part.to(gl.pointer_type(gl.float16), bitcast=True)
        at *= 2
    else:
        x = acc * by[:, None]
    if PAIRED:
        x = x.reshape([ROWS, D // (4 * MANY), MANY // 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, D])
        x = gl.convert_layout(x, TO)
        at = gl.convert_layout(at, gl.SliceLayout(1, TO))
        there = gl.convert_layout(there, gl.SliceLayout(1, TO))
    d = PART * D + gl.arange(0, D, gl.SliceLayout(0, TO))[None, :]
    gl.store(part + ((at * DV)[:, None] + d), x, there[:, None])
