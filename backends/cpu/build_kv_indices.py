"""build_kv_indices on the CPU: ``req_to_token[r_i, start_i : start_i + len_i]`` in `out`, sums in `kv_indptr`, or read
from `given_indptr`.

`req_to_token` [rows, width] int32, rows any stride apart; the rest int32 or int64. Invariants: lengths below
2^31 alone count, so no sum can wrap; a start is compared with the table before it is added to.
"""

from __future__ import annotations

from torch import Tensor

from hal.backends.cpu._bits import load
from hal.backends.cpu._call import need_cpu
from hal.backends.cpu._index import LONGEST, get, index, put
from hal.backends.cpu._jit import Kernel


def _kernel(  # type: ignore[no-untyped-def]
    bs, table, rows, width, stride, requests, requests_64, lens, lens_64, given, indptr, indptr_64, out, out_64,
    capacity, with_starts, starts, starts_64,
):  # fmt: skip
    at = 0
    for i in range(bs):
        if given:
            # No list that begins further below reaches 0.
            at = min(max(get(indptr, indptr_64, i), -LONGEST), capacity)
        else:
            put(indptr, indptr_64, i, at)
        length = get(lens, lens_64, i)
        if length <= 0 or length > LONGEST:
            continue
        end = min(max(get(indptr, indptr_64, i + 1), -LONGEST), capacity) if given else capacity
        length = min(length, max(0, end - at))
        start = get(starts, starts_64, i) if with_starts else 0
        r = get(requests, requests_64, i)
        none = min(max(0, -at), length)  # would lie before `out`
        first = last = length
        if 0 <= r < rows and -length < start < width:
            first = max(0, -start)
            last = min(length, width - start)
        for t in range(none, first):
            put(out, out_64, at + t, -1)
        for t in range(max(none, first), last):
            put(out, out_64, at + t, load(table, r * stride + start + t))
        for t in range(max(none, last), length):
            put(out, out_64, at + t, -1)
        at += length
    if not given:
        put(indptr, indptr_64, bs, at)


kernel = Kernel(_kernel, "int i32 int int int u8 bool u8 bool bool u8 bool u8 bool int bool u8 bool")


def build_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    kv_lens: Tensor,
    kv_indptr: Tensor | None,
    out: Tensor,
    kv_start: Tensor | None = None,
    *,
    given_indptr: Tensor | None = None,
) -> Tensor:
    given = given_indptr is not None
    indptr = given_indptr if given else kv_indptr
    need_cpu("build_kv_indices", req_to_token, req_pool_indices, kv_lens, indptr, out, kv_start)
    rows, width = req_to_token.shape
    kernel()(
        kv_lens.shape[0],
        req_to_token.data_ptr(),
        rows,
        width,
        req_to_token.stride(0),
        *index(req_pool_indices),
        *index(kv_lens),
        given,
        *index(indptr),
        *index(out),
        out.shape[0],
        kv_start is not None,
        *index(kv_start),
    )
    return out
