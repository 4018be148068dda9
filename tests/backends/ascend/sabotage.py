"""Kernels with the faults that public Ascend kernels have.

The lowered lane must catch each; Triton's interpreter doesn't.

The interpreter honours every mask lane by lane. Ascend's compiler can't: unless a mask is a plain prefix it
moves whole blocks, and a masked-off lane is read, or written back, all the same.
"""

import triton.language as tl

from hal.lowered import shared_writes
from hal.triton import launch


@launch.jit
def last_loc_masked(table, requests, lens, out, n, stride, BLOCK: tl.constexpr):
    """prefix_len 0 reads ``req_to_token[-1]``: the mask hides it from the interpreter alone."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = tl.load(requests + i, mask=i < n, other=0)
    length = tl.load(lens + i, mask=i < n, other=0)
    found = tl.load(table + request * stride + length - 1, mask=(i < n) & (length > 0), other=-1)
    tl.store(out + i, found, mask=i < n)


@launch.jit
def copy_where(src, keep, dst, n, BLOCK: tl.constexpr):
    """``(off < n) & (vector condition)``: the tail block is loaded whole, past the end."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = tl.load(keep + i, mask=i < n, other=0) > 0
    x = tl.load(src + i, mask=(i < n) & wanted, other=0)
    tl.store(dst + i, x, mask=i < n)


@launch.jit
def store_where(src, keep, dst, n, BLOCK: tl.constexpr):
    """The same as a store: read, modify and write of the whole block."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = tl.load(keep + i, mask=i < n, other=0) > 0
    x = tl.load(src + i, mask=i < n, other=0)
    tl.store(dst + i, x, mask=(i < n) & wanted)


@launch.jit
def odd_or_even(src, dst, n, BLOCK: tl.constexpr):
    """Programs that write disjoint lanes of one block: no race lane by lane, one as read-modify-write."""
    i = tl.arange(0, BLOCK)
    x = tl.load(src + i)
    tl.store(dst + i, x, mask=(i < n) & (i % 2 == tl.program_id(0)))


@launch.jit
def take_pages(free_pages, need, out, n, have, BLOCK: tl.constexpr):
    """`free_pages` is exactly as long as needed: lanes that need none read past its end."""
    i = tl.arange(0, BLOCK)
    wanted = tl.load(need + i, mask=i < n, other=0)
    before = tl.load(need + n + i, mask=i < n, other=0)
    page = tl.load(free_pages + before, mask=(i < n) & (wanted > 0), other=-1)
    tl.store(out + i, page, mask=i < n)


@launch.jit
def off_by_one(src, dst, n, BLOCK: tl.constexpr):
    """An honest bug: reads one element too far."""
    for i in range(tl.program_id(0), n, tl.num_programs(0)):
        tl.store(dst + i, tl.load(src + i + 1))


@launch.jit
def overlapping(src, dst, n, BLOCK: tl.constexpr):
    """Neighbouring programs both write the element between them."""
    i = tl.program_id(0) * (BLOCK - 1) + tl.arange(0, BLOCK)
    tl.store(dst + i, tl.load(src + i, mask=i < n, other=0), mask=i < n)


@launch.jit
@shared_writes("dst")
def overlapping_declared(src, dst, n, BLOCK: tl.constexpr):
    """Like `overlapping`, and says so."""
    i = tl.program_id(0) * (BLOCK - 1) + tl.arange(0, BLOCK)
    tl.store(dst + i, tl.load(src + i, mask=i < n, other=0), mask=i < n)


@launch.jit
@shared_writes("dst")
def read_after_shared(src, dst, n, BLOCK: tl.constexpr):
    """Says that it writes one element twice, and reads it besides."""
    i = tl.program_id(0) * (BLOCK - 1) + tl.arange(0, BLOCK)
    x = tl.load(dst + i, mask=i < n, other=0) + tl.load(src + i, mask=i < n, other=0)
    tl.store(dst + i, x, mask=i < n)


@launch.jit
def fill_rows(dst, stride, width, BLOCK: tl.constexpr):
    """A row a program; `width` beyond the view's own writes into what lies between."""
    i = tl.arange(0, BLOCK)
    tl.store(dst + tl.program_id(0) * stride + i, i * 0 + 1, mask=i < width)


@launch.jit
def copy_block(src, dst, n, BLOCK: tl.constexpr):
    """A block a program: no race, unless `src` and `dst` are one memory."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + i, tl.load(src + i))


@launch.jit
def scan(src, dst, BLOCK: tl.constexpr):
    """Lowers to a call that only the device can make."""
    i = tl.arange(0, BLOCK)
    tl.store(dst + i, tl.cumsum(tl.load(src + i), 0))
