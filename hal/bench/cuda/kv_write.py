"""The tables of what writes KV rows, beside eager torch, the same through torch.compile, and SGLang's kernels.

GB/s count what an op must move, read and written; ``copy`` is a plain copy in the same run, the ceiling.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hal.bench import OURS, Row, peers
from hal.bench.cuda import inputs
from hal.bench.cuda.harness import Args, Build, compiled, op_row, ours, positional, table_of

SIZES = (1, 16, 256, 4096)
HEADS = (32, 8, 128)
"""Query heads, key/value heads, head_dim: Llama-3-8B, and Qwen3-8B, which has the norms."""
MLA = (16, 512, 64)
"""Query heads (DeepSeek-V3's 128 over 8 GPUs), latent dim, rope dim."""


def write_row(about: Row, sets: list[Args], nbytes: int, builds: dict[str, Build], heavy: bool = False) -> Row:
    """`op_row` with calls a graph, and host calls, by how much a call moves."""
    return op_row(
        about,
        sets,
        builds,
        nbytes=nbytes,
        per_graph=8 if heavy else 96 if nbytes < 8 << 20 else 24,
        rounds=15,
        host=20 if heavy else 100,
    )


def sizes(quick: bool) -> tuple[int, ...]:
    return SIZES[:2] if quick else SIZES


# --- kv_write ---------------------------------------------------------------------------------------


def _put(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    k_cache[slots] = k
    v_cache[slots] = v


def _put_fp8(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k_scale: float, v_scale: float
) -> None:
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        rows = (x.float() / scale).clamp(-448.0, 448.0).to(cache.dtype)
        cache.view(torch.uint8)[slots] = rows.view(torch.uint8)


def _sglang_store(a: Args) -> Callable[[], Any]:
    module = peers.sglang("ops.kvcache.kvcache")
    k, v, k_cache, v_cache = (a[x].view(a[x].shape[0], -1) for x in ("k", "v", "k_cache", "v_cache"))
    return lambda: module.store_cache(k, v, k_cache, v_cache, a["slots"], reserved_skip_index=-1)


def _sglang_store_fp8(a: Args) -> Callable[[], Any]:
    fn = peers.sglang("ops.kvcache.fused_fp8_qkv_kv_cache").fused_fp8_qkv_kv_cache
    scales = [torch.tensor([a[x]], dtype=torch.float32, device=inputs.DEVICE) for x in ("k_scale", "v_scale")]
    return lambda: fn(None, a["k"], a["v"], a["k_cache"], a["v_cache"], a["slots"], *scales)


def _kv_write(op: str, tokens: int, cache: str) -> Row:
    _, heads, dim = HEADS
    kind = torch.bfloat16 if cache == "bf16" else torch.float8_e4m3fn
    k_cache, v_cache = (inputs.cache((heads, dim), kind, 2) for _ in range(2))
    read = 2 * tokens * heads * dim * 2
    scales = {} if cache == "bf16" else {"k_scale": 0.5, "v_scale": 0.25}
    sets: list[Args] = [
        {
            "k": inputs.randn(tokens, heads, dim),
            "v": inputs.randn(tokens, heads, dim),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "slots": inputs.slots(tokens, k_cache.shape[0]),
            **scales,
        }
        for _ in range(inputs.count_sets(read))
    ]
    names = ("k", "v", "k_cache", "v_cache", "slots", *scales)
    by_torch = _put if cache == "bf16" else _put_fp8
    builds: dict[str, Build] = {
        OURS: ours(op),
        "eager": positional(by_torch, *names),
        "torch.compile": compiled(by_torch, *names),
    }
    if "sglang" in peers.available():
        builds["sglang jit"] = _sglang_store if cache == "bf16" else _sglang_store_fp8
    nbytes = read + 2 * tokens * heads * dim * kind.itemsize
    return write_row({"op": op, "tokens": tokens, "cache": cache}, sets, nbytes, builds)


def kv_write(quick: bool = False) -> list[Row]:
    """Rows: tokens, the cache's dtype."""
    return table_of(
        partial(_kv_write, op="kv_write", tokens=t, cache=c) for c in ("bf16", "e4m3") for t in sizes(quick)
    )


# --- mla_kv_write ------------------------------------------------------------------------------------


def put_mla(kv_lora: Tensor, k_rope: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    lora = kv_lora.shape[1]
    kv_cache[slots, :lora] = kv_lora
    kv_cache[slots, lora:] = k_rope


def sglang_put_mla(a: Args) -> Callable[[], Any]:
    fn = peers.sglang("ops.kvcache.set_mla_kv_buffer").set_mla_kv_buffer
    rows = [a[n] for n in ("kv_cache", "slots", "kv_lora", "k_rope")]
    return lambda: fn(*rows, reserved_skip_index=-1)


def _mla_kv_write(op: str, tokens: int) -> Row:
    _, lora, dim = MLA
    cache = inputs.cache((lora + dim,), torch.bfloat16, 1)
    nbytes = 2 * tokens * (lora + dim) * 2
    sets: list[Args] = [
        {
            "kv_lora": inputs.randn(tokens, lora),
            "k_rope": inputs.randn(tokens, dim),
            "kv_cache": cache,
            "slots": inputs.slots(tokens, cache.shape[0]),
        }
        for _ in range(inputs.count_sets(nbytes // 2))
    ]
    names = tuple(sets[0])
    builds: dict[str, Build] = {
        OURS: ours(op),
        "eager": positional(put_mla, *names),
        "torch.compile": compiled(put_mla, *names),
    }
    if "sglang" in peers.available():
        builds["sglang jit tma"] = sglang_put_mla
    return write_row({"op": op, "tokens": tokens}, sets, nbytes, builds)


def mla_kv_write(quick: bool = False) -> list[Row]:
    """Rows: tokens."""
    return table_of(partial(_mla_kv_write, op="mla_kv_write", tokens=t) for t in sizes(quick))


TABLES: dict[str, Callable[[bool], list[Row]]] = {"kv_write": kv_write, "mla_kv_write": mla_kv_write}
