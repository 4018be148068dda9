"""mla_rope_kv_write: its truth, its inputs and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hal import _host
from hal.ops.mla_rope_kv_write import as_rope_kv_write
from hal.ops.proofs.fresh import HEADS, MANY, ROTATED, ROWS, Fresh, Wide, room_for
from hal.ops.proofs.inputs import (
    DTYPES,
    FLOAT_DTYPES,
    INDEX_DTYPES,
    cos_sin_table,
    floats,
    generator,
    odd_indices,
    randint,
    refused,
    some_slots,
)
from hal.ops.proofs.judge import Want
from hal.ops.proofs.mla_kv_write import DEEPSEEK, FORMS, FRESH_ROWS, join_rows, make_cache, make_rows, make_scale
from hal.ops.proofs.rope_kv_write import FP8_SAMPLES
from hal.ops.rope_kv_write import SPEC as ROPE
from hal.ops.spec import Proof, Sample


def oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    want = ROPE.oracle(as_rope_kv_write(a))
    k, shape = want["k"], a["k_rope"].shape
    flat = tuple(type(c)(c.value.view(shape), None if c.slack is None else c.slack.view(shape)) for c in k.candidates)
    return {
        "q_rope": want["q"],
        "k_rope": Want(k.named.view(shape), flat),
        "kv_cache": join_rows(a["kv_cache"], want["v_cache"], want["k_cache"]),
    }


def make(
    seed: int = 0,
    n: int = 5,
    q_heads: int = 4,
    lora_dim: int = 128,
    rope_dim: int = 64,
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
    rows: str = "separate",
    interleaved: bool = False,
    scale: str = "none",
    write_k: bool = True,
    values: str = "valid",
    position_values: str = "valid",
    specials: bool = False,
) -> dict[str, Any]:
    """rows: those of `mla_kv_write`; in ``fused``, q_rope too is the last part of wider heads."""
    g, dt, rotary = generator(seed), FLOAT_DTYPES[dtype], rotary_dim or rope_dim
    q = floats(g, (n, q_heads, rope_dim + (32 if rows == "fused" else 0)), dt, specials)[..., -rope_dim:]
    kv_lora, k_rope = make_rows(g, n, lora_dim, rope_dim, dt, rows, specials)
    cos_sin = cos_sin_table(g, max_positions, rotary, FLOAT_DTYPES[cos_dtype])
    at = randint(g, 0, max_positions, (n,))
    kind = FLOAT_DTYPES[cache_dtype or dtype]
    return {
        "q_rope": q,
        "k_rope": k_rope,
        "kv_lora": kv_lora,
        "cos_sin_cache": cos_sin,
        "positions": odd_indices(at, max_positions, position_values, INDEX_DTYPES[position]),
        "kv_cache": make_cache(g, cache, slots, page_size, lora_dim + rope_dim, kind, cache_view),
        # One place on: an odd slot must meet a valid position, or the position alone decides.
        "slots": odd_indices(some_slots(g, n, slots), slots, values, INDEX_DTYPES[slot]).roll(1),
        "interleaved": interleaved,
        "kv_scale": make_scale(scale),
        "write_k": write_k,
    }


_bad, _bad_fp8 = refused(make, n=3, slots=32), refused(make, cache_dtype="e4m3")


_BF16 = torch.bfloat16


PROOF = Proof(
    oracle=oracle,
    make=make,
    samples=(
        *(Sample(f"{d}", {"dtype": d}) for d in DTYPES),
        *(Sample(f"{d}-cos-{d}", {"dtype": d, "cos_dtype": d, "n": 7}) for d in ("fp16", "bf16")),
        *(Sample(f"deepseek-{form}", {**DEEPSEEK, "q_heads": 16, "n": 3, "cache": form}) for form in FORMS),
        Sample("deepseek-v3", {**DEEPSEEK, "q_heads": 128, "n": 3, "rows": "fused"}),
        Sample("i32-i64", {"position": "i32"}),
        Sample("i64-i32", {"slot": "i32"}),
        Sample("one", {"n": 1}),
        Sample("empty", {"n": 0}, control="one"),
        Sample("past-one-block", {"n": 700, "slots": 1024, "q_heads": 2, "lora_dim": 64}),
        *(Sample(f"paged-{p}", {"cache": "paged", "page_size": p, "n": 20}) for p in (1, 3, 16)),
        *(Sample(f"{form}-padded", {"cache": form, "cache_view": "padded", "n": 9}) for form in FORMS),
        *(Sample(f"{r}-{d}", {"rows": r, "dtype": d, "n": 6}) for r in ("fused", "misaligned") for d in DTYPES),
        Sample("rows-with-a-head", {"rows": "heads", "cache": "heads"}),
        Sample("partial-rotary", {"rotary_dim": 32}),
        *(Sample(f"keep-k-{d}", {"write_k": False, "dtype": d, "n": 9}) for d in ("bf16", "fp32")),
        Sample("skip", {"n": 21, "values": "skip"}),
        Sample("nothing-written", {"n": 9, "values": "none"}),
        Sample("edge", {"n": 25, "values": "edge", "position_values": "edge"}),
        Sample("extreme", {"n": 31, "values": "extreme", "position_values": "extreme", "cache": "paged"}),
        Sample(
            "extreme-i32",
            {"n": 31, "values": "extreme", "position_values": "extreme", "slot": "i32", "position": "i32"},
        ),
        Sample("equal-slots", {"n": 6, "values": "equal"}),
        Sample("no-slots", {"slots": 0, "values": "none"}),
        Sample("no-positions", {"max_positions": 0, "position_values": "edge"}, control="one"),
        *(Sample(f"specials-{d}", {"dtype": d, "specials": True, "n": 9}) for d in DTYPES),
        Sample("far-slots", {"cache_view": "far", "slots": 6, "n": 6}, large=True),
        *(Sample(f"interleaved-{d}", {"interleaved": True, "dtype": d}, "feature:interleaved") for d in DTYPES),
        Sample(
            "interleaved-deepseek",
            {"interleaved": True, **DEEPSEEK, "rows": "fused", "cache": "paged", "n": 20},
            "feature:interleaved",
        ),
        *FP8_SAMPLES,
        Sample("e4m3-keep-k", {"cache_dtype": "e4m3", "write_k": False, "n": 20, "scale": "float"}, "feature:fp8_e4m3"),
        Sample(
            "e4m3-deepseek",
            {**DEEPSEEK, "cache_dtype": "e4m3", "cache": "paged", "scale": "float", "n": 20},
            "feature:fp8_e4m3",
        ),
    ),
    errors=(
        _bad("q-fp64", q_rope=lambda: _host.zeros(3, 4, 64, dtype=torch.float64)),
        _bad("q-none", q_rope=None),
        _bad("q-expanded", q_rope=lambda: _host.zeros(1, 4, 64, dtype=_BF16).expand(3, 4, 64)),
        _bad("k-other-dtype", k_rope=lambda: _host.zeros(3, 64)),
        _bad("k-other-dim", k_rope=lambda: _host.zeros(3, 32, dtype=_BF16)),
        _bad("k-two-heads", k_rope=lambda: _host.zeros(3, 2, 64, dtype=_BF16)),
        _bad("lora-other-dtype", kv_lora=lambda: _host.zeros(3, 128)),
        _bad("lora-none", kv_lora=None),
        _bad("rotary-odd", cos_sin_cache=lambda: _host.zeros(50, 63)),
        _bad("rotary-too-large", cos_sin_cache=lambda: _host.zeros(50, 128)),
        _bad("cos-other-dtype", cos_sin_cache=lambda: _host.zeros(50, 64).half()),
        _bad("positions-float", positions=lambda: _host.zeros(3)),
        _bad("cache-none", kv_cache=None),
        _bad("cache-other-row", kv_cache=lambda: _host.zeros(32, 128, dtype=_BF16)),
        _bad("cache-other-dtype", kv_cache=lambda: _host.zeros(32, 192)),
        _bad("cache-two-heads", kv_cache=lambda: _host.zeros(2, 16, 2, 192, dtype=_BF16)),
        _bad("slots-too-many", slots=lambda: _host.zeros(4, dtype=torch.int64)),
        _bad("scale-without-fp8", kv_scale=0.5),
        _bad_fp8("scale-zero", kv_scale=0.0),
        _bad("write-k-a-number", write_k=1),
    ),
    ragged={
        "n": (0, 80),
        "q_heads": (1, 9),
        "lora_dim": [64, 128],
        "rope_dim": [32, 64],
        "dtype": DTYPES,
        "position": ("i32", "i64"),
        "slot": ("i32", "i64"),
        "cache": FORMS,
        "page_size": [1, 3, 16],
        "slots": (96, 96),
        "cache_view": ("plain", "padded"),
        "rows": ("separate", "fused", "misaligned", "heads"),
        "values": ("valid", "skip", "edge", "extreme"),
        "position_values": ("valid", "edge", "extreme"),
    },
    fresh=Fresh(
        {
            **{name: replace(w, beside={"q_heads": (1, 2), **w.beside}) for name, w in FRESH_ROWS.items()},
            "n": Wide(ROTATED, {"q_heads": (1, 2), "lora_dim": 64, "rope_dim": 32, "slots": room_for("n")}),
            "max_positions": Wide(ROWS, {"n": MANY, "rope_dim": 32}),
            "q_heads": Wide(HEADS),
        },
        lambda p: (
            p["n"] * p["q_heads"] * p["rope_dim"]
            + (p["n"] + p["slots"]) * (p["lora_dim"] + p["rope_dim"])
            + 32 * p.get("max_positions", 0)
        ),
        {"n": (9, 40)},
    ),
)
