"""kv_write: its truth, its inputs and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hal import _host
from hal.ops.kv_write import SPEC
from hal.ops.proofs.fresh import TOKENS, Fresh, Wide, room_for
from hal.ops.proofs.inputs import DTYPES, refused
from hal.ops.proofs.judge import ROPE_SLACK, Want, largest
from hal.ops.proofs.rope_kv_write import FP8_SAMPLES, FRESH, want_of_rows
from hal.ops.rope_kv_write import SPEC as ROPE
from hal.ops.spec import Proof, Sample


def oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    everywhere = _host.ones(a["slots"].shape[0], dtype=torch.bool)
    want = {}
    for x in ("k", "v"):
        source, cache, scale = a[x], a[f"{x}_cache"], a[f"{x}_scale"]
        rows, slack = source, None
        if cache.dtype != source.dtype:
            by = float(_host.tensor(1.0 if scale is None else float(scale), dtype=torch.float32))
            rows = source.double() / by
            slack = torch.where(torch.isfinite(rows), rows.abs() * ROPE_SLACK, 0.0)
            rows = rows.clamp(-largest(cache.dtype), largest(cache.dtype))
        want[f"{x}_cache"] = want_of_rows(cache, a["slots"], everywhere, rows, slack)
    return want


def make(seed: int = 0, n: int = 5, **params: Any) -> dict[str, Any]:
    """Those of `rope_kv_write` that concern k, v, the caches and the slots."""
    a = ROPE.make(seed=seed, n=n, q_heads=1, **params)
    return {name: a[name] for name in SPEC.args}


_bad, _bad_fp8 = refused(make, n=3, slots=32), refused(make, cache_dtype="e4m3")


_BF16 = torch.bfloat16


_TAKEN = frozenset(
    {
        "n",
        "kv_heads",
        "head_dim",
        "v_head_dim",
        "dtype",
        "slot",
        "cache",
        "slots",
        "page_size",
        "cache_dtype",
        "cache_view",
        "qkv",
        "scale",
        "values",
        "specials",
    }
)


PROOF = Proof(
    oracle=oracle,
    make=make,
    samples=(
        *(Sample(f"{d}", {"dtype": d}) for d in DTYPES),
        Sample("i32", {"slot": "i32", "n": 9}),
        Sample("one", {"n": 1}),
        Sample("empty", {"n": 0}, control="one"),
        Sample("all-skipped", {"n": 9, "values": "none"}, control="one"),
        Sample("no-slots", {"slots": 0, "values": "none"}, control="one"),
        Sample("llama3-8b", {"n": 3, "kv_heads": 8, "head_dim": 128}),
        Sample("past-one-block", {"n": 700, "slots": 1024, "kv_heads": 1}),
        Sample("paged-16", {"cache": "paged", "n": 20}),
        Sample("paged-3", {"cache": "paged", "page_size": 3, "n": 20}),
        Sample("paged-pairs", {"cache": "paged", "cache_view": "pairs", "n": 20}),
        Sample("slots-padded", {"cache_view": "padded", "dtype": "fp16"}),
        Sample("paged-padded", {"cache": "paged", "cache_view": "padded", "n": 9}),
        *(Sample(f"fused-qkv-{d}", {"qkv": "fused", "dtype": d, "n": 6}) for d in DTYPES),
        *(Sample(f"misaligned-{d}", {"qkv": "misaligned", "dtype": d, "n": 6}) for d in DTYPES),
        Sample("v-head-dim", {"head_dim": 128, "v_head_dim": 64}),
        Sample("three-heads", {"kv_heads": 3}),
        Sample("skip", {"n": 21, "values": "skip"}),
        Sample("edge", {"n": 25, "values": "edge"}),
        Sample("extreme", {"n": 31, "values": "extreme", "cache": "paged"}),
        Sample("extreme-i32", {"n": 31, "values": "extreme", "slot": "i32"}),
        Sample("equal-slots", {"n": 6, "values": "equal"}),
        *(Sample(f"specials-{d}", {"dtype": d, "specials": True, "n": 9}) for d in DTYPES),
        Sample("far-slots", {"cache_view": "far", "slots": 6, "n": 6}, large=True),
        *(
            Sample(f"head-dim-{d}", {"head_dim": d, "n": 4, "cache": "paged"}, "feature:any_head_dim")
            for d in (40, 72, 192)
        ),
        *FP8_SAMPLES,
        Sample(
            "e4m3-paged-pairs",
            {"cache_dtype": "e4m3", "cache": "paged", "cache_view": "pairs", "n": 20},
            "feature:fp8_e4m3",
        ),
    ),
    errors=(
        _bad("k-fp64", k=lambda: _host.zeros(3, 2, 64, dtype=torch.float64)),
        _bad("k-rank-2", k=lambda: _host.zeros(3, 128, dtype=_BF16)),
        _bad("k-last-dim-strided", k=lambda: _host.zeros(3, 2, 128, dtype=_BF16)[..., ::2]),
        _bad("v-none", v=None),
        _bad("v-other-dtype", v=lambda: _host.zeros(3, 2, 64)),
        _bad("v-other-heads", v=lambda: _host.zeros(3, 3, 64, dtype=_BF16)),
        _bad("k-cache-other-dtype", k_cache=lambda: _host.zeros(32, 2, 64)),
        _bad("k-cache-none", k_cache=None),
        _bad("v-cache-smaller", v_cache=lambda: _host.zeros(31, 2, 64, dtype=_BF16)),
        _bad("v-cache-expanded", v_cache=lambda: _host.zeros(1, 2, 64, dtype=_BF16).expand(32, 2, 64)),
        _bad("slots-too-many", slots=lambda: _host.zeros(4, dtype=torch.int64)),
        _bad("slots-float", slots=lambda: _host.zeros(3)),
        _bad("scale-without-fp8", k_scale=0.5),
        _bad_fp8("scale-of-two", v_scale=lambda: _host.ones(2)),
        _bad_fp8("scale-zero", k_scale=0.0),
    ),
    ragged={
        **{name: r for name, r in ROPE.ragged.items() if name in _TAKEN and name != "cache"},
        "cache": ("slots", "paged"),
    },
    fresh=Fresh(
        {
            **{
                name: replace(w, beside={x: r for x, r in w.beside.items() if x in _TAKEN})
                for name, w in FRESH.wide.items()
                if name in _TAKEN
            },
            "n": Wide(TOKENS, {"kv_heads": 1, "head_dim": 64, "slots": room_for("n")}),
        },
        lambda p: 2 * p["head_dim"] * p["kv_heads"] * (p["n"] + p["slots"]),
        FRESH.beside,
    ),
)
