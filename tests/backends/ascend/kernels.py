"""Small kernels for the lane's own tests: nothing is wrong with them but what a test does to them."""

import triton.language as tl

from hal.triton import launch


@launch.jit
def scale(src, dst, n, factor, negate, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(src + i, mask=i < n, other=0.0) * factor
    if negate:
        x = -x
    tl.store(dst + i, x, mask=i < n)


@launch.jit
def store_int(dst, value: tl.uint64):
    tl.store(dst, value)


@launch.jit
def count_up(dst, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(dst + i, i * 0 + 1)


@launch.jit
def far_away(src, dst, far):
    tl.store(dst, tl.load(src + far))


@launch.jit
def defaults(dst, BLOCK: tl.constexpr = 8):
    i = tl.arange(0, BLOCK)
    tl.store(dst + i, i)


@launch.jit
def from_nothing(src, dst, n, BLOCK: tl.constexpr):
    for at in range(0, n, BLOCK):
        i = at + tl.arange(0, BLOCK)
        tl.store(dst + i, tl.load(src + i))


@launch.jit
def big(src, dst, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(dst + i, tl.load(src + i) + 1)


@launch.jit
def meet(dst, last):
    """Each program writes its own element, the last one the first's too."""
    program = tl.program_id(0)
    tl.store(dst + program, program)
    if program == last:
        tl.store(dst, program)


@launch.jit
def read_all(src, dst, n, writer, BLOCK: tl.constexpr):
    """Each program reads all of `src`, one of them writes its first element."""
    i = tl.arange(0, BLOCK)
    x = tl.load(src + i, mask=i < n, other=0)
    tl.store(dst + tl.program_id(0) * BLOCK + i, x, mask=i < n)
    if tl.program_id(0) == writer:
        tl.store(src, writer)
