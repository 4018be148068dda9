"""mla_kv_write on the CPU: the joint row of a token, latent part and rope part, to its cache slot.

It is `kv_write` with one head: the rope part is k, the latent part v, and both caches are the one cache, that of k
starting lora_dim elements into each row.
"""

from __future__ import annotations

from torch import Tensor

from hal.backends.cpu._again import Memo
from hal.backends.cpu._call import FORMAT, Place, need_cpu, number, place
from hal.backends.cpu._index import index
from hal.backends.cpu._pool import run
from hal.backends.cpu.kv_write import kernel
from hal.kv.view import count_slots, page_size


def places(cache: Tensor, lora_dim: int, scale: float | Tensor | None) -> tuple[int, int, Place, Place]:
    """Slots, page size, and what a kernel takes for the rope part and for the latent part of a cache."""
    lora = place(cache, scale, row_dims=1)
    rope = (lora[0] + lora_dim * cache.itemsize, *lora[1:])
    return count_slots(cache, row_dims=1), page_size(cache, row_dims=1), rope, lora


calls = Memo()


def mla_kv_write(
    kv_lora: Tensor, k_rope: Tensor, kv_cache: Tensor, slots: Tensor, *, kv_scale: float | Tensor | None = None
) -> None:
    tensors = kv_lora, k_rope, kv_cache, slots
    call = calls.start(tensors, (number(kv_scale),))
    if call is None:
        return
    need_cpu("mla_kv_write", *tensors)
    lora, rope = kv_lora.shape[-1], k_rope.shape[-1]
    num_slots, page, to_rope, to_lora = places(kv_cache, lora, kv_scale)
    rows = (k_rope.data_ptr(), k_rope.stride(0), 0, 1, rope, kv_lora.data_ptr(), kv_lora.stride(0), 0, lora)
    nbytes = 2 * kv_lora.itemsize * (lora + rope)
    args = (*rows, *index(slots), num_slots, page, *to_rope, *to_lora)
    call = call._replace(inside=("k_cache", 2, to_rope[0] - to_lora[0]))
    run(kernel, (FORMAT[kv_lora.dtype],), kv_lora.shape[0], nbytes, args, call=call)
