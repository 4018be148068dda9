# mypy: disable-error-code="no-untyped-call, misc, arg-type, attr-defined, no-any-return, unused-ignore"
# torch.cuda has untyped streams and graphs.
"""The tables of ``hal bench --device cuda`` of what writes and moves KV rows beside rope_kv_write and kv_transfer.

Beside ours stand eager torch, the same through torch.compile, what one would write with hal's other ops and torch's own
were there no such op, and SGLang's kernels where they are importable. Each is built, compared with the op's reference
and captured in a graph before anything is timed; one that can't be is left out of its row, whose ``failed`` says why.
GB/s count what an op must move, read and written; ``copy`` is a plain copy in the same run, the ceiling.

    python -m hal.bench.cuda_kv [--json FILE] [--plot FILE] [TABLE ...]
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from hal import bench, ops
from hal.bench import OURS, Row, cuda, peers
from hal.kv.pool import KVPool
from hal.ops.spec import FP8

DEVICE = "cuda"
SIZES = (1, 16, 256, 4096)
HEADS = (32, 8, 128)
"""Query heads, key/value heads, head_dim: Llama-3-8B, and Qwen3-8B, which has the norms."""
MLA = (16, 512, 64)
"""Query heads (DeepSeek-V3's 128 over 8 GPUs), latent dim, rope dim."""
LAYERS = 32
POOL = 1 << 30
"""Bytes of a KV pool: many times a GPU's L2."""
TOLERANCE = {torch.bfloat16: 2**-7, torch.float8_e4m3fn: 4e-2}
"""Of the norm of the difference to the reference's output, over that output's. In bf16 each of an unfused sequence's
three roundings (norm, weight, rope) and the reference's own is 1.7e-3 of it; a wrong angle or weight is far more."""

Args = dict[str, Any]
Build = Callable[[Args], Callable[[], Any]]
"""From a set of the op's arguments a call on them. A dict that it returns has outputs by the argument they replace."""


# --- one row ----------------------------------------------------------------------------------------


def _row(about: Row, sets: list[Args], nbytes: int, builds: Mapping[str, Build], heavy: bool = False) -> Row:
    """Ours and the others on these sets of arguments: device and host microseconds, GB/s, what failed."""
    failed: dict[str, str] = {}
    calls: dict[str, Callable[[int], Any]] = {}
    before, want = _wanted(about["op"], sets[0])
    for name, build in builds.items():
        try:
            fns = [build(a) for a in sets]
            # What ran before this one has left the right rows, or rotated q once more.
            _restore(sets[0], before)
            _check(name, about["op"], sets[0], fns[0], want)
            _capture(fns[0])
        except Exception as e:  # a peer that fails must not take the others with it
            failed[name] = _said(e)
            continue
        calls[name] = lambda i, fns=fns: fns[i]()
    row = dict(about)
    if calls:
        times = cuda.device_us(
            calls, len(sets), per_graph=8 if heavy else 96 if nbytes < 8 << 20 else 24, rounds=15
        )
        row["device_us"] = times
        row["device_gbs"] = {**{n: nbytes / us / 1e3 for n, us in times.items()}, "copy": ceiling()}
        row["host_us"] = cuda.host_us(calls, len(sets), 20 if heavy else 100)
    if failed:
        row["failed"] = failed
    return row


def _said(e: Exception) -> str:
    return f"{type(e).__name__}: {e}".splitlines()[0][:300]


def _capture(fn: Callable[[], Any]) -> None:
    """One call in a graph, as `device_us` will have many."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            fn()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            fn()
        graph.replay()
    torch.cuda.synchronize()


@functools.cache
def ceiling() -> float:
    """GB/s of a plain copy, measured once a run."""
    return cuda.copy_gbs()


# --- what an op writes, and whether it is right -----------------------------------------------------


def _rows(a: Args) -> Tensor:
    """The slots that a call may touch."""
    return torch.cat([a["src_slots"], a["dst_slots"]]).unique() if "pool" in a else a["slots"]


def _read(op: str, a: Args) -> dict[str, Tensor]:
    """Copies of all that a call may change, of caches the rows of its slots."""
    if "pool" in a:
        return {half: getattr(a["pool"], half)[:, _rows(a)] for half in ("k", "v")}
    return {
        name: _bytes(a[name])[a["slots"]].view(a[name].dtype) if name.endswith("cache") else a[name].clone()
        for name in ops.get_spec(op).mutated
    }


def _restore(a: Args, saved: Mapping[str, Tensor]) -> None:
    for name, was in saved.items():
        if "pool" in a:
            getattr(a["pool"], name)[:, _rows(a)] = was
        elif name.endswith("cache"):
            _bytes(a[name])[a["slots"]] = _bytes(was)
        else:
            a[name].copy_(was)


def _bytes(t: Tensor) -> Tensor:
    """As something that torch can index, which fp8 is not."""
    return t.view(torch.uint8) if t.dtype in FP8 else t


def _wanted(op: str, a: Args) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(before, after): what the reference makes of it. The arguments are left as they were."""
    before = _read(op, a)
    spec = ops.get_spec(op)
    spec.reference(**{name: a[name] for name in a if name in spec.args})
    want = _read(op, a)
    _restore(a, before)
    same = [name for name in want if torch.equal(_bytes(want[name]), _bytes(before[name]))]
    if same:
        raise AssertionError(
            f"{op}: these inputs change nothing in {', '.join(same)}: nothing would be checked"
        )
    return before, want


def _check(name: str, op: str, a: Args, call: Callable[[], Any], want: Mapping[str, Tensor]) -> None:
    """Raises unless the call's outputs are the reference's: bit for bit where bytes move, else within `TOLERANCE`."""
    returned = call()
    got = {**_read(op, a), **(returned if isinstance(returned, dict) else {})}
    for part, right in want.items():
        if op in ("kv_move", "kv_write", "mla_kv_write") and right.dtype not in FP8:
            if not torch.equal(got[part], right):
                raise AssertionError(f"{op}: {name}: wrong rows in {part}")
            continue
        truth = right.double()
        error = float((got[part].double() - truth).norm() / truth.norm())
        if not error < TOLERANCE[right.dtype]:
            raise AssertionError(f"{op}: {name}: {part} is off by {error:.2g}")


def _ours(op: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"hal.backends.cuda.{op}"), op)


