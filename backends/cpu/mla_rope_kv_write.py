"""mla_rope_kv_write on the CPU: rotates q's and k's rope parts in place, writes the joint row to its cache slot.

It is `rope_kv_write` with one head of k: the rope part is k, the latent part v, and both caches are the one cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hal.backends.cpu._again import Memo
from hal.backends.cpu._call import FORMAT, need_cpu, number
from hal.backends.cpu._index import index
from hal.backends.cpu._pool import run
from hal.backends.cpu.mla_kv_write import places
from hal.backends.cpu.rope_kv_write import kernel

calls = Memo()


def mla_rope_kv_write(
    q_rope: Tensor,
    k_rope: Tensor,
    kv_lora: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    *,
    interleaved: bool = False,
    kv_scale: float | Tensor | None = None,
    write_k: bool = True,
) -> None:
    tensors = q_rope, k_rope, kv_lora, cos_sin_cache, positions, kv_cache, slots
    call = calls.start(tensors, (interleaved, number(kv_scale), write_k))
    if call is None:
        return
    need_cpu("mla_rope_kv_write", *tensors)
    n, q_heads, rope = q_rope.shape
    lora = kv_lora.shape[-1]
    max_positions, rotary = cos_sin_cache.shape
    num_slots, page, to_rope, to_lora = places(kv_cache, lora, kv_scale)
    queries = (q_rope.data_ptr(), *q_rope.stride()[:2], q_heads)
    rows = (k_rope.data_ptr(), k_rope.stride(0), 0, 1, rope, kv_lora.data_ptr(), kv_lora.stride(0), 0, lora)
    table = (cos_sin_cache.data_ptr(), cos_sin_cache.dtype is torch.float32, max_positions, rotary)
    slots_to = (*index(positions), *index(slots), num_slots, page, *to_rope, *to_lora)
    nbytes = 2 * q_rope.itemsize * (rope * (q_heads + 1) + lora)
    args = (*queries, *rows, *table, *slots_to, interleaved, write_k)
    call = call._replace(inside=("k_cache", 5, to_rope[0] - to_lora[0]))
    run(kernel, (FORMAT[q_rope.dtype],), n, nbytes, args, call=call)
