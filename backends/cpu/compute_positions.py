"""compute_positions on the CPU: prefix_i, ..., seq_i - 1 of every request, one after the other, into `out`.

`prefix_lens`, `seq_lens` [bs], `out` [capacity], `indptr` [bs + 1] or null; int32 or int64. Invariant: lengths
below 2^31 alone count, so no sum can wrap.
"""

from __future__ import annotations

from torch import Tensor

from hal.backends.cpu._call import need_cpu
from hal.backends.cpu._index import LONGEST, get, index, length, put
from hal.backends.cpu._jit import Kernel


def _kernel(bs, prefixes, prefixes_64, lens, lens_64, out, out_64, capacity, with_indptr, indptr, indptr_64):  # type: ignore[no-untyped-def]
    at = 0
    for i in range(bs):
        if with_indptr:
            put(indptr, indptr_64, i, at)
        prefix = get(prefixes, prefixes_64, i)
        seq = get(lens, lens_64, i)
        if 0 <= prefix <= seq <= LONGEST:
            n = length(prefix, seq, capacity - at)
            for t in range(n):
                put(out, out_64, at + t, prefix + t)
            at += n
    if with_indptr:
        put(indptr, indptr_64, bs, at)
    for o in range(at, capacity):
        put(out, out_64, o, -1)


kernel = Kernel(_kernel, "int u8 bool u8 bool u8 bool int bool u8 bool")


def compute_positions(prefix_lens: Tensor, seq_lens: Tensor, out: Tensor, indptr: Tensor | None = None) -> Tensor:
    need_cpu("compute_positions", prefix_lens, seq_lens, out, indptr)
    kernel()(
        prefix_lens.shape[0],
        *index(prefix_lens),
        *index(seq_lens),
        *index(out),
        out.shape[0],
        indptr is not None,
        *index(indptr),
    )
    return out
