"""rope_kv_write: its truth, its inputs and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal.kv.view import count_slots
from hal.ops._torch import in_range
from hal.ops.proofs.fresh import HEADS, MANY, PAGES, ROTATED, ROWS, SLOTS, Fresh, Wide, room_for
from hal.ops.proofs.inputs import (
    DTYPES,
    FLOAT_DTYPES,
    INDEX_DTYPES,
    arranged,
    cos_sin_table,
    floats,
    generator,
    odd_indices,
    paired,
    randint,
    refused,
    some_slots,
    spaced,
)
from hal.ops.proofs.judge import ROPE_SLACK, Candidate, Want, largest
from hal.ops.rope_kv_write import rotate
from hal.ops.spec import Proof, Sample


def oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    (valid, cos, sin), rotary, interleaved = angles(a), a["cos_sin_cache"].shape[1], a["interleaved"]
    want: dict[str, Want] = {}
    truth: dict[str, tuple[Tensor, Tensor]] = {}
    for x in ("q", "k"):
        t = a[x].double()
        value, terms = t.clone(), torch.zeros_like(t)
        value[..., :rotary] = rotate(t, cos, sin, interleaved)
        terms[..., :rotary] = sum_terms(t, cos, sin, interleaved)
        truth[x] = value, terms
        named = _host.zeros(t.shape, dtype=torch.bool)
        if x == "q" or a["write_k"]:
            named[..., :rotary] = valid.view(-1, 1, 1)
        want[x] = Want(named, (Candidate(value, terms * ROPE_SLACK),))
    return want | want_of_caches(a, valid, *truth["k"], ROPE_SLACK)


def angles(a: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """(whether a token's position is in the table, its cosines and its sines in float64, broadcast over heads)."""
    max_positions, rotary = a["cos_sin_cache"].shape
    valid = in_range(a["positions"], max_positions)
    table = a["cos_sin_cache"].double() if max_positions else _host.zeros(1, rotary, dtype=torch.float64)
    cos, sin = table[torch.where(valid, a["positions"], 0).long()].unsqueeze(1).chunk(2, dim=-1)
    return valid, cos, sin


def want_of_caches(a: Mapping[str, Any], valid: Tensor, value: Tensor, terms: Tensor, step: float) -> dict[str, Want]:
    """What the caches must hold, none where there are none: k's float64 truth, within `step` of sum|terms|, and v."""
    want: dict[str, Want] = {}
    for x in ("k", "v") if a["k_cache"] is not None else ():
        cache, source = a[f"{x}_cache"], a[x]
        if cache.dtype == source.dtype:
            rows = value if x == "k" else source
            slack = terms * step if x == "k" else None
        else:
            scale = a[f"{x}_scale"]
            scale = 1.0 if scale is None else float(scale)
            scale = float(_host.tensor(scale, dtype=torch.float32))
            rows = (value if x == "k" else source.double()) / scale
            size = rows.abs() if x == "v" else torch.maximum(terms, value.abs()) / abs(scale)
            slack = size * (step if x == "k" else ROPE_SLACK)
            rows = rows.clamp(-largest(cache.dtype), largest(cache.dtype))
            slack = torch.where(torch.isfinite(slack), slack, 0.0)
        want[f"{x}_cache"] = want_of_rows(cache, a["slots"], valid, rows, slack)
    return want


def sum_terms(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """sum|terms| of each rotated element."""
    half = cos.shape[-1]
    part, c, s = x[..., : 2 * half].abs(), cos.abs(), sin.abs()
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])
    pair = (a * c + b * s, b * c + a * s)
    return torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)


def want_of_rows(cache: Tensor, slots: Tensor, valid: Tensor, rows: Tensor, slack: Tensor | None) -> Want:
    """What a cache must hold after ``cache[slots] = rows``: one candidate for each time a slot comes again."""
    size = count_slots(cache)
    flat = (size, *cache.shape[-2:])
    named = _host.zeros(flat, dtype=torch.bool)
    rounds: list[tuple[list[int], list[int]]] = []
    seen: dict[int, int] = {}
    for i, (slot, ok) in enumerate(zip(slots.tolist(), valid.tolist(), strict=True)):
        if ok and 0 <= slot < size:
            named[slot] = True
            turn = seen[slot] = seen.get(slot, -1) + 1
            if turn == len(rounds):
                rounds.append(([], []))
            rounds[turn][0].append(slot)
            rounds[turn][1].append(i)
    candidates = []
    value = _host.zeros(flat, dtype=rows.dtype)
    spread = None if slack is None else _host.zeros(flat, dtype=torch.float64)
    for where, which in rounds:
        # A slot that does not come again keeps its last candidate.
        value, spread = value.clone(), None if spread is None else spread.clone()
        value[where] = rows[which]
        if spread is not None and slack is not None:
            spread[where] = slack[which]
        candidates.append(Candidate(value.view(cache.shape), None if spread is None else spread.view(cache.shape)))
    return Want(named.view(cache.shape), tuple(candidates))


