# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, var-annotated"
# A kernel is typed by its arguments at run time.
"""Kernels that do nothing, to time how they are started. Their integers are specialised, as most are."""

import triton.language as tl

from hal.triton import launch


@launch.jit
def small(a, b, c, d, n, m, BLOCK: tl.constexpr):
    pass


@launch.jit
def large(
    a, b, c, d, e, f, g, h, i, j, n0, n1, n2, n3, n4, n5, n6, n7, n8, BLOCK: tl.constexpr,
):  # fmt: skip
    pass


@launch.jit
def past_the_end(a, n, BLOCK: tl.constexpr):
    """Not empty: reads one element too far, so that the tool that must see it can be seen to."""
    i = tl.arange(0, BLOCK)
    tl.store(a + i, tl.load(a + i + 1) + n)
