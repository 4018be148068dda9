"""extend_attention: its truth, its inputs and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from hal import _host
from hal.ops.extend_attention import SPEC
from hal.ops.proofs import _attention
from hal.ops.proofs.fresh import TOKENS, Wide, room_for
from hal.ops.proofs.inputs import generator, refused
from hal.ops.proofs.judge import Want
from hal.ops.spec import Proof, Sample


def oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    n, nnz, window = a["q"].shape[0], a["kv_indices"].shape[0], a["sliding_window"]
    qo, kv = ([min(max(x, 0), size) for x in a[p].tolist()] for p, size in (("qo_indptr", n), ("kv_indptr", nnz)))
    rows: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    for i, (begin, stop) in enumerate(pairwise(qo)):
        start, end = kv[i], max(kv[i], kv[i + 1])
        for t in range(begin, stop):
            own = end - (stop - t)
            first = max(start, own - window) if window >= 0 else start
            rows[t].append((first, own + 1 if a["causal"] else end))
    return _attention.want_of(a, rows)


def make(
    seed: int = 0,
    bs: int = 4,
    longest: int = 12,
    prefix: int = 25,
    lengths: str = "ragged",
    causal: bool = True,
    spare: int = 0,
    **inputs: Any,
) -> dict[str, Any]:
    """longest: new tokens of a request, up to; prefix: tokens before them, up to; spare: rows of no request.
    The rest: see `_attention.make_inputs`.
    """
    g = generator(seed)
    new = _attention.lengths(g, bs, longest, lengths)
    old = _attention.lengths(g, bs, prefix, "full" if lengths == "full" else "ragged") if prefix >= 0 else [0] * bs
    # A negative prefix: fewer keys than queries, so that the first of them see nothing.
    kv_lens = [max(0, m + p + min(prefix, 0)) for m, p in zip(new, old, strict=True)]
    made = _attention.make_inputs(g, sum(new) + spare, kv_lens, **inputs)
    kind, dtype = inputs.get("indptr_values", "valid"), inputs.get("indptr", "i32")
    made |= {"qo_indptr": _attention.indptr_of(new, kind, dtype), "causal": causal}
    return {name: made[name] for name in SPEC.args}


_bad = refused(make, bs=2, longest=3, prefix=2, lengths="full", slots=32, out="none", lse=False)


_MLA = {"q_heads": 4, "kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "cache_view": "shared", "bs": 2}
_PROMPT: dict[str, Any] = {"head_dim": 192, "v_head_dim": 128, "q_heads": 2, "kv_heads": 2}
"""DeepSeek's heads in a prompt."""
_MANY = {"bs": 1, "lengths": "full", "longest": 1, "prefix": 70_000, "slots": 72_000, "q_heads": 2, "kv_heads": 1}
"""So many keys that what sums lose with each tile of them adds up."""


_LONG = {"bs": 2, "lengths": "full", "longest": 150, "prefix": 130, "slots": 600, "q_heads": 2, "kv_heads": 1}

_DRAFTS = {
    "bs": 2, "lengths": "full", "longest": 6, "prefix": 8192, "slots": 20_000, "q_heads": 16, "kv_heads": 4,
    "head_dim": 128, "v_head_dim": 128, "cache_dtype": "e4m3", "scales": "tensor",
}  # fmt: skip
"""A few tokens of a request behind many keys of fp8, where drafts are verified."""