def make(
    seed: int = 0,
    n: int = 5,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    rotary_dim: int | None = None,
    dtype: str = "bf16",
    cos_dtype: str = "fp32",
    position: str = "i64",
    slot: str = "i64",
    max_positions: int = 50,
    cache: str = "slots",
    slots: int = 48,
    page_size: int = 16,
    cache_dtype: str | None = None,
    cache_view: str = "plain",
    qkv: str = "separate",
    interleaved: bool = False,
    scale: str = "none",
    write_k: bool = True,
    values: str = "valid",
    position_values: str | None = None,
    specials: bool = False,
) -> dict[str, Any]:
    """cache: ``none``, ``slots``, ``paged``. cache_view: ``plain``; ``pairs`` (k and v interleaved in one tensor,
    as vLLM keeps them); ``padded`` (odd strides); ``far`` (slots 2^29 elements apart). qkv: ``separate``,
    ``fused`` (views of one tensor), ``misaligned`` (starting off a 16-byte boundary).
    scale: ``none``, ``float``, ``tensor``.
    """
    g = generator(seed)
    dv, rotary, dt = v_head_dim or head_dim, rotary_dim or head_dim, FLOAT_DTYPES[dtype]
    q, k, v = _qkv(g, n, (q_heads, kv_heads, kv_heads), (head_dim, head_dim, dv), dt, qkv, specials)
    cos_sin = cos_sin_table(g, max_positions, rotary, FLOAT_DTYPES[cos_dtype])
    positions = randint(g, 0, max_positions, (n,))
    args: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "cos_sin_cache": cos_sin,
        "positions": odd_indices(positions, max_positions, position_values or "valid", INDEX_DTYPES[position]),
        "k_cache": None,
        "v_cache": None,
        "slots": None,
        "interleaved": interleaved,
        "k_scale": None,
        "v_scale": None,
        "write_k": write_k,
    }
    if cache == "none":
        return args
    kind = FLOAT_DTYPES[cache_dtype or dtype]
    lead = (slots // page_size, page_size) if cache == "paged" else (slots,)
    args["k_cache"], args["v_cache"] = _caches(g, (*lead, kv_heads), (head_dim, dv), kind, cache_view)
    # One place on: an odd slot must meet a valid position, or the position alone decides.
    args["slots"] = odd_indices(some_slots(g, n, slots), slots, values, INDEX_DTYPES[slot]).roll(1)
    if scale != "none":
        args["k_scale"], args["v_scale"] = 0.37, 2.25
    if scale == "tensor":
        args["k_scale"], args["v_scale"] = _host.tensor([0.37]), _host.tensor([2.25])
    return args


def _qkv(
    g: torch.Generator, n: int, heads: tuple[int, ...], dims: tuple[int, ...], dtype: torch.dtype, kind: str, odd: bool
) -> list[Tensor]:
    parts = arranged([floats(g, (n, h * d), dtype, odd) for h, d in zip(heads, dims, strict=True)], kind)
    return [torch.unflatten(p, 1, (h, d)) for p, h, d in zip(parts, heads, dims, strict=True)]


def _caches(
    g: torch.Generator, lead: tuple[int, ...], dims: tuple[int, int], dtype: torch.dtype, view: str
) -> tuple[Tensor, Tensor]:
    fresh = [_host.randn(*lead, d, generator=g).clamp(-4, 4).to(dtype) for d in dims]
    if view == "pairs":
        return paired(g, lead, dims, dtype)
    return spaced(fresh[0], view), spaced(fresh[1], view)


_bad, _bad_fp8 = refused(make, n=3, slots=32), refused(make, cache_dtype="e4m3")


_SHAPES = {
    "llama3-8b": (32, 8, 128),
    "llama3-70b-tp8": (8, 1, 128),
    "qwen3-30b-a3b": (32, 4, 128),
    "smollm2": (9, 3, 64),
}


def _shape(name: str) -> dict[str, Any]:
    return dict(zip(("q_heads", "kv_heads", "head_dim"), _SHAPES[name], strict=True))


_FEW = {"q_heads": (1, 2), "kv_heads": 1, "head_dim": 64, "rotary_dim": 32}


FRESH = Fresh(
    {
        "n": Wide(ROTATED, {**_FEW, "slots": room_for("n")}),
        "slots": Wide(SLOTS, {**_FEW, "n": MANY, "cache": ("slots", "paged")}, PAGES),
        "max_positions": Wide(ROWS, {**_FEW, "n": MANY}),
        "q_heads": Wide(HEADS),
        "kv_heads": Wide(HEADS),
        "page_size": Wide([64, 128, 256], {"cache": "paged", "slots": 1024, "n": MANY}),
    },
    lambda p: (
        p["head_dim"] * (p["n"] * (p["q_heads"] + 2 * p["kv_heads"]) + 2 * p["slots"] * p["kv_heads"])
        + 32 * p.get("max_positions", 0)
    ),
    {"n": (9, 40)},
)


FP8_SAMPLES = tuple(
    Sample(f"{c}-{d}-scale-{s}", {"cache_dtype": c, "dtype": d, "scale": s, "n": 9}, f"feature:fp8_{c}")
    for c in ("e4m3", "e5m2")
    for d, s in (("bf16", "none"), ("fp16", "float"), ("fp32", "tensor"), ("bf16", "tensor"))
) + tuple(
    Sample(f"{c}-specials", {"cache_dtype": c, "specials": True, "n": 9, "scale": "float"}, f"feature:fp8_{c}")
    for c in ("e4m3", "e5m2")
)


PROOF = Proof(
    oracle=oracle,
    make=make,
    samples=(
        *(Sample(f"{d}", {"dtype": d}) for d in DTYPES),
        *(Sample(f"{d}-cos-{d}", {"dtype": d, "cos_dtype": d, "n": 7}) for d in ("fp16", "bf16")),
        *(Sample(f"{name}-bf16", {**_shape(name), "n": 3}) for name in _SHAPES),
        *(
            Sample(f"llama3-8b-{d}", {**_shape("llama3-8b"), "n": 4, "dtype": d, "cache": "paged"})
            for d in ("fp16", "fp32")
        ),
        Sample("i32-i64", {"position": "i32"}),
        Sample("i64-i32", {"slot": "i32"}),
        Sample("i32-i32", {"position": "i32", "slot": "i32"}),
        Sample("one", {"n": 1}),
        Sample("empty", {"n": 0}, control="one"),
        Sample("past-one-block", {"n": 700, "slots": 1024, "q_heads": 2, "kv_heads": 1}),
        Sample("paged-16", {"cache": "paged", "n": 20}),
        Sample("paged-1", {"cache": "paged", "page_size": 1}),
        Sample("paged-3", {"cache": "paged", "page_size": 3, "n": 20}),
        Sample("paged-pairs", {"cache": "paged", "cache_view": "pairs", "n": 20}),
        Sample("slots-pairs", {"cache_view": "pairs"}),
        Sample("slots-padded", {"cache_view": "padded", "dtype": "fp16"}),
        Sample("paged-padded", {"cache": "paged", "cache_view": "padded", "n": 9}),
        *(Sample(f"fused-qkv-{d}", {"qkv": "fused", "dtype": d, "n": 6}) for d in DTYPES),
        *(Sample(f"misaligned-{d}", {"qkv": "misaligned", "dtype": d, "n": 6}) for d in DTYPES),
        Sample("partial-rotary", {"head_dim": 128, "rotary_dim": 64}),
        Sample("partial-rotary-fp32", {"head_dim": 64, "rotary_dim": 32, "dtype": "fp32", "cache": "paged"}),
        Sample("v-head-dim", {"head_dim": 128, "v_head_dim": 64}),
        Sample("mha", {"q_heads": 4, "kv_heads": 4}),
        Sample("more-kv-heads-than-q", {"q_heads": 1, "kv_heads": 3}),
        *(Sample(f"rope-alone-{d}", {"cache": "none", "dtype": d, "n": 9}) for d in DTYPES),
        *(Sample(f"keep-k-{d}", {"write_k": False, "dtype": d, "n": 9}) for d in ("bf16", "fp32")),
        Sample("skip", {"n": 21, "values": "skip"}),
        Sample("nothing-written", {"n": 9, "values": "none"}),
        Sample("edge", {"n": 25, "values": "edge", "position_values": "edge"}),
        Sample("edge-i32", {"n": 25, "values": "edge", "position_values": "edge", "slot": "i32", "position": "i32"}),
        Sample("extreme", {"n": 31, "values": "extreme", "position_values": "extreme", "cache": "paged"}),
        Sample(
            "extreme-i32",
            {"n": 31, "values": "extreme", "position_values": "extreme", "slot": "i32", "position": "i32"},
        ),
        Sample("equal-slots", {"n": 6, "values": "equal"}),
        Sample("no-slots", {"slots": 0, "values": "none"}),
        Sample("no-positions", {"max_positions": 0, "position_values": "edge"}),
        *(Sample(f"specials-{d}", {"dtype": d, "specials": True, "n": 9}) for d in DTYPES),
        Sample("far-slots", {"cache_view": "far", "slots": 6, "n": 6}, large=True),
        *(Sample(f"interleaved-{d}", {"interleaved": True, "dtype": d}, "feature:interleaved") for d in DTYPES),
        Sample("interleaved-partial", {"interleaved": True, "head_dim": 128, "rotary_dim": 64}, "feature:interleaved"),
        Sample("interleaved-alone", {"interleaved": True, "cache": "none", "n": 40}, "feature:interleaved"),
        *(
            Sample(f"head-dim-{d}", {"head_dim": d, "n": 4, "cache": "paged"}, "feature:any_head_dim")
            for d in (40, 72, 80, 96, 192, 256)
        ),
        Sample("rotary-20-of-80", {"head_dim": 80, "rotary_dim": 20}, "feature:any_head_dim"),
        *FP8_SAMPLES,
        Sample(
            "e4m3-paged-pairs",
            {"cache_dtype": "e4m3", "cache": "paged", "cache_view": "pairs", "n": 20},
            "feature:fp8_e4m3",
        ),
        Sample("e4m3-keep-k", {"cache_dtype": "e4m3", "write_k": False, "n": 20, "scale": "float"}, "feature:fp8_e4m3"),
    ),
    errors=(
        _bad("q-fp64", q=lambda: _host.zeros(3, 4, 64, dtype=torch.float64)),
        _bad("q-rank-2", q=lambda: _host.zeros(3, 256, dtype=torch.bfloat16)),
        _bad("q-none", q=None),
        _bad("k-other-dtype", k=lambda: _host.zeros(3, 2, 64)),
        _bad("k-fewer-tokens", k=lambda: _host.zeros(2, 2, 64, dtype=torch.bfloat16)),
        _bad("k-other-head-dim", k=lambda: _host.zeros(3, 2, 32, dtype=torch.bfloat16)),
        _bad("q-last-dim-strided", q=lambda: _host.zeros(3, 4, 128, dtype=torch.bfloat16)[..., ::2]),
        _bad("q-expanded", q=lambda: _host.zeros(1, 4, 64, dtype=torch.bfloat16).expand(3, 4, 64)),
        _bad("v-other-heads", v=lambda: _host.zeros(3, 3, 64, dtype=torch.bfloat16)),
        _bad(
            "v-expanded-and-strided", v=lambda: _host.zeros(1, 2, 128, dtype=torch.bfloat16).expand(3, 2, 128)[..., ::2]
        ),
        _bad("v-missing", v=None),
        _bad("rotary-odd", cos_sin_cache=lambda: _host.zeros(50, 63)),
        _bad("rotary-zero", cos_sin_cache=lambda: _host.zeros(50, 0)),
        _bad("rotary-too-large", cos_sin_cache=lambda: _host.zeros(50, 128)),
        _bad("cos-other-dtype", cos_sin_cache=lambda: _host.zeros(50, 64).half()),
        _bad("cos-strided", cos_sin_cache=lambda: _host.zeros(50, 128)[:, :64]),
        _bad("positions-float", positions=lambda: _host.zeros(3)),
        _bad("positions-too-few", positions=lambda: _host.zeros(2, dtype=torch.int64)),
        _bad("slots-too-many", slots=lambda: _host.zeros(4, dtype=torch.int64)),
        _bad("slots-missing", slots=None),
        _bad("v-cache-missing", v_cache=None),
        _bad("v-cache-smaller", v_cache=lambda: _host.zeros(31, 2, 64, dtype=torch.bfloat16)),
        _bad("v-cache-other-rank", v_cache=lambda: _host.zeros(2, 16, 2, 64).bfloat16()),
        _bad("k-cache-other-dtype", k_cache=lambda: _host.zeros(32, 2, 64)),
        _bad("k-cache-other-heads", k_cache=lambda: _host.zeros(32, 4, 64).bfloat16()),
        _bad("k-cache-head-dim-last", k_cache=lambda: _host.zeros(32, 64, 2).bfloat16().mT),
        _bad("scale-without-fp8", k_scale=0.5),
        _bad("v-scale-without-fp8", v_scale=lambda: _host.ones(1)),
        _bad_fp8("scale-of-two", k_scale=lambda: _host.ones(2)),
        _bad_fp8("scale-zero", k_scale=0.0),
        _bad_fp8("scale-text", k_scale="1"),
        refused(make, cache="none")("keep-k-without-caches", write_k=False),
        _bad("interleaved-text", interleaved="yes"),
    ),
    ragged={
        "n": (0, 80),
        "q_heads": (1, 9),
        "kv_heads": (1, 5),
        "head_dim": [64, 128],
        "dtype": DTYPES,
        "position": ("i32", "i64"),
        "slot": ("i32", "i64"),
        "cache": ("none", "slots", "paged"),
        "page_size": [1, 3, 16],
        "slots": (96, 96),
        "qkv": ("separate", "fused", "misaligned"),
        "cache_view": ("plain", "pairs", "padded"),
        "values": ("valid", "skip", "edge", "extreme"),
        "position_values": ("valid", "edge", "extreme"),
    },
    fresh=FRESH,
)
