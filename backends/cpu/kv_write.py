"""kv_write on the CPU: k and v to their cache slots, a token at a time.

k [n, Hk, D], v [n, Hk, Dv] with free token and head strides; caches [slots, Hk, D] or [pages, page, Hk, D], any strides
but the last. A slot is compared in int64 before an address is made of it.
"""

from __future__ import annotations

from torch import Tensor

from hal.backends.cpu._again import Memo
from hal.backends.cpu._bits import shift
from hal.backends.cpu._call import FORMAT, SAME, need_cpu, number, place
from hal.backends.cpu._index import get, index
from hal.backends.cpu._jit import Kernel, inline
from hal.backends.cpu._pool import run
from hal.backends.cpu._team import take
from hal.backends.cpu.rope_kv_write import _copy, _scale_row
from hal.kv.view import count_slots, page_size


@inline
def _write(x, x_head, cache, at, c_head, heads, dim, kind, scale):  # type: ignore[no-untyped-def]
    if kind == SAME:
        _copy(x, x_head, cache, at, c_head, heads, dim)
    else:
        for h in range(heads):
            _scale_row(shift(x, h * x_head), cache, at + h * c_head, dim, kind, scale)


def _kernel(  # type: ignore[no-untyped-def]
    counter, grain, n, k, k_token, k_head, heads, dim, v, v_token, v_head, v_dim, slots, slots_64, num_slots, page,
    k_cache, kc_kind, kc_page, kc_token, kc_head, k_scale, v_cache, vc_kind, vc_page, vc_token, vc_head, v_scale,
):  # fmt: skip
    begin = take(counter, grain) if grain else 0
    while begin < n:
        for t in range(begin, min(begin + grain, n) if grain else n):
            slot = get(slots, slots_64, t)
            if 0 <= slot < num_slots:
                at = slot // page * kc_page + slot % page * kc_token
                _write(shift(k, t * k_token), k_head, k_cache, at, kc_head, heads, dim, kc_kind, k_scale)
                at = slot // page * vc_page + slot % page * vc_token
                _write(shift(v, t * v_token), v_head, v_cache, at, vc_head, heads, v_dim, vc_kind, v_scale)
        begin = take(counter, grain) if grain else n


kernel = Kernel(
    _kernel,
    "i64 int int *x int int int int *x int int int u8 bool int int u8 int int int int float u8 int int int int float",
    shared=True,
)

calls = Memo()


def kv_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> None:
    tensors = k, v, k_cache, v_cache, slots
    call = calls.start(tensors, (number(k_scale), number(v_scale)))
    if call is None:
        return
    need_cpu("kv_write", *tensors)
    n, heads, dim = k.shape
    rows = (k.data_ptr(), *k.stride()[:2], heads, dim, v.data_ptr(), *v.stride()[:2], v.shape[2])
    places = (count_slots(k_cache), page_size(k_cache), *place(k_cache, k_scale), *place(v_cache, v_scale))
    nbytes = 2 * k.itemsize * heads * (dim + v.shape[2])
    run(kernel, (FORMAT[k.dtype],), n, nbytes, (*rows, *index(slots), *places), call=call)