PROOF = Proof(
    oracle=oracle,
    make=make,
    samples=(
        *_attention.samples(bs=2, mla=_MLA),
        Sample("one", {"bs": 1, "longest": 1, "lengths": "full"}),
        Sample("no-prefix", {"prefix": 0, "longest": 30}),
        Sample("no-tokens", {"lengths": "empty"}, control="one"),
        Sample("spare-rows", {"spare": 7}),
        Sample("fewer-keys-than-queries", {"prefix": -5, "longest": 12}),
        Sample("skewed", {"bs": 9, "lengths": "skewed", "longest": 100}),
        Sample("long", _LONG),
        Sample("long-fp32", {**_LONG, "dtype": "fp32"}),
        Sample("past-one-block", {"bs": 300, "longest": 2, "prefix": 2, "slots": 1300, "q_heads": 2, "kv_heads": 1}),
        Sample("out-strided", {"out": "strided", "spare": 3}),
        Sample("not-causal", {"causal": False}),
        Sample("not-causal-long", {**_LONG, "causal": False}),
        Sample("window-long", {**_LONG, "sliding_window": 70}),
        Sample("window-not-causal", {"sliding_window": 4, "causal": False}),
        Sample("edge", {"bs": 8, "values": "edge", "indptr_values": "edge", "longest": 5, **_attention.ODD}),
        Sample("edge-i32", {"bs": 8, "values": "edge", "indptr_values": "edge", "longest": 5}),
        Sample(
            "extreme",
            {
                "bs": 24,
                "values": "extreme",
                "indptr_values": "extreme",
                "longest": 3,
                "prefix": 6,
                "cache": "paged",
                **_attention.ODD,
            },
        ),
        Sample("extreme-i32", {"bs": 24, "values": "extreme", "indptr_values": "extreme", "longest": 3, "prefix": 6}),
        Sample("far-slots", {"cache_view": "far", "slots": 6, "longest": 2, "prefix": 1, "bs": 2}, large=True),
        Sample("many-keys", {**_MANY, "head_dim": 64, "v_head_dim": 64, "dtype": "fp32"}, large=True),
        Sample("e4m3-drafts", _DRAFTS, "feature:fp8_e4m3", large=True),
        Sample(
            "mla-128-heads-in-runs",
            {**_MLA, "q_heads": 128, "bs": 1, "longest": 2, "prefix": 138, **_attention.IN_RUNS},
            "feature:mla",
        ),
        Sample(
            "head-dim-192-128-in-runs",
            {**_PROMPT, "bs": 1, "longest": 3, "prefix": 300, **_attention.IN_RUNS, "run": 128},
            "feature:any_head_dim",
        ),
    ),
    errors=(
        _bad("q-fp64", q=lambda: _host.zeros(6, 4, 64, dtype=torch.float64)),
        _bad("q-last-dim-strided", q=lambda: _host.zeros(6, 4, 128, dtype=torch.bfloat16)[..., ::2]),
        _bad("heads-no-multiple", q=lambda: _host.zeros(6, 3, 64, dtype=torch.bfloat16)),
        _bad("k-cache-other-dtype", k_cache=lambda: _host.zeros(32, 2, 64)),
        _bad("v-cache-other-rank", v_cache=lambda: _host.zeros(2, 16, 2, 64, dtype=torch.bfloat16)),
        _bad("v-cache-none", v_cache=None),
        _bad("indptr-empty", qo_indptr=lambda: _host.zeros(0).int(), kv_indptr=lambda: _host.zeros(0).int()),
        _bad("indptrs-disagree", kv_indptr=lambda: _host.zeros(4, dtype=torch.int32)),
        _bad("indptr-float", qo_indptr=lambda: _host.zeros(3)),
        _bad("indices-rank-2", kv_indices=lambda: _host.zeros(2, 4, dtype=torch.int32)),
        _bad("out-other-dtype", out=lambda: _host.zeros(6, 4, 64)),
        _bad("out-fewer-rows", out=lambda: _host.zeros(5, 4, 64, dtype=torch.bfloat16)),
        _bad("lse-other-heads", lse=lambda: _host.zeros(6, 2)),
        _bad("causal-text", causal="yes"),
        _bad("scale-text", scale="1"),
        _bad("window-minus-2", sliding_window=-2),
        _bad("cap-inf", logit_cap=float("inf")),
        _bad("scale-without-fp8", k_scale=0.5),
        _bad("v-scale-without-fp8", v_scale=lambda: _host.ones(1)),
    ),
    ragged={
        "bs": (0, 7),
        "longest": (0, 20),
        "prefix": (-3, 30),
        "spare": (0, 3),
        "causal": (True, False),
        **_attention.RAGGED,
    },
    fresh=_attention.fresh(
        480,
        {
            # Every query sees few keys, and the truth is no square.
            "longest": Wide(
                (2_305, 2_600),
                {
                    "bs": 1,
                    "prefix": (0, 30),
                    "lengths": "full",
                    "sliding_window": 20,
                    "causal": True,
                    "slots": room_for("longest"),
                    "spare": (0, 3),
                },
            ),
            "prefix": Wide(TOKENS, {"bs": 1, "lengths": "full", "longest": (1, 3), "slots": room_for("prefix")}),
        },
        lambda p: p["bs"] * (p["longest"] + max(p["prefix"], 0)) // (16 if p["lengths"] == "sparse" else 1),
        "longest",
    ),
)
