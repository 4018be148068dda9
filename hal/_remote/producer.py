"""A kernel that says early that it is nearly done, and writes late: what programmatic launch must survive."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def late_copy(table, spin_ns, WAIT: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program i copies ``table[i] = (source, target, bytes)``.

    EARLY: lets the next kernel start at once, and spins before it copies. WAIT: waits for the one before.
    """
    if WAIT:
        tl.extra.cuda.gdc_wait()
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < spin_ns:
        now = tl.extra.cuda.globaltimer()
    row = table + tl.program_id(0) * 3
    source = tl.load(row).to(tl.pointer_type(tl.uint8))
    target = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
    size = tl.load(row + 2)
    at = tl.zeros((), tl.int64)
    while at < size:
        off = at + tl.arange(0, BLOCK)
        tl.store(target + off, tl.load(source + off, mask=off < size), mask=off < size)
        at += BLOCK
