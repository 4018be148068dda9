"""qk_norm_rope_kv_write: its truth, its inputs and its samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hal import _host
from hal.ops.proofs.inputs import FLOAT_DTYPES, generator, refused
from hal.ops.proofs.judge import Candidate, Want, norm_rope_slack
from hal.ops.proofs.rope_kv_write import FRESH, angles, sum_terms, want_of_caches
from hal.ops.qk_norm_rope_kv_write import SPEC, normalize
from hal.ops.rope_kv_write import SPEC as ROPE
from hal.ops.rope_kv_write import rotate
from hal.ops.spec import ErrorSample, Proof, Sample


def oracle(a: Mapping[str, Any]) -> dict[str, Want]:
    (valid, cos, sin), rotary, interleaved = angles(a), a["cos_sin_cache"].shape[1], a["interleaved"]
    eps, step = float(_host.tensor(a["eps"], dtype=torch.float32)), norm_rope_slack(a["q"].shape[-1])
    want: dict[str, Want] = {}
    truth: dict[str, tuple[Tensor, Tensor]] = {}
    for x in ("q", "k"):
        y = normalize(a[x].double(), a[f"{x}_weight"].double(), eps)
        value = torch.cat([rotate(y, cos, sin, interleaved), y[..., rotary:]], dim=-1)
        terms = torch.cat([sum_terms(y, cos, sin, interleaved), y[..., rotary:].abs()], dim=-1)
        truth[x] = value, terms
        named = _host.zeros(value.shape, dtype=torch.bool)
        if x == "q" or a["write_k"]:
            named[:] = valid.view(-1, 1, 1)
        want[x] = Want(named, (Candidate(value, terms * step),))
    return want | want_of_caches(a, valid, *truth["k"], step)


def make(seed: int = 0, n: int = 5, weight: str | None = None, eps: float = 1e-6, **params: Any) -> dict[str, Any]:
    """Those of `rope_kv_write`; `weight` is the dtype of the weights, None: q's."""
    a = ROPE.make(seed=seed, n=n, **params)
    g, d = generator(seed + 1), a["q"].shape[-1]
    kind = FLOAT_DTYPES[weight] if weight else a["q"].dtype
    a |= {f"{x}_weight": (1 + _host.randn(d, generator=g) / 4).to(kind) for x in ("q", "k")}
    return {name: a[name] if name != "eps" else eps for name in SPEC.args}


_bad = refused(make, n=3, slots=32)


_BF16 = torch.bfloat16


_SKIP = ("smollm2", "llama3-8b")
"""Shapes that have no norm of q and k; Qwen3's are among those that are left."""


PROOF = Proof(
    oracle=oracle,
    make=make,
    samples=(
        *(
            replace(s, control="one") if s.name == "no-positions" else s
            for s in ROPE.samples
            if not s.name.startswith(_SKIP)
        ),
        Sample("qwen3-0.6b", {"q_heads": 16, "kv_heads": 8, "head_dim": 128, "n": 3, "cache": "paged"}),
        *(Sample(f"weight-fp32-{d}", {"dtype": d, "weight": "fp32"}) for d in ("fp16", "bf16")),
        Sample("eps-large", {"eps": 0.5, "dtype": "fp32"}),
        Sample("eps-1", {"eps": 1, "n": 3}),
    ),
    errors=(
        *(
            ErrorSample(e.name, e.argument, lambda e=e: {**make(n=3, slots=32), **e.make()})  # type: ignore[misc]
            for e in ROPE.errors
        ),
        _bad("weight-fp64", q_weight=lambda: _host.ones(64, dtype=torch.float64)),
        _bad("weight-other-float", q_weight=lambda: _host.ones(64).half(), k_weight=lambda: _host.ones(64).half()),
        _bad("weight-none", k_weight=None),
        _bad("weight-too-long", q_weight=lambda: _host.ones(128, dtype=_BF16)),
        _bad("k-weight-other-dtype", k_weight=lambda: _host.ones(64)),
        _bad("weight-a-head-each", k_weight=lambda: _host.ones(2, 64, dtype=_BF16)),
        _bad("eps-zero", eps=0.0),
        _bad("eps-nan", eps=math.nan),
        _bad("eps-none", eps=None),
    ),
    ragged={**ROPE.ragged, "eps": [1e-6, 1e-5, 0.1]},
    fresh=FRESH,
)
