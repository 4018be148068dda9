"""The kernel of `_pdl`: right, but for when it waits for the kernel before it."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def last_loc(table, requests, lens, out, rows, width, stride, WAITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """WAITS: 0 never, 1 after the first reads, 2 in the first program alone."""
    i = tl.program_id(0)
    gdc_launch_dependents()
    if WAITS == 2 and i == 0:
        gdc_wait()
    r = tl.load(requests + i).to(tl.int64)
    p = tl.load(lens + i).to(tl.int64)
    if WAITS == 1:
        gdc_wait()
    ok = (r >= 0) & (r < rows) & (p > 0) & (p <= width)
    at = tl.where(ok, r, 0) * stride + tl.where(ok, p, 1) - 1
    found = tl.load(table + at, mask=ok, other=-1)
    tl.store(out + i, found.to(out.dtype.element_ty))