def _hal(op: str) -> Build:
    return lambda a: functools.partial(_ours(op), **a)


def _compiled(fn: Callable[..., Any], *names: str) -> Build:
    """`fn` of these arguments through torch.compile, for exactly these sizes."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, dynamic=False)
    return lambda a: functools.partial(compiled, *(a[n] for n in names))


def _eager(fn: Callable[..., Any], *names: str) -> Build:
    return lambda a: functools.partial(fn, *(a[n] for n in names))


def _table(cases: Iterable[Callable[[], Row]]) -> list[Row]:
    """The rows of all cases; one that can't even be made is a row that says so."""
    rows = []
    for case in cases:
        try:
            rows.append(case())
        except Exception as e:
            traceback.print_exc()
            rows.append({**getattr(case, "keywords", {}), "failed": {OURS: _said(e)}})
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    return rows


# --- inputs -----------------------------------------------------------------------------------------


def _sets(nbytes: int) -> int:
    """So many sets of inputs that they are not read from the L2."""
    return max(3, min(16, (256 << 20) // max(1, nbytes)))


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(torch.bfloat16)


def _slots(n: int, pool: int) -> Tensor:
    return torch.randperm(pool, device=DEVICE, dtype=torch.int64)[:n]


def _cache(row: tuple[int, ...], dtype: torch.dtype, share: int) -> Tensor:
    """A cache of rows: as many as a `share`-th of the pool holds in bf16."""
    size = 2 * share
    for d in row:
        size *= d
    return torch.zeros(max(64, POOL // size), *row, dtype=torch.bfloat16, device=DEVICE).to(dtype)


def _angles(dim: int) -> Tensor:
    angle = torch.rand(32768, dim // 2, device=DEVICE, dtype=torch.float32) * 6.3
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def _halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def _pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)


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
    scales = [torch.tensor([a[x]], dtype=torch.float32, device=DEVICE) for x in ("k_scale", "v_scale")]
    return lambda: fn(None, a["k"], a["v"], a["k_cache"], a["v_cache"], a["slots"], *scales)


def _kv_write(op: str, tokens: int, cache: str) -> Row:
    _, heads, dim = HEADS
    kind = torch.bfloat16 if cache == "bf16" else torch.float8_e4m3fn
    k_cache, v_cache = (_cache((heads, dim), kind, 2) for _ in range(2))
    read = 2 * tokens * heads * dim * 2
    scales = {} if cache == "bf16" else {"k_scale": 0.5, "v_scale": 0.25}
    sets: list[Args] = [
        {
            "k": _random(tokens, heads, dim), "v": _random(tokens, heads, dim), "k_cache": k_cache,
            "v_cache": v_cache, "slots": _slots(tokens, k_cache.shape[0]), **scales,
        }
        for _ in range(_sets(read))
    ]  # fmt: skip
    names = ("k", "v", "k_cache", "v_cache", "slots", *scales)
    torchs = _put if cache == "bf16" else _put_fp8
    builds: dict[str, Build] = {
        OURS: _hal(op),
        "eager": _eager(torchs, *names),
        "torch.compile": _compiled(torchs, *names),
    }
    if _sglang():
        builds["sglang jit"] = _sglang_store if cache == "bf16" else _sglang_store_fp8
    nbytes = read + 2 * tokens * heads * dim * kind.itemsize
    return _row({"op": op, "tokens": tokens, "cache": cache}, sets, nbytes, builds)


def _sglang() -> bool:
    return "sglang" in peers.available()


def kv_write(quick: bool = False) -> list[Row]:
    """Rows: tokens, the cache's dtype."""
    sizes = SIZES[:2] if quick else SIZES
    return _table(
        functools.partial(_kv_write, op="kv_write", tokens=t, cache=c)
        for c in ("bf16", "e4m3")
        for t in sizes
    )


# --- qk_norm_rope_kv_write --------------------------------------------------------------------------

_QK = ("q", "k", "v", "q_weight", "k_weight", "cos_sin_cache", "positions", "k_cache", "v_cache", "slots")
_EPS = 1e-6


def _normed_and_put(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin: Tensor, positions: Tensor,
    k_cache: Tensor, v_cache: Tensor, slots: Tensor,
) -> None:  # fmt: skip
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    for x, weight in ((q, q_weight), (k, k_weight)):
        x.copy_(_halves(rms_norm(x, x.shape[-1:], weight, _EPS), cos, sin))
    k_cache[slots] = k
    v_cache[slots] = v


def _norm_then_rope(a: Args) -> Callable[[], Args]:
    """The norms write tensors of their own, in which rope_kv_write goes on: no copy back to q and k is asked for."""
    rope, dim = _ours("rope_kv_write"), a["q"].shape[-1:]
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
        fn(
            a["qkv"],
            a["positions"],
            a["q_weight"],
            a["k_weight"],
            a["cos_sin_cache"],
            q_heads,
            heads,
            dim,
            _EPS,
        )
        store(k, v, k_cache, v_cache, a["slots"], reserved_skip_index=-1)

    return call


def _qk_norm_rope_kv_write(op: str, tokens: int) -> Row:
    q_heads, heads, dim = HEADS
    k_cache, v_cache = (_cache((heads, dim), torch.bfloat16, 2) for _ in range(2))
    cos_sin = _angles(dim)
    q_weight, k_weight = (1 + 0.1 * _random(dim) for _ in range(2))
    row = tokens * dim * 2
    sets: list[Args] = []
    for _ in range(_sets(row * (q_heads + 2 * heads))):
        qkv = _random(tokens, (q_heads + 2 * heads) * dim)
        q, k, v = (x.view(tokens, -1, dim) for x in qkv.split([q_heads * dim, heads * dim, heads * dim], -1))
        sets.append({
            "q": q, "k": k, "v": v, "q_weight": q_weight, "k_weight": k_weight, "cos_sin_cache": cos_sin,
            "positions": torch.randint(0, cos_sin.shape[0], (tokens,), device=DEVICE, dtype=torch.int64),
            "k_cache": k_cache, "v_cache": v_cache, "slots": _slots(tokens, k_cache.shape[0]), "qkv": qkv,
        })  # fmt: skip
    builds: dict[str, Build] = {
        OURS: lambda a: functools.partial(_ours(op), *(a[n] for n in _QK)),
        "rms_norm, then hal rope_kv_write": _norm_then_rope,
        "eager": _eager(_normed_and_put, *_QK),
        "torch.compile": _compiled(_normed_and_put, *_QK),
    }
    if _sglang():
        builds["sglang norm and rope, then store"] = _sglang_norm_rope_store
    nbytes = row * (2 * q_heads + 2 * heads + heads + 2 * heads)
    return _row({"op": op, "tokens": tokens}, sets, nbytes, builds)


def qk_norm_rope_kv_write(quick: bool = False) -> list[Row]:
    """Rows: tokens. q, k and v are views of one fused projection."""
    sizes = SIZES[:2] if quick else SIZES
    return _table(
        functools.partial(_qk_norm_rope_kv_write, op="qk_norm_rope_kv_write", tokens=t) for t in sizes
    )


# --- MLA --------------------------------------------------------------------------------------------


def _put_mla(kv_lora: Tensor, k_rope: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    lora = kv_lora.shape[1]
    kv_cache[slots, :lora] = kv_lora
    kv_cache[slots, lora:] = k_rope


def _sglang_put_mla(a: Args) -> Callable[[], Any]:
    fn = peers.sglang("ops.kvcache.set_mla_kv_buffer").set_mla_kv_buffer
    rows = [a[n] for n in ("kv_cache", "slots", "kv_lora", "k_rope")]
    return lambda: fn(*rows, reserved_skip_index=-1)


def _mla_kv_write(op: str, tokens: int) -> Row:
    _, lora, dim = MLA
    cache = _cache((lora + dim,), torch.bfloat16, 1)
    nbytes = 2 * tokens * (lora + dim) * 2
    sets: list[Args] = [
        {
            "kv_lora": _random(tokens, lora), "k_rope": _random(tokens, dim), "kv_cache": cache,
            "slots": _slots(tokens, cache.shape[0]),
        }
        for _ in range(_sets(nbytes // 2))
    ]  # fmt: skip
    names = tuple(sets[0])
    builds: dict[str, Build] = {
        OURS: _hal(op),
        "eager": _eager(_put_mla, *names),
        "torch.compile": _compiled(_put_mla, *names),
    }
    if _sglang():
        builds["sglang jit tma"] = _sglang_put_mla
    return _row({"op": op, "tokens": tokens}, sets, nbytes, builds)


def mla_kv_write(quick: bool = False) -> list[Row]:
    """Rows: tokens."""
    sizes = SIZES[:2] if quick else SIZES
    return _table(functools.partial(_mla_kv_write, op="mla_kv_write", tokens=t) for t in sizes)


_MLA = ("q_rope", "k_rope", "kv_lora", "cos_sin_cache", "positions", "kv_cache", "slots")


def _turned_and_put(
    q_rope: Tensor, k_rope: Tensor, kv_lora: Tensor, cos_sin: Tensor, positions: Tensor, kv_cache: Tensor,
    slots: Tensor,
) -> None:  # fmt: skip
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    q_rope.copy_(_pairs(q_rope, cos.unsqueeze(1), sin.unsqueeze(1)))
    k_rope.copy_(_pairs(k_rope, cos, sin))
    _put_mla(kv_lora, k_rope, kv_cache, slots)


def _rope_then_put(a: Args) -> Callable[[], None]:
    rope, k = _ours("rope_kv_write"), a["k_rope"].unsqueeze(1)
    q, cos_sin, positions = a["q_rope"], a["cos_sin_cache"], a["positions"]
    rows = [a[n] for n in ("kv_lora", "k_rope", "kv_cache", "slots")]

    def call() -> None:
        rope(q, k, None, cos_sin, positions, interleaved=True)
        _put_mla(*rows)

    return call


def _sglang_rope_then_put(a: Args) -> Callable[[], None]:
    rope = peers.sglang("ops.attention.rope").apply_rope_inplace
    put, k = _sglang_put_mla(a), a["k_rope"].unsqueeze(1)

    def call() -> None:
        rope(a["q_rope"], k, a["cos_sin_cache"], a["positions"], is_neox=False)
        put()

    return call


def _mla_rope_kv_write(op: str, tokens: int) -> Row:
    heads, lora, dim = MLA
    cache, cos_sin = _cache((lora + dim,), torch.bfloat16, 1), _angles(dim)
    read = tokens * (heads * dim + dim + lora) * 2
    sets: list[Args] = [
        {
            "q_rope": _random(tokens, heads, dim), "k_rope": _random(tokens, dim),
            "kv_lora": _random(tokens, lora), "cos_sin_cache": cos_sin,
            "positions": torch.randint(0, cos_sin.shape[0], (tokens,), device=DEVICE, dtype=torch.int64),
            "kv_cache": cache, "slots": _slots(tokens, cache.shape[0]), "interleaved": True,
        }
        for _ in range(_sets(read))
    ]  # fmt: skip
    builds: dict[str, Build] = {
        OURS: _hal(op),
        "hal rope, then index_put": _rope_then_put,
        "eager": _eager(_turned_and_put, *_MLA),
        "torch.compile": _compiled(_turned_and_put, *_MLA),
    }
    if _sglang():
        builds["sglang jit rope, then tma"] = _sglang_rope_then_put
    nbytes = read + tokens * ((heads + 1) * dim + lora + dim) * 2
    return _row({"op": op, "tokens": tokens}, sets, nbytes, builds)


def mla_rope_kv_write(quick: bool = False) -> list[Row]:
    """Rows: tokens. Pairs are interleaved, as DeepSeek's are."""
    sizes = SIZES[:2] if quick else SIZES
    return _table(functools.partial(_mla_rope_kv_write, op="mla_rope_kv_write", tokens=t) for t in sizes)


# --- kv_move ----------------------------------------------------------------------------------------


def _by_layer(a: Args) -> Callable[[], None]:
    pool, src, dst = a["pool"], a["src_slots"], a["dst_slots"]
    layers = [x for half in (pool.k, pool.v) for x in half]

    def call() -> None:
        for x in layers:
            x.index_copy_(0, dst, x.index_select(0, src))

    return call


def _all_layers(k: Tensor, v: Tensor, src: Tensor, dst: Tensor) -> None:
    for x in (k, v):
        x.index_copy_(1, dst, x.index_select(1, src))


def _of_halves(fn: Callable[..., Any]) -> Build:
    return lambda a: functools.partial(fn, a["pool"].k, a["pool"].v, a["src_slots"], a["dst_slots"])


def _sglang_move(a: Args) -> Callable[[], None]:
    """In chunks of 256 rows, as its pool does for rows of this size."""
    fn = peers.sglang("ops.kvcache.cache_move").copy_all_layer_kv_cache_func
    pool, n = a["pool"], a["src_slots"].shape[0]
    layers = [x for half in (pool.k, pool.v) for x in half]
    pointers = torch.tensor([x.data_ptr() for x in layers], dtype=torch.uint64, device=DEVICE)
    row = layers[0][0].nbytes
    strides = torch.full((len(layers),), row, dtype=torch.int64, device=DEVICE)
    config = {"bytes_per_tile": 128, "byte_tiles": -(-row // 128), "num_warps": 4}
    parts = [
        (a["dst_slots"][i : i + 256], a["src_slots"][i : i + 256], min(256, n - i)) for i in range(0, n, 256)
    ]

    def call() -> None:
        for dst, src, count in parts:
            fn(pointers, strides, dst, src, count, 1 << (count - 1).bit_length(), config)

    return call


def _kv_move(op: str, rows: int, slots: str) -> Row:
    _, heads, dim = HEADS
    size = max(4 * rows, POOL // (2 * LAYERS * heads * dim * 2))
    k, v = (_random(LAYERS, size, heads, dim) for _ in range(2))
    pool = KVPool(k, v, layout="layer_first")
    unit = rows * max(p.row_bytes for p in pool.planes())
    whole = torch.empty(2 * LAYERS * unit, dtype=torch.uint8, device=DEVICE)
    sets: list[Args] = []
    for _ in range(4):
        found = _slots(2 * rows, size)
        src = found[:rows]
        dst = found[rows:] if slots == "apart" else src.roll(-1)
        sets.append(
            {"pool": pool, "src_slots": src.contiguous(), "dst_slots": dst.contiguous(), "workspace": whole}
        )
    torch._dynamo.reset()
    builds: dict[str, Build] = {
        OURS: _hal(op),
        "hal, workspace for one layer": lambda a: functools.partial(
            _ours(op), **{**a, "workspace": whole[:unit]}
        ),
        "eager by layer": _by_layer,
        "eager, all layers": _of_halves(_all_layers),
        "torch.compile": _of_halves(torch.compile(_all_layers, dynamic=False)),
    }
    if _sglang():
        builds["sglang"] = _sglang_move
    return _row({"op": op, "rows": rows, "slots": slots}, sets, 2 * 2 * LAYERS * unit, builds, heavy=True)


def kv_move(quick: bool = False) -> list[Row]:
    """Rows: how many, and whether sources and targets are ``apart`` or the targets are the sources in another order
    (``cycle``). The GB/s count each row once read and once written: a move through a workspace does both twice.
    """
    cases = [(n, s) for n in ((64,) if quick else (64, 1024)) for s in ("apart", "cycle")]
    return _table(functools.partial(_kv_move, op="kv_move", rows=n, slots=s) for n, s in cases)


TABLES = ("kv_write", "mla_kv_write", "mla_rope_kv_write", "qk_norm_rope_kv_write", "kv_move")


def main(argv: list[str] | None = None) -> int:
    """Runs tables (none named: all), shows them, and writes them where asked; 1 where ours failed."""
    parser = argparse.ArgumentParser(prog="python -m hal.bench.cuda_kv", description=main.__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--json", help="a file for the run")
    parser.add_argument("--plot", help="an SVG file: GB/s by tokens")
    parser.add_argument("--quick", action="store_true", help="few sizes, to see that it runs")
    given = parser.parse_args(argv)
    if unknown := [t for t in given.tables if t not in TABLES]:
        parser.error(f"no table {unknown[0]!r}; there are {', '.join(TABLES)}")
    run = bench.run_of(DEVICE, {t: globals()[t] for t in given.tables or TABLES}, given.quick)
    bench.show(run)
    if given.json:
        with open(given.json, "w") as file:
            json.dump(run, file, indent=1)
    if given.plot:
        bench.draw(run, given.plot)
    return bench.exit_code(run)


if __name__ == "__main__":
    raise SystemExit(main())
