"""decode_attention: its truth, its inputs and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from hal import _host
from hal.ops.decode_attention import SPEC
from hal.ops.proofs import _attention
from hal.ops.proofs.fresh import TOKENS, Wide, room_for
from hal.ops.proofs.inputs import generator, refused
from hal.ops.proofs.judge import Want
from hal.ops.spec import Proof, Sample


def oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    nnz, window = a["kv_indices"].shape[0], a["sliding_window"]
    p = [min(max(x, 0), nnz) for x in a["kv_indptr"].tolist()]
    return _attention.want_of(a, [[(max(i, j - 1 - window) if window >= 0 else i, j)] for i, j in pairwise(p)])


def make(seed: int = 0, bs: int = 5, longest: int = 40, lengths: str = "ragged", **inputs: Any) -> dict[str, Any]:
    """lengths: see `_attention.lengths`; inputs: see `_attention.make_inputs`."""
    g = generator(seed)
    made = _attention.make_inputs(g, bs, _attention.lengths(g, bs, longest, lengths), **inputs)
    return {name: made[name] for name in SPEC.args}


_bad = refused(make, bs=2, longest=6, slots=32, out="none", lse=False)


_MLA = {"q_heads": 16, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "cache_view": "shared", "bs": 3}


PROOF = Proof(
    oracle=oracle,
    make=make,
    samples=(
        *_attention.samples(bs=3, mla=_MLA),
        Sample("one", {"bs": 1, "longest": 9, "lengths": "full"}),
        Sample("one-key-each", {"longest": 1, "lengths": "full"}),
        Sample("all-empty", {"lengths": "empty"}),
        Sample("skewed", {"bs": 9, "lengths": "skewed", "longest": 200}),
        Sample("long", {"bs": 2, "lengths": "full", "longest": 1500, "slots": 3200, "q_heads": 2, "kv_heads": 1}),
        Sample(
            "long-fp32",
            {
                "bs": 2,
                "lengths": "skewed",
                "longest": 2100,
                "slots": 2400,
                "q_heads": 2,
                "kv_heads": 2,
                "dtype": "fp32",
            },
        ),
        Sample("past-one-block", {"bs": 300, "longest": 5, "slots": 1600, "q_heads": 2, "kv_heads": 1}),
        Sample("out-strided", {"out": "strided"}),
        Sample(
            "window-long",
            {"sliding_window": 600, "bs": 2, "lengths": "full", "longest": 1500, "slots": 3200, "q_heads": 2},
        ),
        Sample("edge", {"bs": 8, "values": "edge", "indptr_values": "edge", **_attention.ODD}),
        Sample("edge-i32", {"bs": 8, "values": "edge", "indptr_values": "edge"}),
        Sample(
            "extreme",
            {
                "bs": 24,
                "values": "extreme",
                "indptr_values": "extreme",
                "longest": 9,
                "cache": "paged",
                **_attention.ODD,
            },
        ),
        Sample("extreme-i32", {"bs": 24, "values": "extreme", "indptr_values": "extreme", "longest": 9}),
        Sample("far-slots", {"cache_view": "far", "slots": 6, "longest": 3, "bs": 2}, large=True),
        Sample("mla-128-heads", {**_MLA, "q_heads": 128, "bs": 2}, "feature:mla"),
        Sample(
            "mla-128-heads-in-runs",
            {**_MLA, "q_heads": 128, "bs": 1, "longest": 140, **_attention.IN_RUNS},
            "feature:mla",
        ),
        Sample("e4m3-mla-128-heads", {**_MLA, "cache_dtype": "e4m3", "q_heads": 128, "bs": 2}, "feature:fp8_e4m3"),
    ),
    errors=(
        _bad("q-fp64", q=lambda: _host.zeros(2, 4, 64, dtype=torch.float64)),
        _bad("q-rank-2", q=lambda: _host.zeros(2, 256, dtype=torch.bfloat16)),
        _bad("q-last-dim-strided", q=lambda: _host.zeros(2, 4, 128, dtype=torch.bfloat16)[..., ::2]),
        _bad("heads-no-multiple", q=lambda: _host.zeros(2, 3, 64, dtype=torch.bfloat16)),
        _bad("k-cache-other-dtype", k_cache=lambda: _host.zeros(32, 2, 64)),
        _bad("k-cache-other-head-dim", k_cache=lambda: _host.zeros(32, 2, 32, dtype=torch.bfloat16)),
        _bad("v-cache-other-dtype", v_cache=lambda: _host.zeros(32, 2, 64).to(torch.float8_e5m2)),
        _bad("v-cache-smaller", v_cache=lambda: _host.zeros(31, 2, 64, dtype=torch.bfloat16)),
        _bad("v-cache-other-heads", v_cache=lambda: _host.zeros(32, 1, 64, dtype=torch.bfloat16)),
        _bad("v-cache-none", v_cache=None),
        _bad("v-cache-other-rank", v_cache=lambda: _host.zeros(2, 16, 2, 64, dtype=torch.bfloat16)),
        _bad("indptr-too-short", kv_indptr=lambda: _host.zeros(2, dtype=torch.int32)),
        _bad("indptr-float", kv_indptr=lambda: _host.zeros(3)),
        _bad("indices-strided", kv_indices=lambda: _host.zeros(8, dtype=torch.int32)[::2]),
        _bad("out-other-dtype", out=lambda: _host.zeros(2, 4, 64)),
        _bad("out-other-shape", out=lambda: _host.zeros(2, 4, 32, dtype=torch.bfloat16)),
        _bad("out-expanded", out=lambda: _host.zeros(1, 4, 64, dtype=torch.bfloat16).expand(2, 4, 64)),
        _bad("lse-bf16", lse=lambda: _host.zeros(2, 4, dtype=torch.bfloat16)),
        _bad("scale-none", scale=None),
        _bad("scale-nan", scale=float("nan")),
        _bad("window-minus-2", sliding_window=-2),
        _bad("window-float", sliding_window=3.0),
        _bad("cap-negative", logit_cap=-1.0),
        _bad("scale-without-fp8", k_scale=0.5),
        _bad("v-scale-without-fp8", v_scale=lambda: _host.ones(1)),
    ),
    ragged={"bs": (0, 9), "longest": (0, 70), **_attention.RAGGED, "lengths": ("ragged", "skewed", "empty")},
    fresh=_attention.fresh(
        240,
        {"longest": Wide(TOKENS, {"bs": (1, 2), "lengths": "full", "slots": room_for("bs", "longest")})},
        lambda p: p["bs"] * p["longest"] // (16 if p["lengths"] == "sparse" else 1),
        "",
    ),
)
