# mypy: disable-error-code="no-untyped-call"
# torch.Tensor has untyped methods.
"""The tables of what rotates, and writes what it rotated.

Beside SGLang's kernels: eager torch, the same through torch.compile, and what one would write with hal's other ops and
torch's own were there no such op.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from hal.bench import OURS, Row, launcher, peers
from hal.bench.cuda import inputs
from hal.bench.cuda.harness import Args, Build, compiled, op_row, ours, positional, table_of
from hal.bench.cuda.kv_write import HEADS, MLA, put_mla, sglang_put_mla, sizes, write_row


def _halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def _pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)


# --- rope_kv_write ----------------------------------------------------------------------------------

SHAPES = {
    "llama3-8b": (32, 8, 128),
    "llama3-70b-tp8": (8, 1, 128),
    "llama3-70b": (64, 8, 128),
    "qwen3-30b-a3b": (32, 4, 128),
}
TOKENS = {
    "llama3-8b": (1, 8, 32, 128, 512, 2048, 8192),
    "llama3-70b-tp8": (1, 32, 512, 8192),
    "llama3-70b": (1, 32, 512),
    "qwen3-30b-a3b": (1, 32, 512, 4096),
}
TOKENS_E4M3 = {"llama3-8b": (1, 32, 512, 4096)}


def rope_sets(tokens: int, model: str, cache_dtype: str = "bf16") -> list[Args]:
    """Their slots are spread over a pool of 0.5 to 1 GiB."""
    q_heads, heads, dim = SHAPES[model]
    kind = torch.bfloat16 if cache_dtype == "bf16" else torch.float8_e4m3fn
    k_cache, v_cache = (inputs.cache((heads, dim), kind, 2) for _ in range(2))
    cos_sin = inputs.cos_sin(dim)
    scales = {} if cache_dtype == "bf16" else {"k_scale": 0.5, "v_scale": 0.5}
    return [
        {
            "q": inputs.randn(tokens, q_heads, dim),
            "k": inputs.randn(tokens, heads, dim),
            "v": inputs.randn(tokens, heads, dim),
            "cos_sin_cache": cos_sin,
            "positions": inputs.integers(0, cos_sin.shape[0], tokens),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "slots": inputs.slots(tokens, k_cache.shape[0]),
            **scales,
        }
        for _ in range(inputs.count_sets(tokens * (q_heads + 2 * heads) * dim * 2))
    ]


@cache
def _sglang_rope_module(dim: int) -> Any:
    theirs = peers.sglang("ops.attention.rope")
    return theirs._jit_fused_rope_module(True, dim, torch.bfloat16, torch.bfloat16)


def sglang_rope_store(a: Args) -> Callable[[], Any]:
    run = _sglang_rope_module(a["q"].shape[2]).run_rope_store
    k_cache, v_cache = (a[x].view(a[x].shape[0], -1) for x in ("k_cache", "v_cache"))
    return partial(run, a["q"], a["k"], a["v"], k_cache, v_cache, a["cos_sin_cache"], a["positions"], a["slots"])


def _rope_kv_write(op: str, model: str, tokens: int, cache: str) -> Row:
    sets = rope_sets(tokens, model, cache)
    builds: dict[str, Build] = {OURS: ours(op)}
    if cache == "bf16" and "sglang" in peers.available():
        builds["sglang jit fused"] = sglang_rope_store
    q_heads, heads, dim = SHAPES[model]
    nbytes = tokens * dim * (4 * q_heads + 6 * heads + 2 * heads * sets[0]["k_cache"].element_size())
    about = {"op": op, "model": model, "tokens": tokens, "cache": cache}
    per_graph = 96 if tokens <= 512 else 24
    return op_row(about, sets, builds, nbytes=nbytes, per_graph=per_graph, host=300 if tokens == 1 else 0)


def rope_kv_write(quick: bool = False) -> list[Row]:
    """Rows: model, tokens, the cache's dtype. The GB/s count q and k read and written, v read, the caches' rows."""
    cases = [
        (model, n, cache)
        for cache, models in (("bf16", TOKENS), ("e4m3", TOKENS_E4M3))
        for model, counts in models.items()
        for n in (counts[:1] if quick else counts)
    ]
    return table_of(
        partial(_rope_kv_write, op="rope_kv_write", model=model, tokens=n, cache=cache) for model, n, cache in cases
    )


# --- qk_norm_rope_kv_write --------------------------------------------------------------------------

_QK = ("q", "k", "v", "q_weight", "k_weight", "cos_sin_cache", "positions", "k_cache", "v_cache", "slots")
_EPS = 1e-6


def _norm_and_put(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> None:
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    for x, weight in ((q, q_weight), (k, k_weight)):
        x.copy_(_halves(rms_norm(x, x.shape[-1:], weight, _EPS), cos, sin))
    k_cache[slots] = k
    v_cache[slots] = v


def _norm_then_rope(a: Args) -> Callable[[], Args]:
    """The norms write tensors of their own, in which rope_kv_write goes on: no copy back to q and k is asked for."""
    rope, dim = launcher("cuda", "rope_kv_write"), a["q"].shape[-1:]
    rest = [a[n] for n in ("v", "cos_sin_cache", "positions", "k_cache", "v_cache", "slots")]
    q, k, q_weight, k_weight = (a[n] for n in ("q", "k", "q_weight", "k_weight"))

    def call() -> Args:
        new_q, new_k = rms_norm(q, dim, q_weight, _EPS), rms_norm(k, dim, k_weight, _EPS)
        rope(new_q, new_k, *rest)
        return {"q": new_q, "k": new_k}

    return call


def _sglang_norm_rope_store(a: Args) -> Callable[[], Any]:
    """Its norm and rope want q, k and v in one tensor, as does its store its rows: they are views of it here too."""
    fn = peers.sglang("ops.attention.table_qk_norm_rope").table_qk_norm_rope_
    store = peers.sglang("ops.kvcache.kvcache").store_cache
    n, q_heads, dim = a["q"].shape
    heads = a["k"].shape[1]
    k, v = a["k"].view(n, -1), a["v"].view(n, -1)
    k_cache, v_cache = (a[x].view(a[x].shape[0], -1) for x in ("k_cache", "v_cache"))

    def call() -> None:
        fn(a["qkv"], a["positions"], a["q_weight"], a["k_weight"], a["cos_sin_cache"], q_heads, heads, dim, _EPS)
        store(k, v, k_cache, v_cache, a["slots"], reserved_skip_index=-1)

    return call


def _qk_norm_rope_kv_write(op: str, tokens: int) -> Row:
    q_heads, heads, dim = HEADS
    k_cache, v_cache = (inputs.cache((heads, dim), torch.bfloat16, 2) for _ in range(2))
    cos_sin = inputs.cos_sin(dim)
    q_weight, k_weight = (1 + 0.1 * inputs.randn(dim) for _ in range(2))
    row = tokens * dim * 2
    sets: list[Args] = []
    for _ in range(inputs.count_sets(row * (q_heads + 2 * heads))):
        qkv = inputs.randn(tokens, (q_heads + 2 * heads) * dim)
        q, k, v = (x.view(tokens, -1, dim) for x in qkv.split([q_heads * dim, heads * dim, heads * dim], -1))
        sets.append(
            {
                "q": q,
                "k": k,
                "v": v,
                "q_weight": q_weight,
                "k_weight": k_weight,
                "cos_sin_cache": cos_sin,
                "positions": inputs.integers(0, cos_sin.shape[0], tokens),
                "k_cache": k_cache,
                "v_cache": v_cache,
                "slots": inputs.slots(tokens, k_cache.shape[0]),
                "qkv": qkv,
            }
        )
    builds: dict[str, Build] = {
        OURS: ours(op),
        "rms_norm, then hal rope_kv_write": _norm_then_rope,
        "eager": positional(_norm_and_put, *_QK),
        "torch.compile": compiled(_norm_and_put, *_QK),
    }
    if "sglang" in peers.available():
        builds["sglang norm and rope, then store"] = _sglang_norm_rope_store
    nbytes = row * (2 * q_heads + 2 * heads + heads + 2 * heads)
    return write_row({"op": op, "tokens": tokens}, sets, nbytes, builds)


def qk_norm_rope_kv_write(quick: bool = False) -> list[Row]:
    """Rows: tokens. q, k and v are views of one fused projection."""
    return table_of(partial(_qk_norm_rope_kv_write, op="qk_norm_rope_kv_write", tokens=t) for t in sizes(quick))


# --- mla_rope_kv_write ------------------------------------------------------------------------------

_MLA = ("q_rope", "k_rope", "kv_lora", "cos_sin_cache", "positions", "kv_cache", "slots")


def _rotate_and_put(
    q_rope: Tensor, k_rope: Tensor, kv_lora: Tensor, cos_sin: Tensor, positions: Tensor, kv_cache: Tensor, slots: Tensor
) -> None:
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    q_rope.copy_(_pairs(q_rope, cos.unsqueeze(1), sin.unsqueeze(1)))
    k_rope.copy_(_pairs(k_rope, cos, sin))
    put_mla(kv_lora, k_rope, kv_cache, slots)


def _rope_then_put(a: Args) -> Callable[[], None]:
    rope, k = launcher("cuda", "rope_kv_write"), a["k_rope"].unsqueeze(1)
    q, cos_sin, positions = a["q_rope"], a["cos_sin_cache"], a["positions"]
    rows = [a[n] for n in ("kv_lora", "k_rope", "kv_cache", "slots")]

    def call() -> None:
        rope(q, k, None, cos_sin, positions, interleaved=True)
        put_mla(*rows)

    return call


def _sglang_rope_then_put(a: Args) -> Callable[[], None]:
    rope = peers.sglang("ops.attention.rope").apply_rope_inplace
    put, k = sglang_put_mla(a), a["k_rope"].unsqueeze(1)

    def call() -> None:
        rope(a["q_rope"], k, a["cos_sin_cache"], a["positions"], is_neox=False)
        put()

    return call


def _mla_rope_kv_write(op: str, tokens: int) -> Row:
    heads, lora, dim = MLA
    cache, cos_sin = inputs.cache((lora + dim,), torch.bfloat16, 1), inputs.cos_sin(dim)
    read = tokens * (heads * dim + dim + lora) * 2
    sets: list[Args] = [
        {
            "q_rope": inputs.randn(tokens, heads, dim),
            "k_rope": inputs.randn(tokens, dim),
            "kv_lora": inputs.randn(tokens, lora),
            "cos_sin_cache": cos_sin,
            "positions": inputs.integers(0, cos_sin.shape[0], tokens),
            "kv_cache": cache,
            "slots": inputs.slots(tokens, cache.shape[0]),
            "interleaved": True,
        }
        for _ in range(inputs.count_sets(read))
    ]
    builds: dict[str, Build] = {
        OURS: ours(op),
        "hal rope, then index_put": _rope_then_put,
        "eager": positional(_rotate_and_put, *_MLA),
        "torch.compile": compiled(_rotate_and_put, *_MLA),
    }
    if "sglang" in peers.available():
        builds["sglang jit rope, then tma"] = _sglang_rope_then_put
    nbytes = read + tokens * ((heads + 1) * dim + lora + dim) * 2
    return write_row({"op": op, "tokens": tokens}, sets, nbytes, builds)


def mla_rope_kv_write(quick: bool = False) -> list[Row]:
    """Rows: tokens. Pairs are interleaved, as DeepSeek's are."""
    return table_of(partial(_mla_rope_kv_write, op="mla_rope_kv_write", tokens=t) for t in sizes(quick))


TABLES: dict[str, Callable[[bool], list[Row]]] = {
    "rope_kv_write": rope_kv_write,
    "mla_rope_kv_write": mla_rope_kv_write,
    "qk_norm_rope_kv_write": qk_norm_rope_kv_write,
}
